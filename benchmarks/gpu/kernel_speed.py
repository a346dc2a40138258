"""How fast is the gather, next to a plain device copy of the same bytes?"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import settings
import torch
from findings import Bar, Deadline, Report, Spread, gigabytes_per_second, spread
from machine import Machine, Work
from parity import Tap

from draftfeed_producer.tap.reference import COUNTERS

PART = "kernel"
COPY = "copy"
GATHER = "gather"

COPY_BAR = Bar(">= 0.8 of the copy", least=0.8)
LAUNCH_BAR = Bar("< 15 us", most=15e-6)


class SpeedSizes(NamedTuple):
    layers: int
    hidden: int
    tokens: tuple[int, ...]
    """Of one launch; each divides the last, which is what every round works on."""
    batch: int
    rounds: int
    eager_calls: int


FULL = SpeedSizes(5, 5120, (64, 256, 2048, 8192), 64, 40, 300)
TINY = SpeedSizes(5, 64, (4, 16), 4, 3, 5)


class Arena:
    """Packed rows and slots of one round.

    A round goes through all of them once, in launches of T tokens: every round moves the same
    bytes, whatever T is, and they are several times what the L2 cache holds.
    """

    def __init__(self, machine: Machine, sizes: SpeedSizes) -> None:
        self.tokens, layers, hidden = sizes.tokens[-1], sizes.layers, sizes.hidden
        self.packed = torch.empty(
            self.tokens, layers * hidden, dtype=torch.bfloat16, device=machine.device
        ).normal_()
        shape = (self.tokens, layers, hidden)
        self.rows = torch.zeros(shape, dtype=torch.float16, device=machine.device)
        shape = (self.tokens, layers, COUNTERS)
        self.counters = torch.zeros(shape, dtype=torch.int32, device=machine.device)
        self.row_map = torch.arange(self.tokens, dtype=torch.int32, device=machine.device)

    @property
    def moved_bytes(self) -> int:
        """Read and written in one round, without the counters."""
        return 2 * self.rows.nbytes

    def gathers(self, gather: Callable[..., None], tokens: int) -> Work:
        def work() -> None:
            for first in range(0, self.tokens, tokens):
                mine = slice(first, first + tokens)
                gather(self.packed[mine], self.row_map[mine], self.rows, self.counters)

        return work

    def copies(self, tokens: int) -> Work:
        # As integers: a copy that changes the dtype is a kernel that converts.
        source, target = (
            tensor.view(torch.int16).view(self.tokens, -1) for tensor in (self.packed, self.rows)
        )

        def work() -> None:
            for first in range(0, self.tokens, tokens):
                mine = slice(first, first + tokens)
                target[mine].copy_(source[mine])

        return work


def measure(
    machine: Machine, tap: Tap, sizes: SpeedSizes, report: Report, deadline: Deadline
) -> None:
    arena = Arena(machine, sizes)
    kept: dict[str, Any] = {"bytes_per_round": arena.moved_bytes}
    report.rounds[PART] = kept
    for tokens in reversed(sizes.tokens):
        seconds = _in_turns(machine, tap, arena, tokens, sizes, deadline)
        kept[f"{tokens} tokens"] = seconds
        if not seconds[GATHER]:
            report.shortened(PART, f"{tokens:,} tokens a launch")
            continue
        _compare(arena, tokens, sizes, seconds, report)
        if tokens == sizes.batch:
            _launch(machine, arena, tokens, seconds, report)
    kept["eager"] = _eager(machine, tap, arena, sizes, report)
    if machine.graphs:
        kept["settings"] = _sweep(machine, arena, settings.packed_forms(), sizes, report, deadline)
    else:
        report.needs_cuda(PART, "other settings of the kernel")
    kept["rare values"] = _rare(machine, tap, arena, sizes, report, deadline)


def _in_turns(
    machine: Machine, tap: Tap, arena: Arena, tokens: int, sizes: SpeedSizes, deadline: Deadline
) -> dict[str, list[float]]:
    gathers = machine.captured(arena.gathers(tap.gather_packed, tokens))
    contenders = {GATHER: gathers, COPY: machine.captured(arena.copies(tokens))}
    return interleaved(machine, contenders, sizes.rounds, deadline)


def interleaved(
    machine: Machine, contenders: Mapping[str, Work], rounds: int, deadline: Deadline
) -> dict[str, list[float]]:
    """Seconds of each round on the device, the contenders in turns, another one first each time."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for _ in range(rounds):
        if deadline.passed:
            break
        names = [*names[1:], names[0]]
        # One that does not count: the device is busy with it while the thread queues the others.
        contenders[names[-1]]()
        marks = [machine.mark()]
        for name in names:
            contenders[name]()
            marks.append(machine.mark())
        machine.synchronize()
        for name, begin, end in zip(names, marks, marks[1:], strict=False):
            seconds[name].append(end.seconds_since(begin))
    return seconds


