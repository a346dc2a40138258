"""What transport.py's figures are, what they should be, and how both are said."""

import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rounds import Spread
from transport_run import Passage

FIGURES: dict[str, Callable[[Passage], float]] = {
    "gb_per_second": lambda p: p.bytes / 1e9 / p.seconds,
    "gb_per_consumer_cpu_second": lambda p: p.bytes / 1e9 / _consumer_cpu_seconds(p),
    "cpu_seconds_per_gb": lambda p: (
        (p.producer_cpu_seconds + _consumer_cpu_seconds(p)) / p.bytes * 1e9
    ),
}
"""A GB is 10^9 bytes of states, whatever goes over the wire."""
PACKAGES = (
    "pyzmq",
    "mooncake-transfer-engine-non-cuda",
    "hs-connectors",
    "safetensors",
    "grpcio",
    "numpy",
    "xxhash",
    "torch",
)
NOTES = {
    "tcp": "one connection a link; sendmsg of a whole sample, recv_into one buffer that is "
    "used again, 4 MiB at a time. Nothing can be cheaper over TCP",
    "pyzmq": "PUSH and PULL, messages of 4 MiB, no copies (copy=False), glibc told to keep memory",
    "mooncake": "Transfer Engine over TCP with a P2P handshake: samples lie in registered memory, "
    "and the consumer reads each whole into a registered buffer that is used again; "
    "up to 4 are announced",
    "files": "safetensors files in /dev/shm, written under a lock as vLLM's connector does, "
    "read and deleted by speculators' FileTransfer; up to 4 are there at once. The "
    "consumer is told of each, instead of looking for it every 0.1 s",
    "grpc": "one stream of answers a link, messages of 4 MiB that exist as bytes already, "
    "with no limit of their size",
    "draftfeed": "the whole line: encode, spool, send, receive, verify, decode. Stored: the spool "
    "is written already. The trainer commits every few samples. Same host: no TCP, no compression",
}
"""How each is set."""


class Goal(NamedTuple):
    what: str
    name: str
    figure: str
    over: str
    """Name of the cell that it is compared with."""
    bar: float
    stretch: float | None = None
    least: bool = False
    """At least the bar; otherwise at most."""


GOALS = (
    Goal(
        "GB per consumer CPU second, of raw TCP's",
        "draftfeed",
        "gb_per_consumer_cpu_second",
        "tcp",
        0.6,
        0.8,
        least=True,
    ),
    Goal("CPU seconds a GB, of raw TCP's", "draftfeed", "cpu_seconds_per_gb", "tcp", 1.6, 1.3),
    Goal("CPU seconds a GB, of Mooncake's", "draftfeed", "cpu_seconds_per_gb", "mooncake", 0.8),
)
CONTROL_BAR = 0.01
SAME_HOST_BAR = 2.0


def _consumer_cpu_seconds(passage: Passage) -> float:
    """Without the benchmark's own check, which costs all of them as much."""
    return passage.consumer_cpu_seconds - passage.check_cpu_seconds


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def goals(result: dict[str, Any]) -> list[dict[str, str]]:
    """Those that were measured, with their verdicts."""
    cells = {cell["name"]: cell for cell in result["cells"] if cell["layout"] == "wide, 1 to 1"}
    found = [_judged(goal, cells) for goal in GOALS if {goal.name, goal.over} <= cells.keys()]
    if {"draftfeed", "draftfeed, same host"} <= cells.keys():
        found.append(_same_host(cells))
    if "draftfeed" in result["stages"]:
        found.append(_control(result["stages"]["draftfeed"]["live"]))
    return found


def _ratio(cells: dict[str, Any], name: str, over: str, figure: str) -> Spread:
    """Of the same rounds."""
    pairs = zip(cells[name]["rounds"], cells[over]["rounds"], strict=True)
    value = FIGURES[figure]
    return Spread.of(value(_passage(one)) / value(_passage(other)) for one, other in pairs)


def _passage(told: dict[str, Any]) -> Passage:
    return Passage(**{**told, "stages": {}})


def _judged(goal: Goal, cells: dict[str, Any]) -> dict[str, str]:
    value = _ratio(cells, goal.name, goal.over, goal.figure)
    sign = ">=" if goal.least else "<="
    holds = _holds(value.median, goal.bar, least=goal.least)
    words = f"{'holds' if holds else 'MISSED'}: {sign} {goal.bar:g}"
    if goal.stretch is not None:
        reached = _holds(value.median, goal.stretch, least=goal.least)
        words += f" (stretch {goal.stretch:g}{'' if reached else ' not'} reached)"
    return {"what": goal.what, "value": value.times(1, 2), "verdict": words}


def _holds(value: float, bar: float, *, least: bool) -> bool:
    return value >= bar if least else value <= bar


def _same_host(cells: dict[str, Any]) -> dict[str, str]:
    """CPU time over TCP, over that without it."""
    value = _ratio(cells, "draftfeed", "draftfeed, same host", "cpu_seconds_per_gb")
    words = "holds" if value.median >= SAME_HOST_BAR else "MISSED"
    what = "same host: GB per CPU second, of the TCP path's"
    return {"what": what, "value": value.times(1, 2), "verdict": f"{words}: >= {SAME_HOST_BAR:g}"}


def _control(stages: dict[str, dict[str, float]]) -> dict[str, str]:
    """Its share of all CPU time, without the benchmark's own."""
    own = {role: {k: v for k, v in one.items() if k != "check"} for role, one in stages.items()}
    share = sum(one["control"] for one in own.values()) / sum(
        sum(one.values()) for one in own.values()
    )
    words = "holds" if share <= CONTROL_BAR else "MISSED"
    what = "control plane, share of the CPU time"
    return {"what": what, "value": f"{share:.3f}", "verdict": f"{words}: <= {CONTROL_BAR:g}"}


def words(result: dict[str, Any]) -> Iterator[str]:
    for layout in dict.fromkeys(cell["layout"] for cell in result["cells"]):
        yield ""
        yield f"{layout}; medians (least to most); in brackets: of raw TCP"
        yield f"{'':32}{'GB/s':28}{'GB per consumer CPU s':34}CPU s a GB"
        for cell in result["cells"]:
            if cell["layout"] == layout:
                yield _line(cell)
    for name, whats in result["stages"].items():
        for what, roles in whats.items():
            yield ""
            yield f"{name}, {what}: CPU s a GB by stage"
            for role, stages in roles.items():
                yield f"  {role}: " + ", ".join(f"{k} {v:.3f}" for k, v in stages.items())
    yield ""
    for name, why in result["not_run"].items():
        yield f"not run: {name}: {why}"
    for goal in result["goals"]:
        yield f"goal: {goal['what']}: {goal['value']}, {goal['verdict']}"


def _line(cell: dict[str, Any]) -> str:
    parts = [f"{cell['name']:32}"]
    for figure, width in zip(FIGURES, (28, 34, 0), strict=True):
        words = Spread(**cell[figure]).times(1, 2)
        if figure in cell["of_limit"]:
            words += f" [{cell['of_limit'][figure]['median']:.2f}]"
        parts.append(f"{words:{width}}")
    return "".join(parts).rstrip()
