"""The ring under load: does every row reach the host as the reference computes it?

The forward stream overwrites the packed rows as soon as the gather is queued, slabs are released
late and out of order, the ring is smaller than what is under way.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from findings import Deadline, Report
from machine import Machine
from parity import PART, POISON, Case, Output, Tap
from torch import Tensor

from draftfeed_producer.tap import reference
from draftfeed_producer.tap.ring import Piece, Reservation, StagingRing, make_slabs


class LoadSizes(NamedTuple):
    case: Case
    batch: int
    """Most rows of one reservation; the fixed buffers are this long, plus padding."""
    padding: int
    contents: int
    """Different forward passes; each is fed many times."""
    steps: int
    slots: int
    slabs: int
    piece_bytes: int


FULL = LoadSizes(Case(5, 5120, torch.float16), 256, 24, 4, 400, 700, 4, 8 << 20)
TINY = LoadSizes(Case(5, 64, torch.float16), 12, 4, 3, 60, 29, 3, 4096)


def measure(
    machine: Machine, tap: Tap, sizes: LoadSizes, report: Report, deadline: Deadline
) -> None:
    load = Load(machine, tap, sizes)
    half = Deadline(deadline.left / 2)
    _play(load, load.forward, "ring under load, eager", report, half)
    if machine.graphs:
        replay = machine.captured(load.forward)
        _play(load, replay, "ring under load, graph replayed", report, deadline)
    else:
        report.needs_cuda(PART, "ring under load, graph replayed")
    load.close()


def _play(
    load: "Load",
    forward: Callable[[], object],
    what: str,
    report: Report,
    deadline: Deadline,
) -> None:
    wrong, steps, wanted = list[str](), 0, load.sizes.steps
    while steps < wanted and not wrong:
        if deadline.passed:
            report.shortened(PART, f"{what}: {steps} of {wanted} steps")
            break
        wrong += load.step(steps, forward)
        steps += 1
    if not wrong:
        wrong += load.rest()
    report.check(PART, what, f"{load.compared:,} rows in {steps} steps", load.compared, wrong)
    load.compared = 0


class Load:
    """One fixed set of buffers, as an engine's graph has them, and a ring that is too small."""

    def __init__(self, machine: Machine, tap: Tap, sizes: LoadSizes) -> None:
        self.sizes = sizes
        self.compared = 0
        self._machine, self._tap = machine, tap
        self._random = random.Random(7)
        layers, hidden, dtype = case = sizes.case
        tokens = sizes.batch + sizes.padding
        made = torch.Generator().manual_seed(7)
        packed = [_contents(tokens, layers * hidden, made) for _ in range(sizes.contents)]
        self._expected = [_expected(one, case) for one in packed]
        self._contents = [one.to(machine.device) for one in packed]
        self._source = torch.zeros_like(self._contents[0])
        self._packed = torch.zeros_like(self._contents[0])
        self._row_map = torch.full((tokens,), -1, dtype=torch.int32, device=machine.device)
        streams = machine.streams()
        slabs = make_slabs(streams, sizes.slabs, sizes.piece_bytes, layers, hidden, dtype)
        self._ring = StagingRing(streams, sizes.slots, layers, hidden, dtype=dtype, slabs=slabs)
        self._held: list[Piece] = []

    def forward(self) -> None:
        """Packed rows appear, are gathered, and are gone."""
        self._packed.copy_(self._source)
        self._tap.gather_packed(self._packed, self._row_map, self._ring.rows, self._ring.counters)
        self._packed.view(torch.int16).fill_(POISON)

    def step(self, number: int, forward: Callable[[], object]) -> list[str]:
        """One pass over as many rows as there is room for; what came out wrong."""
        wrong = list[str]()
        rows = self._random.randint(1, self.sizes.batch)
        while (reservation := self._ring.reserve(rows)) is None:
            wrong += self._relieve()
        content = number % self.sizes.contents
        self._source.copy_(self._contents[content])
        tokens = self._spread_out(reservation)
        forward()
        self._ring.submit(reservation, (content, tokens))
        return wrong + self._take()

    def rest(self) -> list[str]:
        wrong = list[str]()
        while self._ring.pending:
            wrong += self._relieve()
        while self._held:
            wrong += self._compare(self._held.pop())
        return wrong

    def close(self) -> None:
        self._ring.close()

    def _spread_out(self, reservation: Reservation) -> Tensor:
        """Which token of the pass each row is; padding lies between them."""
        rows, tokens = len(reservation.slots), len(self._row_map)
        chosen = torch.tensor(sorted(self._random.sample(range(tokens), rows)))
        # A pinned buffer for each pass: torch keeps it until its copy has run, and the thread
        # waits for nothing, so that gathers pile up on the stream.
        row_map = self._machine.pinned(tokens, dtype=torch.int32).fill_(-1)
        row_map[chosen] = reservation.slots
        self._row_map.copy_(row_map, non_blocking=True)
        return chosen

    def _relieve(self) -> list[str]:
        """No room: one copy has to end, and one slab to come back."""
        self._ring.wait()
        wrong = self._take()
        if self._held:
            piece = self._held.pop(self._random.randrange(len(self._held)))
            wrong += self._compare(piece)
        return wrong

    def _take(self) -> list[str]:
        """All slabs but one may be in our hands, so that most copies wait for a slab."""
        wrong = list[str]()
        while (piece := self._ring.take()) is not None:
            self._held.append(piece)
            if len(self._held) == self.sizes.slabs:
                late = self._held.pop(self._random.randrange(len(self._held)))
                wrong += self._compare(late)
        return wrong

    def _compare(self, piece: Piece) -> list[str]:
        """As late as can be: just before its slab may be overwritten."""
        assert isinstance(piece.tag, tuple)
        content, tokens = piece.tag
        mine = tokens[piece.start : piece.start + len(piece.rows)]
        want = self._expected[content]
        rows = piece.rows.view(torch.int16) == want.rows[mine].view(torch.int16)
        counters = piece.counters == want.counters[mine]
        self.compared += len(mine)
        self._ring.release(piece)
        if rows.all() and counters.all():
            return []
        row, layer, column = (~(rows if not rows.all() else counters)).nonzero()[0].tolist()
        kind = "element" if not rows.all() else "counter"
        return [f"ring: pass {content}, token {int(mine[row])} layer {layer} {kind} {column}"]


def _contents(tokens: int, width: int, made: torch.Generator) -> Tensor:
    """bf16 [T, width]: a quarter random bits, the rest ordinary."""
    packed = torch.randn(tokens, width, generator=made).to(torch.bfloat16)
    random_bits = torch.randint(0, 65536, (tokens // 4, width), generator=made)
    packed[: tokens // 4] = random_bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)
    return packed


def _expected(packed: Tensor, case: Case) -> Output:
    """Token t in row t."""
    want = Output.poisoned(len(packed), case, torch.device("cpu"))
    every_token = torch.arange(len(packed), dtype=torch.int32)
    reference.gather_packed(packed, every_token, want.rows, want.counters)
    return want
