"""What saturates first, and which layout serves 30,000 tokens a second: writes docs/scale.md.

    .venv/bin/python benchmarks/simulate.py

Costs come from results/scale.json, which benchmarks/scale.py leaves with --write. README.md beside
this file says how.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from simulation import GB, Cost, Costs, Layout, Outcome, simulate

MEASURED = Path(__file__).parent / "results" / "scale.json"
PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
TOKEN_BYTES = 5 * 5120 * 2
GOAL_TOKENS = 30_000
SAMPLE_TOKENS = 828
GBIT = 1e9 / 8 * 0.94
"""Bytes a second that TCP gets through a link of 1 Gb/s, headers of 1500-byte frames taken off."""
SERVED = 0.99
"""Of what is made, delivered: more than the half samples at both ends."""
MOST_TOKENS = 80_000

STAGES = {
    "make": ("producer MainThread",),
    "server": ("producer server",),
    "send": ("producer zmq",),
    "receive": ("member zmq",),
    "client": ("member client",),
    "decode": ("member codec",),
}
"""Of the simulation, by the threads that scale.py tells apart."""
WORDS = {
    "make": "producer: encode, store",
    "server": "producer: server thread (ROUTER)",
    "send": "producer: ZeroMQ thread",
    "receive": "member: ZeroMQ threads",
    "client": "member: client thread",
    "decode": "member: decoders",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="What saturates first; writes docs/scale.md.")
    parser.add_argument("--print", action="store_true", help="instead of writing the page")
    options = parser.parse_args()
    if not MEASURED.exists():
        print(f"{MEASURED} is not there: run benchmarks/scale.py --write", file=sys.stderr)
        return 2
    text = page(json.loads(MEASURED.read_text()))
    if options.print:
        print(text, end="")
    else:
        PAGE.write_text(text)
    return 0


def costs_of(measured: dict[str, Any]) -> Costs:
    """Of each stage: what a GB takes is what is left of 1x1 when samples are long; the rest of 1x1
    goes by samples, and what is more with many nodes at the other side by samples and nodes."""
    cells = measured["summary"]
    short, long = cells["1x1"], cells["1x1L"]
    wide = max((c for c in cells.values() if c["members"] == 1), key=lambda c: c["producers"])
    tall = max((c for c in cells.values() if c["producers"] == 1), key=lambda c: c["members"])
    synthetic = measured["setup"]["synthetic_seconds_per_gb"]

    def of(stage: str, peers: dict[str, Any] = short, count: int = 1) -> Cost:
        at_short, at_long = _busy_per_gb(short, stage), _busy_per_gb(long, stage)
        if stage == "make":  # a target makes them, elsewhere
            at_short, at_long = (max(0.0, cost - synthetic) for cost in (at_short, at_long))
        small, large = _sample_gb(short), _sample_gb(long)
        per_sample = max(0.0, (at_short - at_long) / (1 / small - 1 / large))
        per_gb = max(0.0, at_short - per_sample / small)
        per_peer = 0.0
        if count > 1:
            more = _busy_per_gb(peers, stage) - _busy_per_gb(short, stage)
            per_peer = max(0.0, more) * _sample_gb(peers) / (count - 1)
        return Cost(per_gb, max(0.0, per_sample - per_peer), per_peer)

    producers, members = wide["producers"], tall["members"]
    return Costs(
        make=of("make"),
        server=of("server", tall, members),
        send=of("send", tall, members),
        receive=of("receive", wide, producers),
        client=of("client", wide, producers),
        decode=of("decode"),
    )


def _per_gb(cell: Any, stage: str) -> float:
    """CPU seconds of a stage."""
    return sum(
        cell["cost_by_thread"].get(name, {"median": 0.0})["median"] for name in STAGES[stage]
    )


def _busy_per_gb(cell: Any, stage: str) -> float:
    """The same without what the threads use when nothing is sent."""
    idle = sum(cell["idle_by_thread"].get(name, 0.0) for name in STAGES[stage])
    return _per_gb(cell, stage) - idle / (cell["megabytes_per_second"]["median"] / 1000)


def _sample_gb(cell: Any) -> float:
    size: float = cell["sample_bytes"]["median"] / GB
    return size


def page(measured: dict[str, Any]) -> str:
    costs = costs_of(measured)
    machine = measured["machine"]
    parts = [
        HEAD,
        f"Measured on {machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load']:.1f} before, by `benchmarks/scale.py`.\n",
        "## What a stage costs\n",
        _costs_table(costs),
        "## Does the simulation predict what was measured?\n",
        CHECKED,
        _checked(measured, costs),
        "## Where one of each saturates\n",
        SATURATES,
        _saturation(costs),
        "## What serves 30,000 tokens a second\n",
        LAYOUTS,
        _layouts(costs),
        "## What the simulation leaves out\n",
        LEFT_OUT,
    ]
    return "\n".join(parts)


HEAD = """# How far does it scale?

