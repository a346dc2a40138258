"""What does it cost to have many producers and many members, at the same rate in all?

    .venv/bin/python benchmarks/scale.py

README.md beside this file says what is measured and how.
"""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from draftfeed_producer.engines.synthetic import (
    SyntheticConfig,
    synthetic_ids,
    synthetic_sample,
)
from report import leave, options_of, say
from rounds import Spread
from scale_cell import Cell, Plan, play
from this_machine import this_machine

PRODUCERS, MEMBERS = (1, 4, 16, 32), (1, 4, 8)
DEFAULT = ("1x1", "1x1L", "4x4", "32x1", "1x8", "32x8")
LONG = 8
"""Times as long are the samples of a cell that ends with L."""
SYNTHETIC_SAMPLES = 40
BAR = 1.1
"""32x8 over 1x1, CPU seconds a GB."""
COSTS = {
    "cost": "in all",
    "delivery_cost": "without making, encoding and storing samples",
    "busy_cost": "in all, without what is used when nothing is sent",
}


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # none of its processes outlives it
    machine = this_machine()
    say(options, f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} before")
    cells: dict[str, list[Cell]] = {name: [] for name in options.cells}
    for number in range(options.rounds):
        for name in options.cells:
            cell = _play(name, options)
            cells[name].append(cell)
            say(options, f"round {number}: {_line(name, cell)}")
    summary = {name: summarise(some) for name, some in cells.items()}
    setup = {
        "megabytes_per_second": options.rate,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "synthetic_seconds_per_gb": synthetic_cost(),
    }
    rounds = {name: [cell._asdict() for cell in some] for name, some in cells.items()}
    document = {"machine": machine, "setup": setup, "summary": summary, "rounds": rounds}
    for line in words(document):
        say(options, line)
    leave(options, document)
    return 0


def _play(name: str, options: argparse.Namespace) -> Cell:
    producers, members = map(int, name.removesuffix("L").split("x"))
    longer = LONG if name.endswith("L") else 1
    plan = Plan(producers, members, longer, options.rate, options.idle, options.seconds)
    with tempfile.TemporaryDirectory(prefix="draftfeed-scale-") as directory:
        return play(Path(directory), plan)


def synthetic_cost() -> float:
    """CPU seconds that the synthetic engine takes for a GB of states; they are no part of a
    delivery, and a target takes others."""
    config = SyntheticConfig(samples=SYNTHETIC_SAMPLES, prompt_tokens=40, response_tokens=60)
    ids = list(synthetic_ids(config))
    synthetic_sample(ids[0], config)  # its tables are made once
    began = time.thread_time()
    size = sum(synthetic_sample(id, config).hidden_states.nbytes for id in ids)
    return (time.thread_time() - began) / (size / 1e9)


def summarise(cells: list[Cell]) -> dict[str, Any]:
    """Of one cell's rounds; numbers that `words` prints and the simulation takes."""
    first = cells[0]
    parts = sorted({name for cell in cells for name in cell.cpu_seconds})
    processes = first.producers + first.members
    return {
        "producers": first.producers,
        "members": first.members,
        "megabytes_per_second": _spread(c.logical_bytes / 1e6 / c.seconds for c in cells),
        "cost": _spread(cell.cost for cell in cells),
        "delivery_cost": _spread(cell.delivery_cost for cell in cells),
        "busy_cost": _spread(cell.busy_cost for cell in cells),
        "cost_by_thread": {
            name: _spread(c.cpu_seconds.get(name, 0.0) / c.gigabytes for c in cells)
            for name in parts
        },
        "sample_bytes": _spread(c.logical_bytes / c.samples for c in cells),
        "idle_by_thread": {
            name: median(c.idle_cpu_seconds.get(name, 0.0) / c.idle_seconds for c in cells)
            for name in parts
        },
        "idle_ms_per_process": _spread(
            1000 * sum(c.idle_cpu_seconds.values()) / c.idle_seconds / processes for c in cells
        ),
        "control_messages_per_sample": _spread(c.control_messages / c.samples for c in cells),
        "chunks_per_sample": _spread(c.chunks / c.samples for c in cells),
        "jain": _spread(cell.jain for cell in cells),
        "most_over_least": _spread(cell.most_over_least for cell in cells),
        "producer_mb": _spread(cell.producer_mb for cell in cells),
        "member_mb": _spread(cell.member_mb for cell in cells),
    }


