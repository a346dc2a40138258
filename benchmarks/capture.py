"""What does the capture cost SGLang's scheduler? Tap and ring only: nothing is encoded or sent.

    .venv/bin/python benchmarks/capture.py

README.md beside this file says what is measured and how.
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from capture_arm import Arm, Turn
from capture_host import STAGES
from capture_stages import STEP
from draftfeed_producer.engines.config import SGLangConfig
from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.engines.sglang.slabs import SlabShape
from draftfeed_producer.target import TargetConfig, load_target
from report import leave, options_of, say
from this_machine import this_machine

HERE = Path(__file__).parent
BAR = 0.97
GPU_GOAL = 0.99
CONFIDENCE = 0.95
ARMS = ("off", "aux", "on")
RATIOS = (("off", "on"), ("aux", "on"), ("off", "aux"))
"""The first one is what is judged."""
SHOWN_STAGES = (
    ("hook", "after sampling, before the next batch is prepared"),
    ("row map", "  request and position of each row"),
    ("reserve", "  slots of the ring"),
    ("gather", "  packed states into the ring"),
    ("copy", "with SGLang's own read-back"),
    ("ring submit", "  the copies to the slabs; on a GPU they are only issued here"),
    ("hand over", "while SGLang processes the results"),
    ("announce", "  word to the producer, once for each piece"),
)
OUTERMOST = ("hook", "copy", "hand over")

Rounds = list[dict[str, Turn]]


class Bound(NamedTuple):
    median: float
    least: float
    most: float
    lower: float | None
    """One-sided bound of the median, an order statistic (sign test). None: too few rounds."""


def main() -> int:
    options = _options()
    random_tokens = random.Random(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # none of its processes outlives it
    _settle(options.python)
    machine = this_machine()
    say(options, f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} before")
    arguments, slabs = _engine(options)
    with ExitStack() as stack:
        arms = [_start(stack, options, name, arguments, slabs) for name in ARMS]
        rounds = _play(options, arms, random_tokens)
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "stages.json"
        os.environ[STAGES] = str(path)
        timed = _start(stack, options, "timed", arguments, slabs)
        say(options, "the stages of a step, one by one")
        turns = [
            timed.turn(_prompts(options, random_tokens), options.tokens)
            for _ in range(1 + options.timed_rounds)
        ]
        stages = json.loads(path.read_text())
    result = _document(options, machine, rounds, stages, turns[1:])
    for line in _words(result):
        say(options, line)
    leave(options, result)
    return 0


def lower_bound(values: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """Of the median of what they are drawn from: the k-th smallest value, with the largest k for
    which fewer than k of n values lie below the median with probability <= 1 - confidence.

    That probability is P(Binomial(n, 1/2) < k), whatever the distribution. n = 20: the 6th.
    """
    n = len(values)
    below, k = 0.0, 0
    while (below := below + math.comb(n, k) / 2**n) <= 1 - confidence:
        k += 1
    return sorted(values)[k - 1] if k else None


def _play(options: argparse.Namespace, arms: Sequence[Arm], tokens: random.Random) -> Rounds:
    """Every arm answers the same prompts in a round; who is first goes round. The first turn of
    each is thrown away: memory is touched and threads are made in it."""
    rounds: Rounds = []
    for number in range(-1, options.rounds):
        prompts = _prompts(options, tokens)
        first = number % len(arms)
        order = [*arms[first:], *arms[:first]]
        turns = {arm.name: arm.turn(prompts, options.tokens) for arm in order}
        if number < 0:
            continue
        rounds.append(turns)
        costs = ", ".join(f"{name} {turns[name].cpu_us_per_token:.1f}" for name in ARMS)
        say(options, f"round {number + 1}: CPU us per token: {costs}")
    return rounds


def _prompts(options: argparse.Namespace, tokens: random.Random) -> list[list[int]]:
    return [[tokens.randrange(3, 400) for _ in range(options.prompt)] for _ in range(options.batch)]


def _engine(options: argparse.Namespace) -> tuple[dict[str, Any], SlabShape]:
    """What the SGLang engine itself would start, for this target and a machine without a GPU."""
    target = load_target(TargetConfig(path=_target(options.target)))
    longest = options.batch * (options.prompt + options.tokens)
    config = SGLangConfig(
        concurrency=options.batch,
        dtype="float32",
        args={
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "max_total_tokens": longest + 1024,
        },
    )
    engine = SGLangEngine(config, target, options.layers)
    return engine._arguments(target), engine._engine._slabs


def _target(path: str | None) -> str:
    if path is not None:
        return path
    from draftfeed_deploy import smollm2

    return str(smollm2.prepare())


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _start(
    stack: ExitStack, options: argparse.Namespace, name: str, arguments: Any, slabs: SlabShape
) -> Arm:
    say(options, f"starting the arm {name!r}")
    arm = Arm(name, options.python, arguments, slabs)
    stack.callback(arm.close)
    return arm


def _settle(python: str) -> None:
    """The scheduler has the last core to itself, one thread; this process has the others."""
    if not Path(python).exists():
        raise SystemExit(f"{python} is not there: `make sglang` makes it")
    *ours, last = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = str(last)
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if ours:
        os.sched_setaffinity(0, ours)


def _document(
    options: argparse.Namespace,
    machine: dict[str, Any],
    rounds: Rounds,
    stages: dict[str, Any],
    timed: Sequence[Turn],
) -> dict[str, Any]:
    return {
        "machine": machine,
        "target": Path(_target(options.target)).name,
        "batch": options.batch,
        "prompt_tokens": options.prompt,
        "new_tokens": options.tokens,
        "arms": {name: _arm_summary([turns[name] for turns in rounds]) for name in ARMS},
        "ratios": {f"{a}/{b}": _ratio(rounds, a, b)._asdict() for a, b in RATIOS},
        "bar": BAR,
        "stages": stages,
        "timed": _arm_summary(timed),
        "rounds": [{name: turn._asdict() for name, turn in turns.items()} for turns in rounds],
    }


def _arm_summary(turns: Sequence[Turn]) -> dict[str, Any]:
    rows = sum(turn.rows for turn in turns)
    received = sum(turn.receiver_cpu_seconds for turn in turns)
    return {
        "cpu_us_per_token": median(turn.cpu_us_per_token for turn in turns),
        "tokens_per_second": median(turn.tokens_per_second for turn in turns),
        "rows": rows,
        "receiver_cpu_us_per_row": 1e6 * received / rows if rows else None,
    }


def _ratio(rounds: Rounds, a: str, b: str) -> Bound:
    """CPU seconds per token of a, over those of b in the same round: 1 when b costs no more."""
    ratios = [turns[a].cpu_us_per_token / turns[b].cpu_us_per_token for turns in rounds]
    return Bound(median(ratios), min(ratios), max(ratios), lower_bound(ratios))


def _words(result: dict[str, Any]) -> list[str]:
    return [*_arm_words(result), *_ratio_words(result), *_stage_words(result)]


def _arm_words(result: dict[str, Any]) -> list[str]:
    lines = [f"{'arm':6}{'CPU us/token':>14}{'tokens/s':>12}   medians of {len(result['rounds'])}"]
    for name, arm in result["arms"].items():
        rate = arm["tokens_per_second"]
        lines.append(f"{name:6}{arm['cpu_us_per_token']:14.1f}{rate:12.1f}")
    return lines


def _ratio_words(result: dict[str, Any]) -> list[str]:
    lines = ["CPU seconds per token, paired by round: median (least to most), lower 95% bound"]
    for name, ratio in result["ratios"].items():
        bound = Bound(**ratio)
        lower = "needs 5 rounds" if bound.lower is None else f"{bound.lower:.4f}"
        spread = f"{bound.median:.4f} ({bound.least:.4f} to {bound.most:.4f})"
        lines.append(f"  {name:8}{spread}   {lower}{_judged(name, bound)}")
    return lines


def _judged(name: str, bound: Bound) -> str:
    if name != "/".join(RATIOS[0]) or bound.lower is None:
        return ""
    word = "holds" if bound.lower >= BAR else "MISSED"
    return f"   {word}: >= {BAR} (the goal for GPUs, {GPU_GOAL}, is not verified)"


def _stage_words(result: dict[str, Any]) -> list[str]:
    stages = result["stages"]
    lines = ["us per pass in the scheduler, medians of the timed arm"]
    for stage, what in SHOWN_STAGES:
        lines.append(f"  {stage:12}{stages[stage]['median_us']:9.1f}   {what}")
    step = stages[STEP]["median_us"]
    ours = sum(stages[stage]["median_us"] for stage in OUTERMOST)
    lines.append(
        f"  {'together':12}{ours:9.1f}   of a step of {step:.1f}: {100 * ours / step:.2f}%"
    )
    received = result["arms"]["on"]["receiver_cpu_us_per_row"]
    lines.append(f"in the producer: {received:.1f} us of CPU to receive a row")
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What does the capture cost SGLang's scheduler?")
    parser.add_argument("--rounds", type=int, default=20, help="of all three arms")
    parser.add_argument(
        "--timed-rounds", type=int, default=3, help="of the arm whose stages are timed"
    )
    parser.add_argument("--batch", type=int, default=16, help="requests at a time")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each")
    parser.add_argument("--tokens", type=int, default=64, help="generated by each")
    parser.add_argument("--target", help="model directory; by default SmolLM2-135M")
    parser.add_argument("--layers", type=_ids, help="ids to capture; by default five of them")
    parser.add_argument(
        "--python",
        default=str(HERE.parent / ".venv-sglang" / "bin" / "python"),
        help="the interpreter that has SGLang",
    )
    return options_of(parser, "capture-cpu.json")


if __name__ == "__main__":
    sys.exit(main())
