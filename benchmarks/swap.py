"""Does generation notice that the training node is swapped?

    .venv/bin/python benchmarks/swap.py

README.md beside this file says what is measured and how.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import leave, options_of, say
from rounds import Spread
from swap_round import Round, Setup, play
from this_machine import this_machine

RATE_BAR = 0.97
GAP_BAR = 1.5
FIRST_SAMPLE_BAR_SECONDS = 1.0


def main() -> int:
    options = _options()
    producer_cores, consumer_cores = _cores()
    os.sched_setaffinity(0, consumer_cores)  # this process polls
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # none of its processes outlives it
    setup = Setup(
        engine=options.engine,
        samples=options.samples,
        rate=options.rate,
        target=_target(options.engine),
        how=options.how,
        begin_share=options.at,
        window_seconds=options.window,
        producer_cores=producer_cores,
        consumer_cores=consumer_cores,
    )
    machine = this_machine()
    say(options, f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} before")
    say(options, f"{setup.engine} engine, {setup.samples} samples a round, swap by {setup.how}")
    pairs: list[tuple[Round, Round]] = []
    for _ in range(options.rounds):
        swap = _round(setup, None)
        pairs.append((swap, _round(setup, swap.during.seconds)))
        say(options, _line(len(pairs), *pairs[-1]))
    summary = summarise(pairs)
    result = _document(machine, setup, pairs, summary)
    for line in words(result):
        say(options, line)
    leave(options, result)
    return 1 if summary["lost"] or summary["duplicated"] else 0


def summarise(pairs: Sequence[tuple[Round, Round]]) -> dict[str, Any]:
    """What the rounds say together. Rates in tokens/s, times in seconds."""
    swaps = [swap for swap, _ in pairs]
    whole = [pair for pair in pairs if pair[0].whole and pair[1].whole]
    rates = [
        swap.during.tokens_per_second / control.during.tokens_per_second
        for swap, control in whole
        if control.during.tokens
    ]
    gaps = [
        swap.during.longest_gap_seconds / control.during.longest_gap_seconds
        for swap, control in whole
        if control.during.longest_gap_seconds
    ]
    return {
        "before": _spread([swap.before.tokens_per_second for swap in swaps]),
        "during": _spread([swap.during.tokens_per_second for swap, _ in whole]),
        "after": _spread([swap.after.tokens_per_second for swap, _ in whole]),
        "rate_ratio": _spread(rates),
        "gap": _spread([swap.during.longest_gap_seconds for swap, _ in whole]),
        "control_gap": _spread([control.during.longest_gap_seconds for _, control in whole]),
        "gap_ratio": _spread(gaps),
        "start": _spread([swap.start_seconds for swap in swaps]),
        "first_sample": _spread([swap.first_sample_seconds for swap in swaps]),
        "stop": _spread([swap.stop_seconds for swap in swaps]),
        "lost": sum(one.lost for pair in pairs for one in pair),
        "duplicated": sum(one.duplicated for pair in pairs for one in pair),
        "old_exits": [swap.old_exit for swap in swaps],
    }


def words(result: dict[str, Any]) -> list[str]:
    """The table."""
    summary = {
        name: Spread(**value) if isinstance(value, dict) else value
        for name, value in result["summary"].items()
    }
    exits = ", ".join(sorted({str(code) for code in summary["old_exits"]}))
    rate, gap, first = summary["rate_ratio"], summary["gap_ratio"], summary["first_sample"]
    first_bar = _bar(first, "<=", FIRST_SAMPLE_BAR_SECONDS)
    return [
        "medians (and all from ... to) over the rounds",
        f"  tokens/s before the swap          {summary['before']}",
        f"           during it                {summary['during']}",
        f"           after it                 {summary['after']}",
        f"  during / control                  {rate}   {_bar(rate, '>=', RATE_BAR)}",
        f"  longest gap between steps, s      {summary['gap']}",
        f"           in the control           {summary['control_gap']}",
        f"  gap / control                     {gap}   {_bar(gap, '<=', GAP_BAR)}",
        f"  new node: begin to OPEN, s        {summary['start']}",
        f"           OPEN to first sample, s  {first}   {first_bar}",
        f"  old node: ended after, s          {summary['stop']}, exit code {exits}",
        f"  samples lost {summary['lost']}, duplicated {summary['duplicated']}",
    ]


def _bar(spread: Spread | None, sign: str, bar: float) -> str:
    if spread is None:
        return "generation ended before the swap: use more --samples"
    held = spread.median >= bar if sign == ">=" else spread.median <= bar
    return f"{'holds' if held else 'MISSED'}: {sign} {bar}"


def _line(number: int, swap: Round, control: Round) -> str:
    during, idle = swap.during, control.during
    return (
        f"round {number}: {during.seconds:.1f} s, {during.tokens_per_second:.1f} tokens/s and "
        f"longest gap {during.longest_gap_seconds:.3f} s; control {idle.tokens_per_second:.1f} and "
        f"{idle.longest_gap_seconds:.3f}; first sample {swap.first_sample_seconds:.2f} s after "
        f"OPEN; lost {swap.lost + control.lost}, duplicated {swap.duplicated + control.duplicated}"
    )


def _spread(values: list[float]) -> Spread | None:
    return Spread.of(values) if values else None


def _round(setup: Setup, idle_seconds: float | None) -> Round:
    with tempfile.TemporaryDirectory(prefix="draftfeed-swap-") as directory:
        return play(Path(directory), setup, idle_seconds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Does generation notice a swap?")
    parser.add_argument("--engine", choices=["transformers", "synthetic"], default="transformers")
    parser.add_argument("--how", choices=["takeover", "drain"], default="takeover")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of swap and control")
    parser.add_argument("--samples", type=int, default=48, help="prompts a round, at most 200")
    parser.add_argument("--at", type=float, default=1 / 3, help="share trained before the swap")
    parser.add_argument("--window", type=float, default=25.0, help="seconds from the swap on")
    parser.add_argument("--rate", type=float, default=500.0, help="rows/s, synthetic engine only")
    return options_of(parser, "swap.json")


def _cores() -> tuple[frozenset[int], frozenset[int]]:
    """One for the producer, the others for the consumers."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        sys.stderr.write("there is one core only: the consumers share it, the bars mean nothing\n")
    return frozenset([first]), frozenset(others or [first])


def _target(engine: str) -> str:
    if engine == "synthetic":
        return ""
    from draftfeed_deploy import smollm2

    return json.dumps(str(smollm2.prepare()))


def _document(
    machine: dict[str, Any],
    setup: Setup,
    pairs: Sequence[tuple[Round, Round]],
    summary: dict[str, Any],
) -> dict[str, Any]:
    settings = {"engine": setup.engine, "samples": setup.samples, "how": setup.how}
    rounds = [{"swap": _plain(swap), "control": _plain(control)} for swap, control in pairs]
    return {"machine": machine, "setup": settings, "rounds": rounds, "summary": _plain(summary)}


def _plain(value: Any) -> Any:
    """Named tuples as objects."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


if __name__ == "__main__":
    sys.exit(main())
