"""How fast does the ring bring rows to the host, and do sampled tokens wait for it?"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from findings import (
    Bar,
    Deadline,
    Report,
    gigabytes_per_second,
    percentile,
    spread,
)
from machine import Machine

from draftfeed_producer.tap.ring import StagingRing, make_slabs

PART = "ring"
READ_BACK_BYTES = 4096
IDLE = "nothing else under way"


class CopySizes(NamedTuple):
    layers: int
    hidden: int
    rows: int
    """Of one transfer."""
    piece_bytes: tuple[int, ...]
    slabs: int
    rounds: int
    read_backs: int


FULL = CopySizes(5, 5120, 5120, (8 << 20, 16 << 20), 4, 12, 400)
TINY = CopySizes(5, 64, 64, (4096, 8192), 3, 2, 10)


def measure(machine: Machine, sizes: CopySizes, report: Report, deadline: Deadline) -> None:
    kept: dict[str, Any] = {}
    report.rounds[PART] = kept
    rings = {size: _ring(machine, sizes, size) for size in sizes.piece_bytes}
    plain = PlainCopy(machine, sizes)
    ways: dict[str, Callable[[], None]] = {"one plain copy": plain.run}
    for size, ring in rings.items():
        ways[f"ring, pieces of {_words(size)}"] = lambda ring=ring: _transfer(ring, sizes.rows)
    seconds = _bandwidth(machine, ways, sizes.rounds, deadline)
    kept["transfer"] = {"bytes": plain.nbytes, "seconds": seconds}
    if not all(seconds.values()):
        report.shortened(PART, "everything")
        return
    for name, rounds in seconds.items():
        rate = spread([gigabytes_per_second(plain.nbytes, one) for one in rounds])
        report.tell(PART, f"{name}, GB/s to the host", rate.words())
    seconds_per_byte = spread(seconds["one plain copy"]).median / plain.nbytes
    read_backs = _read_backs(machine, rings, plain, sizes, deadline)
    kept["read_back_seconds"] = read_backs
    _tell(read_backs, {_busy(size): size * seconds_per_byte for size in rings}, report)
    for ring in rings.values():
        ring.close()


class PlainCopy:
    """The ring's bytes in one piece, on a stream of its own."""

    def __init__(self, machine: Machine, sizes: CopySizes) -> None:
        shape = (sizes.rows, sizes.layers, sizes.hidden)
        self._source = torch.zeros(shape, dtype=torch.float16, device=machine.device)
        self._target = machine.pinned(*shape, dtype=torch.float16)
        self._machine, self._lane = machine, machine.lane()
        self._last = machine.mark()
        self.nbytes = self._source.nbytes

    def begin(self) -> None:
        with self._lane():
            self._target.copy_(self._source, non_blocking=True)
            self._last = self._machine.mark()

    def run(self) -> None:
        self.begin()
        self._last.wait()

    def keep_busy(self) -> None:
        if self._last.done():
            self.begin()


def _ring(machine: Machine, sizes: CopySizes, piece_bytes: int) -> StagingRing:
    streams = machine.streams()
    slabs = make_slabs(streams, sizes.slabs, piece_bytes, sizes.layers, sizes.hidden)
    return StagingRing(streams, sizes.rows, sizes.layers, sizes.hidden, slabs=slabs)


def _transfer(ring: StagingRing, rows: int) -> None:
    """All of the ring, as it comes: nobody looks at the rows."""
    reservation = ring.reserve(rows)
    assert reservation is not None
    ring.submit(reservation, None)
    finish(ring)


def finish(ring: StagingRing) -> None:
    while ring.pending:
        ring.wait()
        drain(ring)


def drain(ring: StagingRing) -> None:
    while (piece := ring.take()) is not None:
        ring.release(piece)


def _bandwidth(
    machine: Machine, ways: dict[str, Callable[[], None]], rounds: int, deadline: Deadline
) -> dict[str, list[float]]:
    """Wall-clock seconds from the call until the last row is on the host, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    names = list(ways)
    for _ in range(rounds):
        if deadline.passed:
            break
        names = [*names[1:], names[0]]
        for name in names:
            machine.synchronize()
            begin = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def _read_backs(
    machine: Machine,
    rings: dict[int, StagingRing],
    plain: PlainCopy,
    sizes: CopySizes,
    deadline: Deadline,
) -> dict[str, list[float]]:
    """Seconds of each read-back, by what else is under way."""
    read_back = ReadBack(machine)
    read_back.times(_nothing, 10, deadline)
    found = {IDLE: read_back.times(_nothing, sizes.read_backs, deadline)}
    for size, ring in rings.items():
        found[_busy(size)] = read_back.times(_pump(ring), sizes.read_backs, deadline)
        finish(ring)
    found["one plain copy under way"] = read_back.times(
        plain.keep_busy, sizes.read_backs // 4, deadline
    )
    machine.synchronize()
    return found


def _tell(
    read_backs: dict[str, list[float]], piece_seconds: dict[str, float], report: Report
) -> None:
    """`piece_seconds`: how long one piece is on its way, where the ring is busy."""
    for name, seconds in read_backs.items():
        if not seconds:
            report.shortened(PART, f"read back, {name}")
            continue
        p50, p99 = (percentile(seconds, percent) for percent in (50, 99))
        what, value = f"4 KB read back, {name}, us", f"p50 {1e6 * p50:,.1f}  p99 {1e6 * p99:,.1f}"
        if name in piece_seconds:
            most = percentile(read_backs[IDLE], 99) + piece_seconds[name]
            bar = Bar(f"p99 <= {1e6 * most:,.0f}: idle + one piece", most=most)
            report.judge(PART, what, value, p99, bar)
        else:
            report.tell(PART, what, value)


class ReadBack:
    """A few sampled tokens on their way to the thread that waits for them."""

    def __init__(self, machine: Machine) -> None:
        self._source = torch.zeros(READ_BACK_BYTES, dtype=torch.uint8, device=machine.device)
        self._target = machine.pinned(READ_BACK_BYTES, dtype=torch.uint8)
        self._machine, self._lane = machine, machine.lane()

    def times(self, before: Callable[[], object], count: int, deadline: Deadline) -> list[float]:
        """Seconds from the call until the bytes are there, `before` called ahead of each."""
        seconds = []
        for _ in range(count):
            if deadline.passed:
                break
            before()
            begin = time.perf_counter()
            with self._lane():
                self._target.copy_(self._source, non_blocking=True)
                mark = self._machine.mark()
            mark.wait()
            seconds.append(time.perf_counter() - begin)
        return seconds


def _nothing() -> None:
    pass


def _pump(ring: StagingRing) -> Callable[[], None]:
    """Keeps copies under way: as many as there are slabs."""
    rows = ring.piece_rows

    def pump() -> None:
        drain(ring)
        while (reservation := ring.reserve(rows)) is not None:
            ring.submit(reservation, None)

    return pump


def _busy(piece_bytes: int) -> str:
    return f"ring busy, pieces of {_words(piece_bytes)}"


def _words(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >> 20 else f"{size_bytes >> 10} KiB"