30,000 tokens a second, five layers of 5,120 channels, are 1.54 GB/s of hidden states. No machine \
was at hand that makes so many. This page is computed: a discrete-event simulation \
(`benchmarks/simulation.py`) with the CPU time that each stage was measured to take. \
`benchmarks/simulate.py` writes it.
"""
CHECKED = """Each cell that was measured, simulated with the same rate and on as many cores. Costs \
were fitted to 1x1, 1x1L (samples eight times as long), and those with most nodes at one side and \
one at the other; the others say whether it \
carries over. CPU is of delivery: without making samples, which on a GPU node is the target's \
work, and without what the processes use when nothing is sent.
"""
SATURATES = """Everything else is plenty: producers enough, cores enough, and nothing but the \
named part limits. The rate is what gets through while 80,000 tokens a second are made.
"""
LAYOUTS = """Samples of 828 tokens on the average, as in the first data set. Delivered is what \
reaches the trainers of what is made; below 100% the rest piles up in spools.
"""
LEFT_OUT = """* Python's lock: a node's threads are simulated as if each had a core to itself. The \
C of codec, checksums and sockets runs without the lock, the rest does not.
* Encryption: 0.7 CPU seconds a GB more at the producer and 0.6 at the consumer \
(`benchmarks/curve.py`).
* Disks. A spool is written at the encoded rate and read once, mostly out of the page cache.
* The trainer, which is taken to be faster than the stream.
* Memory bandwidth that other work on the node wants.
"""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _costs_table(costs: Costs) -> str:
    rows = [
        [
            WORDS[stage],
            f"{cost.per_gb:.2f}",
            f"{1000 * cost.per_sample:.2f}",
            f"{1000 * cost.per_sample_peer:.3f}",
        ]
        for stage, cost in costs._asdict().items()
    ]
    head = ["stage", "CPU s a logical GB", "ms a sample", "ms a sample and node at the other side"]
    return _table(head, rows)


def _checked(measured: dict[str, Any], costs: Costs) -> str:
    cores = measured["machine"]["cores"]
    rows = []
    for name, cell in measured["summary"].items():
        rate = cell["megabytes_per_second"]["median"] * 1e6
        layout = Layout(
            cell["producers"],
            cell["members"],
            rate,
            cell["sample_bytes"]["median"],
            producer_cores=cores,
            one_machine=True,
        )
        outcome = simulate(layout, costs, 20.0)
        delivery = sum(_busy_per_gb(cell, stage) for stage in STAGES if stage != "make")
        predicted = outcome.cpu_per_gb - _make_per_gb(layout, costs)
        rows.append(
            [
                name,
                f"{rate / 1e6:.0f}",
                f"{outcome.bytes_per_second / 1e6:.0f}",
                f"{delivery:.2f}",
                f"{predicted:.2f}",
                f"{predicted / delivery:.2f}",
            ]
        )
    head = [
        "cell",
        "MB/s measured",
        "simulated",
        "CPU s a GB measured",
        "simulated",
        "simulated / measured",
    ]
    return _table(head, rows)


def _make_per_gb(layout: Layout, costs: Costs) -> float:
    return costs.make.per_gb + costs.make.sample(layout.members) / (layout.sample_bytes / GB)


def _layout(producers: int, members: int, tokens: float, **fields: Any) -> Layout:
    return Layout(producers, members, tokens * TOKEN_BYTES, SAMPLE_TOKENS * TOKEN_BYTES, **fields)


def _served(outcome: Outcome, layout: Layout) -> float:
    return min(1.0, outcome.bytes_per_second / layout.bytes_per_second)


def limit(rows: tuple[int, int], costs: Costs, **fields: Any) -> tuple[float, Outcome]:
    """The most tokens a second that get through, and the outcome in which more are made.

    rows: producers and members."""
    layout = _layout(*rows, MOST_TOKENS, **fields)
    outcome = simulate(layout, costs)
    if _served(outcome, layout) >= SERVED:
        return float("inf"), outcome
    return outcome.bytes_per_second / TOKEN_BYTES, outcome


def _saturation(costs: Costs) -> str:
    cases: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
        ("one member, no link", (8, 1), {}),
        ("one producer (one ROUTER), no link", (1, 8), {}),
        *(
            (f"one link of {gbit:g} Gb/s to eight members", (8, 8), {"shared_link": True})
            for gbit in (1, 2.5, 10, 25)
        ),
    ]
    rows = []
    for words, nodes, fields in cases:
        if "link of" in words:
            gbit = float(words.split()[3])
            fields = {**fields, "link_bytes_per_second": gbit * GBIT}
        tokens, outcome = limit(nodes, costs, **fields)
        most = "more than were tried" if tokens == float("inf") else f"{tokens:,.0f}"
        gigabytes = "" if tokens == float("inf") else f"{tokens * TOKEN_BYTES / GB:.2f}"
        rows.append([words, most, gigabytes, f"{outcome.bottleneck}"])
    return _table(["part", "tokens/s", "GB/s of states", "then busy all the time"], rows)


def _layouts(costs: Costs) -> str:
    cases = [
        ("one producer, one member, 10 Gb/s", 1, 1, {"link_bytes_per_second": 10 * GBIT}),
        ("four producers on a node, one member, 10 Gb/s", 4, 1, _node(10)),
        ("four producers on a node, two members, 10 Gb/s", 4, 2, _node(10)),
        ("four producers on a node, eight members, 10 Gb/s", 4, 8, _node(10)),
        ("eight producers on a node, two members, 25 Gb/s", 8, 2, _node(25)),
        ("eight producers on a node, eight members, 25 Gb/s", 8, 8, _node(25)),
        (
            "32 producers and four members, a node each, 10 Gb/s",
            32,
            4,
            {"link_bytes_per_second": 10 * GBIT},
        ),
    ]
    rows = []
    for words, producers, members, fields in cases:
        layout = _layout(producers, members, GOAL_TOKENS, **fields)
        outcome = simulate(layout, costs)
        busiest = sorted(outcome.busy.items(), key=lambda item: -item[1])[:2]
        rows.append(
            [
                words,
                f"{100 * _served(outcome, layout):.0f}%",
                ", ".join(f"{name} {100 * share:.0f}%" for name, share in busiest),
                f"{outcome.cpu_per_gb * layout.bytes_per_second / GB:.1f}",
            ]
        )
    head = ["layout", "delivered", "busiest, share of the time", "cores in all"]
    return _table(head, rows)


def _node(gbit: float) -> dict[str, Any]:
    return {"link_bytes_per_second": gbit * GBIT, "shared_link": True}


if __name__ == "__main__":
    sys.exit(main())
