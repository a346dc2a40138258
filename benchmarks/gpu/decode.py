"""What does the tap cost a decode step?"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from copies import drain, finish
from decoder import Decoder, DecoderSizes
from findings import Bar, Deadline, Report, percentile, spread
from machine import Machine, Work
from parity import Tap

from draftfeed_producer.tap.ring import StagingRing, make_slabs

PART = "decode"
OVERHEAD_BAR = Bar("<= 0.3%, fails above 1%", most=0.003, fails_above=0.01)
MEMORY_SHARE = 0.6
PIECE_BYTES = 8 << 20


class StepSizes(NamedTuple):
    decoder: DecoderSizes
    steps: int
    """Of each third of a round."""
    rounds: int
    """At most; with fewer than `enough` of them something was cut."""
    enough: int


FULL = StepSizes(
    DecoderSizes(
        hidden=5120,
        mlp=17408,
        heads=24,
        kv_heads=4,
        head_size=256,
        vocabulary=248_320,
        blocks=64,
        taps=5,
        batch=64,
        positions=512,
    ),
    steps=24,
    rounds=40,
    enough=10,
)
TINY = StepSizes(
    DecoderSizes(
        hidden=64,
        mlp=96,
        heads=4,
        kv_heads=2,
        head_size=16,
        vocabulary=128,
        blocks=6,
        taps=5,
        batch=4,
        positions=8,
    ),
    steps=4,
    rounds=3,
    enough=3,
)


class Round(NamedTuple):
    """Seconds of the steps: without the tap, with it, without it again."""

    before: list[float]
    tapped: list[float]
    after: list[float]

    def overhead(self, percent: int) -> float:
        """Share of a step that the tap adds, at this percentile."""
        before, tapped, after = (percentile(seconds, percent) for seconds in self)
        return tapped / ((before + after) / 2) - 1

    def noise(self) -> float:
        """The same of what should be zero: the second round without the tap."""
        return percentile(self.after, 50) / percentile(self.before, 50) - 1


def measure(
    machine: Machine, tap: Tap, sizes: StepSizes, report: Report, deadline: Deadline
) -> None:
    wanted = sizes.decoder
    blocks = _fitting(wanted, machine.free_bytes())
    if blocks < wanted.taps:
        report.tell(PART, "decode step", f"not run: only {blocks} blocks fit into memory")
        return
    decoder = Decoder(wanted, blocks, machine.device)
    if not machine.graphs:
        report.needs_cuda(PART, "the step as one CUDA graph")
    plain = PlainStep(machine, decoder, machine.captured(decoder.step))
    tapped = TappedStep(machine, tap, plain)
    rounds = _play(machine, plain, tapped, sizes, deadline)
    refused = tapped.ring.statistics().refused
    tapped.close()
    report.rounds[PART] = {
        "blocks": blocks,
        "sizes": wanted._asdict(),
        "no_room": refused,
        "rounds": [one._asdict() for one in rounds],
    }
    if len(rounds) < sizes.enough:
        report.shortened(PART, f"{len(rounds)} rounds, {sizes.enough} are enough")
    if rounds:
        _tell(wanted, blocks, rounds, report)
        report.tell(PART, "steps that had to wait for room in the ring", str(refused))


def _fitting(sizes: DecoderSizes, free_bytes: int) -> int:
    room = MEMORY_SHARE * free_bytes - sizes.head_bytes
    return max(0, min(sizes.blocks, int(room // (sizes.block_bytes + sizes.cache_bytes))))


class PlainStep:
    """A step as a server makes it: one graph, and the sampled tokens on their way to the host."""

    def __init__(self, machine: Machine, decoder: Decoder, replay: Work) -> None:
        self.decoder, self.replay = decoder, replay
        self._machine, self._number = machine, 0
        self._sampled = machine.pinned(2, decoder.sizes.batch, dtype=torch.int64)

    def __call__(self) -> None:
        self.replay()
        self.read_back()

    def read_back(self) -> None:
        self._number += 1
        target = self._sampled[self._number % 2]
        target.copy_(self.decoder.tokens, non_blocking=True)


class TappedStep:
    """The same with room for its rows taken before, gathered after, and the ring drained."""

    def __init__(self, machine: Machine, tap: Tap, plain: PlainStep) -> None:
        self._tap, self._plain, self._number = tap, plain, 0
        sizes = plain.decoder.sizes
        streams, shape = machine.streams(), (sizes.taps, sizes.hidden)
        slabs = make_slabs(streams, 4, PIECE_BYTES, *shape)
        self.ring = StagingRing(streams, 8 * sizes.batch, *shape, slabs=slabs)
        # A step still reads one of them when the next is prepared.
        self._row_maps = machine.pinned(2, sizes.batch, dtype=torch.int32)
        self._row_map = torch.zeros(sizes.batch, dtype=torch.int32, device=machine.device)

    def __call__(self) -> None:
        while (reservation := self.ring.reserve(len(self._row_map))) is None:
            self.ring.wait()
            drain(self.ring)
        self._number += 1
        row_map = self._row_maps[self._number % 2]
        row_map.copy_(reservation.slots)
        self._row_map.copy_(row_map, non_blocking=True)
        self._plain.replay()
        packed = self._plain.decoder.packed
        self._tap.gather_packed(packed, self._row_map, self.ring.rows, self.ring.counters)
        self.ring.submit(reservation, self._number)
        self._plain.read_back()
        drain(self.ring)

    def close(self) -> None:
        finish(self.ring)
        self.ring.close()


def _play(
    machine: Machine, plain: PlainStep, tapped: TappedStep, sizes: StepSizes, deadline: Deadline
) -> list[Round]:
    for step in (plain, tapped):
        _steps(machine, step, 3)
    rounds: list[Round] = []
    while len(rounds) < sizes.rounds and not deadline.passed:
        before = _steps(machine, plain, sizes.steps)
        with_tap = _steps(machine, tapped, sizes.steps)
        finish(tapped.ring)
        rounds.append(Round(before, with_tap, _steps(machine, plain, sizes.steps)))
    return rounds


def _steps(machine: Machine, step: Callable[[], None], count: int) -> list[float]:
    """Seconds from the end of one step to the end of the next.

    The thread prepares a step while the one before it runs, as servers with overlapped
    scheduling do: what the tap costs the thread is seen only where that takes longer.
    """
    step()
    marks = [machine.mark()]
    for _ in range(count):
        step()
        marks.append(machine.mark())
        marks[-2].wait()
    machine.synchronize()
    return [end.seconds_since(begin) for begin, end in pairwise(marks)]


def _tell(sizes: DecoderSizes, blocks: int, rounds: list[Round], report: Report) -> None:
    plain = [seconds for one in rounds for seconds in (*one.before, *one.after)]
    tapped = [seconds for one in rounds for seconds in one.tapped]
    shape = f"{blocks} of {sizes.blocks} blocks, batch {sizes.batch}"
    for what, seconds in (("without the tap", plain), ("with it", tapped)):
        p50, p95 = (1e3 * percentile(seconds, percent) for percent in (50, 95))
        value = f"p50 {p50:,.3f}  p95 {p95:,.3f}"
        report.tell(PART, f"{shape}: ms per step {what}", value)
    noise = spread([one.noise() for one in rounds])
    report.tell(PART, "noise: without the tap, twice, %", noise.words(100, 3))
    p50 = spread([one.overhead(50) for one in rounds])
    p95 = spread([one.overhead(95) for one in rounds])
    if blocks == sizes.blocks:
        report.judge(PART, "overhead of p50, %", p50.words(100, 3), p50.median, OVERHEAD_BAR)
    else:
        # Fewer blocks read fewer weights in a step, and the same tap is a larger share of it.
        share = _weight_bytes(sizes, blocks) / _weight_bytes(sizes, sizes.blocks)
        real = [share * one for one in p50]
        report.tell(PART, f"overhead of p50 with {blocks} blocks, %", p50.words(100, 3))
        what = f"overhead of p50, %, scaled by weights to {sizes.blocks} blocks"
        report.judge(PART, what, type(p50)(*real).words(100, 3), real[0], OVERHEAD_BAR)
    report.tell(PART, "overhead of p95, %", p95.words(100, 3))


def _weight_bytes(sizes: DecoderSizes, blocks: int) -> int:
    return sizes.head_bytes + blocks * sizes.block_bytes