def _spread(values: Any) -> dict[str, float]:
    return Spread.of(values)._asdict()


def words(result: dict[str, Any]) -> list[str]:
    """The table, and what is to be said of it."""
    summary: dict[str, dict[str, Any]] = result["summary"]
    lines = [
        "medians (and all from ... to) over the rounds; CPU seconds for a logical GB",
        f"{'':6} {'in all':>22} {'delivery':>22} {'busy':>6} {'idle ms/s':>9} "
        f"{'control/sample':>14} {'Jain':>6} {'most/least':>10} {'MB each':>9}",
    ]
    for name, cell in summary.items():
        idle, control, jain, ratio, producer, member = (
            cell[what]["median"]
            for what in (
                "idle_ms_per_process",
                "control_messages_per_sample",
                "jain",
                "most_over_least",
                "producer_mb",
                "member_mb",
            )
        )
        cost, delivery = (Spread(**cell[what]).times(1, 2) for what in ("cost", "delivery_cost"))
        lines.append(
            f"{name:6} {cost:>22} {delivery:>22} "
            f"{cell['busy_cost']['median']:6.2f} "
            f"{idle:9.2f} {control:14.1f} {jain:6.3f} {ratio:10.2f} {producer:4.0f},{member:4.0f}"
        )
    if "1x1" in summary and "32x8" in summary:
        lines += [_judged(what, summary) for what in ("cost", "delivery_cost", "busy_cost")]
    return lines


def _judged(what: str, summary: dict[str, dict[str, Any]]) -> str:
    ratio = summary["32x8"][what]["median"] / summary["1x1"][what]["median"]
    verdict = "holds" if ratio <= BAR else "MISSED"
    return f"32x8 / 1x1, {COSTS[what]}: {ratio:.2f}, {verdict}: <= {BAR}"


def _line(name: str, cell: Cell) -> str:
    threads = sorted(cell.cpu_seconds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {seconds / cell.gigabytes:.2f}" for name, seconds in threads[:6])
    processes = cell.producers + cell.members
    idle = ", ".join(
        f"{name} {1000 * seconds / cell.idle_seconds / processes:.1f}"
        for name, seconds in sorted(cell.idle_cpu_seconds.items(), key=lambda item: -item[1])[:4]
    )
    return (
        f"{name}: {cell.logical_bytes / 1e6 / cell.seconds:.0f} MB/s, {cell.cost:.2f} CPU s/GB, "
        f"delivery {cell.delivery_cost:.2f}; {parts}; idle, ms/s of each process: {idle}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Many producers and many members.")
    parser.add_argument(
        "--cells",
        nargs="+",
        default=list(DEFAULT),
        metavar="NxM",
        help=f"producers x members (default: {' '.join(DEFAULT)}), or all",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=100.0, help="MB/s in all (default: 100)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one cell (default: 8)")
    parser.add_argument("--idle", type=float, default=3.0, help="before that, nothing to send")
    parser.add_argument("--quick", action="store_true", help="1x1 and 4x2, once, for seconds")
    options = options_of(parser, "scale.json")
    if options.cells == ["all"]:
        options.cells = [f"{n}x{m}" for n in PRODUCERS for m in MEMBERS]
    if options.quick:
        options.cells, options.rounds, options.rate = ["1x1", "4x2"], 1, 40.0
        options.seconds, options.idle = 3.0, 1.0
    return options


if __name__ == "__main__":
    sys.exit(main())