def _compare(
    arena: Arena,
    tokens: int,
    sizes: SpeedSizes,
    seconds: Mapping[str, list[float]],
    report: Report,
) -> None:
    for name in (GATHER, COPY):
        rate = spread([gigabytes_per_second(arena.moved_bytes, one) for one in seconds[name]])
        report.tell(PART, f"{tokens:,} tokens: {name}, GB/s read and written", rate.words())
    ratio = _ratio(seconds)
    what = f"{tokens:,} tokens: gather / copy"
    if tokens == sizes.tokens[-1]:
        report.judge(PART, what, ratio.words(digits=3), ratio.median, COPY_BAR)
    else:
        report.tell(PART, what, ratio.words(digits=3))


def _ratio(seconds: Mapping[str, list[float]]) -> Spread:
    """Bandwidth of the gather over that of the copy, round by round."""
    both = zip(seconds[COPY], seconds[GATHER], strict=True)
    return spread([copy / gather for copy, gather in both])


def _launch(
    machine: Machine,
    arena: Arena,
    tokens: int,
    seconds: Mapping[str, list[float]],
    report: Report,
) -> None:
    what = f"batch {tokens}: us per launch, in a graph"
    if not machine.graphs:
        report.needs_cuda(PART, what)
        return
    each = spread([one / (arena.tokens // tokens) for one in seconds[GATHER]])
    report.judge(PART, what, each.words(1e6), each.median, LAUNCH_BAR)


def _eager(
    machine: Machine, tap: Tap, arena: Arena, sizes: SpeedSizes, report: Report
) -> dict[str, list[float]]:
    """One launch at a time: what it takes on the device, and what the call takes the thread."""
    tokens, before = sizes.batch, arena.copies(arena.tokens)
    on_device, on_host = [], []
    for number in range(sizes.eager_calls):
        first = number * tokens % arena.tokens
        mine = slice(first, first + tokens)
        packed, row_map = arena.packed[mine], arena.row_map[mine]
        before()  # the device is busy with it while the thread queues what follows
        begin = machine.mark()
        called = time.perf_counter()
        tap.gather_packed(packed, row_map, arena.rows, arena.counters)
        on_host.append(time.perf_counter() - called)
        end = machine.mark()
        machine.synchronize()
        on_device.append(end.seconds_since(begin))
    for what, seconds in (("on the device", on_device), ("of the calling thread", on_host)):
        each = spread(seconds)
        what = f"batch {tokens}: us per launch, eager, {what}"
        report.judge(PART, what, each.words(1e6), each.median, LAUNCH_BAR)
    return {"device_seconds": on_device, "host_seconds": on_host}


def _sweep(
    machine: Machine,
    arena: Arena,
    forms: Mapping[str, Callable[..., None]],
    sizes: SpeedSizes,
    report: Report,
    deadline: Deadline,
) -> dict[str, dict[str, list[float]]]:
    """All settings in turns, at the largest launch and at the batch."""
    found = {}
    for tokens in (sizes.tokens[-1], sizes.batch):
        contenders = {}
        for name, gather in forms.items():
            if deadline.passed:
                report.shortened(PART, f"settings at {tokens:,} tokens")
                return found
            contenders[name] = machine.captured(arena.gathers(gather, tokens))
        seconds = interleaved(machine, contenders, sizes.rounds // 2, deadline)
        found[f"{tokens} tokens"] = seconds
        timed = {name: spread(rounds) for name, rounds in seconds.items() if rounds}
        for name in sorted(timed, key=lambda name: timed[name].median):
            rate = gigabytes_per_second(arena.moved_bytes, timed[name].median)
            report.tell(PART, f"{tokens:,} tokens with {name}, GB/s", f"{rate:,.1f}")
    return found


def _rare(
    machine: Machine,
    tap: Tap,
    arena: Arena,
    sizes: SpeedSizes,
    report: Report,
    deadline: Deadline,
) -> dict[str, list[float]]:
    """The worst that can come: a value that saturates in every row. No real model does that."""
    tokens = sizes.tokens[-1]
    arena.packed[:, :: sizes.hidden] = 1e30
    seconds = _in_turns(machine, tap, arena, tokens, sizes, deadline)
    what = f"{tokens:,} tokens, every row with a value past 65504: gather / copy"
    if seconds[GATHER]:
        report.tell(PART, what, _ratio(seconds).words(digits=3))
    else:
        report.shortened(PART, what)
    return seconds
