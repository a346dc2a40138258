"""The staging ring on a device whose every operation runs as late, or as early, as it may."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor

from draftfeed_producer.tap.ring import Piece, Reservation, StagingRing
from simulated_streams import SimulatedStreams, small_ring

any_of = st.integers(0, 1 << 20)
"""One of those there are, whatever their number."""


def content(value: int) -> int:
    """Of a row whose counters are `value`: exact in fp16 and in bf16."""
    return value % 251


@dataclass
class Gather:
    """What one reservation is for."""

    reservation: Reservation
    values: list[int]
    tag: object = field(default_factory=object)


@dataclass
class Row:
    """One that is still to be taken."""

    tag: object
    index: int
    last: bool
    value: int


class RingMachine(RuleBasedStateMachine):
    """A caller that keeps the ring's rules and does everything else at the worst time."""

    ring: StagingRing

    def __init__(self) -> None:
        super().__init__()
        self.streams = SimulatedStreams(self.check_copy)
        self.values = 0
        self.next_slot = 0
        self.reserved: list[Gather] = []
        self.launched: list[Gather] = []
        self.submitted: deque[Row] = deque()
        self.held: list[tuple[Piece, list[int]]] = []
        self.uncopied: set[int] = set()
        """Addresses on the device that hold what no copy has read."""
        self.in_use: set[int] = set()
        """Addresses on the host that were taken and not released."""

    @initialize(
        slots=st.integers(1, 6),
        piece_rows=st.integers(1, 3),
        slabs=st.integers(1, 3),
        layers=st.integers(1, 2),
        dtype=st.sampled_from([torch.float16, torch.bfloat16]),
        first=any_of,
    )
    def begin(
        self, slots: int, piece_rows: int, slabs: int, layers: int, dtype: torch.dtype, first: int
    ) -> None:
        self.slots = slots
        self.ring = small_ring(self.streams, slots, piece_rows, slabs, layers, dtype)
        self.piece_rows = piece_rows
        self.memory = self.footprint()
        self.gather([first])

    @rule(n=any_of)
    def reserve(self, n: int) -> None:
        n = 1 + n % self.slots
        if (reservation := self.ring.reserve(n)) is None:
            return
        slots = [(self.next_slot + i) % self.slots for i in range(n)]
        assert reservation.slots.dtype == torch.int32
        assert reservation.slots.tolist() == slots
        self.next_slot = (self.next_slot + n) % self.slots
        self.reserved.append(Gather(reservation, [self.values + i for i in range(n)]))
        self.values += n

    @rule(sizes=st.lists(any_of, min_size=1, max_size=4))
    def gather(self, sizes: list[int]) -> None:
        """As most callers do it."""
        for n in sizes:
            self.reserve(n)
        self.submit_all()

    @precondition(lambda self: self.reserved)
    @rule(which=any_of)
    def launch(self, which: int) -> None:
        gather = self.reserved.pop(which % len(self.reserved))
        self.launched.append(gather)
        for slot, value in zip(gather.reservation.slots.tolist(), gather.values, strict=True):
            self.streams.forward.queue(lambda slot=slot, value=value: self.write(slot, value))

    @precondition(lambda self: self.launched)
    @rule(which=any_of)
    def submit(self, which: int) -> None:
        gather = self.launched.pop(which % len(self.launched))
        self.ring.submit(gather.reservation, gather.tag)
        last = len(gather.values) - 1
        rows = (Row(gather.tag, i, i == last, value) for i, value in enumerate(gather.values))
        self.submitted.extend(rows)

    @precondition(lambda self: self.reserved)
    @rule(which=any_of)
    def cancel(self, which: int) -> None:
        self.ring.cancel(self.reserved.pop(which % len(self.reserved)).reservation)

    @precondition(lambda self: len(self.streams.forward) > 0)
    @rule(operations=st.integers(1, 6))
    def compute(self, operations: int) -> None:
        for _ in range(operations):
            self.streams.forward.step()

    @precondition(lambda self: len(self.streams.copies) > 0)
    @rule(operations=st.integers(1, 12))
    def copy(self, operations: int) -> None:
        for _ in range(operations):
            self.streams.copies.step()

    @rule()
    def take(self) -> None:
        piece = self.ring.take()
        if piece is not None:
            self.check_taken(piece)

    @precondition(lambda self: self.held)
    @rule(which=any_of)
    def release(self, which: int) -> None:
        piece, values = self.held.pop(which % len(self.held))
        self.check_rows(piece, values)
        self.in_use -= addresses([*piece.rows, *piece.counters])
        self.ring.release(piece)

    @rule()
    def wait(self) -> None:
        before = self.ring.statistics()
        with self.streams.blocking():
            self.ring.wait()
        after = self.ring.statistics()
        assert after.ready >= before.ready + (before.in_flight > 0)

    @precondition(lambda self: not self.reserved and not self.launched)
    @rule()
    def copied_slots_are_free_though_their_rows_are_not_taken(self) -> None:
        self.streams.run()
        if self.ring.statistics().queued == 0:
            self.fill()

    @rule(choices=st.lists(any_of, min_size=10, max_size=40))
    def go_on(self, choices: list[int]) -> None:
        """With steps of all kinds: Hypothesis leaves some rules out of most runs."""
        for choice in choices:
            which, kind = divmod(choice, 8)
            if kind == 0:
                self.reserve(which)
            elif kind == 1 and self.reserved:
                self.launch(which)
            elif kind == 2 and self.launched:
                self.submit(which)
            elif kind == 3:
                self.compute(1 + which % 6)
            elif kind in (4, 5):
                self.copy(1 + which % 12)
            elif kind == 6:
                self.take()
            elif kind == 7 and self.held:
                self.release(which)

    @rule()
    def drain_by_waiting(self) -> None:
        """No copy needs anything but time, and slabs."""
        self.submit_all()
        self.release_all()
        while pending := self.ring.pending:
            with self.streams.blocking():
                self.ring.wait()
            self.take()
            self.release_all()
            assert self.ring.pending < pending

    @invariant()
    def memory_is_what_it_was_at_first(self) -> None:
        assert self.footprint() == self.memory

    @invariant()
    def pending_are_the_rows_submitted_and_not_taken(self) -> None:
        assert self.ring.pending == len(self.submitted)

    def teardown(self) -> None:
        """With everything released and run, everything submitted can be taken."""
        self.submit_all()
        for _ in range(2 * len(self.submitted)):  # with one slab a piece is issued, then taken
            self.release_all()
            self.take()
            self.streams.run()
        assert not self.submitted
        self.fill()
        self.release_all()

    def footprint(self) -> tuple[int, int, int]:
        ring = self.ring
        return self.streams.allocated_bytes, ring.rows.data_ptr(), ring.counters.data_ptr()

    def fill(self) -> None:
        """Every slot is free."""
        reservation = self.ring.reserve(self.slots)
        assert reservation is not None
        self.ring.cancel(reservation)

    def submit_all(self) -> None:
        while self.reserved:
            self.launch(0)
        while self.launched:
            self.submit(0)

    def release_all(self) -> None:
        while self.held:
            self.release(0)

    def write(self, slot: int, value: int) -> None:
        """The gather, when it runs."""
        staged = (self.ring.rows[slot], self.ring.counters[slot])
        assert not self.uncopied & addresses(staged), "overwritten before it was copied"
        self.uncopied |= addresses(staged)
        staged[0].fill_(content(value))
        staged[1].fill_(value)

    def check_copy(self, host: Tensor, staged: Tensor) -> None:
        """A row of a copy, when it runs."""
        assert staged.data_ptr() in self.uncopied, "copied before it was written, or twice"
        self.uncopied.remove(staged.data_ptr())
        assert host.data_ptr() not in self.in_use, "overwritten in the hands of who took it"

    def check_taken(self, piece: Piece) -> None:
        assert 0 < len(piece.rows) <= self.piece_rows
        rows = [self.submitted.popleft() for _ in range(len(piece.rows))]
        assert [row.tag for row in rows] == [piece.tag] * len(rows)
        assert [row.index for row in rows] == list(range(piece.start, piece.start + len(rows)))
        assert rows[-1].last == piece.last
        values = [row.value for row in rows]
        self.check_rows(piece, values)
        self.held.append((piece, values))
        self.in_use |= addresses([*piece.rows, *piece.counters])

    def check_rows(self, piece: Piece, values: list[int]) -> None:
        for row, counters, value in zip(piece.rows, piece.counters, values, strict=True):
            assert (row == content(value)).all()
            assert (counters == value).all()


def addresses(rows: Iterable[Tensor]) -> set[int]:
    return {row.data_ptr() for row in rows}


TestRing = RingMachine.TestCase
# Without Phase.explain, which takes minutes.
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
TestRing.settings = settings(deadline=None, derandomize=True, database=None, phases=PHASES)
