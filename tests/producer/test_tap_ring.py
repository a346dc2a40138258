"""The staging ring on a device whose every operation runs as late, or as early, as it may."""

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
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

from draftfeed_producer.errors import RingTooSmall
from draftfeed_producer.tap.ring import (
    Piece,
    Reservation,
    RingSizes,
    StagingRing,
    make_ring,
    make_slabs,
)
from draftfeed_producer.tap.streams import HostStreams, Streams
from simulated_streams import SimulatedEvent, SimulatedStreams, Stuck

HIDDEN = 3
any_of = st.integers(0, 1 << 20)
"""One of those there are, whatever their number."""


def small_ring(
    streams: Streams,
    slots: int,
    piece_rows: int,
    slabs: int,
    layers: int = 2,
    dtype: torch.dtype = torch.float16,
) -> StagingRing:
    piece_bytes = piece_rows * layers * HIDDEN * 2
    memory = make_slabs(streams, slabs, piece_bytes, layers, HIDDEN, dtype)
    return StagingRing(streams, slots, layers, HIDDEN, dtype=dtype, slabs=memory)


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


def gathered(ring: StagingRing, value: int, n: int) -> object:
    """Submits n rows of value, value + 1 and so on, written at once; returns their tag."""
    reservation = ring.reserve(n)
    assert reservation is not None
    for i, slot in enumerate(reservation.slots):
        ring.rows[slot] = value + i
        ring.counters[slot] = value + i
    tag = object()
    ring.submit(reservation, tag)
    return tag


def taken(ring: StagingRing) -> Piece:
    piece = ring.take()
    assert piece is not None
    return piece


def test_more_rows_than_slots_is_an_error_that_says_what_to_do():
    ring = small_ring(HostStreams(), slots=4, piece_rows=2, slabs=1)
    with pytest.raises(RingTooSmall, match=r"5 rows .* 4 slots; make the ring larger") as caught:
        ring.reserve(5)
    assert (caught.value.rows, caught.value.slots) == (5, 4)
    assert ring.reserve(4) is not None


def test_a_full_ring_refuses_and_counts_it():
    """Back-pressure is told to who would launch: the ring neither drops nor waits."""
    ring = small_ring(SimulatedStreams(), slots=4, piece_rows=2, slabs=1)
    gathered(ring, 1, 3)
    assert ring.reserve(2) is None
    assert ring.reserve(1) is not None
    statistics = ring.statistics()
    assert (statistics.refused, statistics.free_slots) == (1, 0)
    assert (statistics.in_flight, statistics.queued) == (1, 1)


def test_on_the_cpu_a_piece_is_there_as_soon_as_it_is_submitted():
    ring = small_ring(HostStreams(), slots=5, piece_rows=2, slabs=2)
    for value in range(20):
        tag = gathered(ring, value, 3)
        start = 0
        while start < 3:
            piece = taken(ring)
            assert (piece.tag, piece.start) == (tag, start)
            for row, counters in zip(piece.rows, piece.counters, strict=True):
                assert (row == value + start).all()
                assert (counters == value + start).all()
                start += 1
            assert piece.last == (start == 3)
            ring.release(piece)
        assert ring.take() is None


def test_wait_returns_at_once_when_every_slab_is_in_the_callers_hands():
    """A caller that waits for slabs it holds itself hangs for ever."""
    streams = SimulatedStreams()
    ring = small_ring(streams, slots=4, piece_rows=1, slabs=1)
    gathered(ring, 1, 2)
    streams.run()
    piece = taken(ring)
    with streams.blocking():
        ring.wait()
    assert (ring.take(), ring.pending) == (None, 1)
    ring.release(piece)
    with streams.blocking():
        ring.wait()
    assert taken(ring).last


def test_a_slow_gather_holds_up_the_copies_and_not_the_thread():
    streams = SimulatedStreams()
    ring = small_ring(streams, slots=4, piece_rows=2, slabs=2)
    streams.forward.queue(lambda: ring.rows.fill_(7))
    reservation = ring.reserve(2)
    assert reservation is not None
    ring.submit(reservation, "slow")
    while streams.copies.step():
        pass
    assert ring.take() is None
    streams.run()
    assert (taken(ring).rows == 7).all()


@pytest.mark.parametrize("ends", ["submit", "cancel"])
def test_a_reservation_ends_once(ends: str):
    ring = small_ring(HostStreams(), slots=4, piece_rows=2, slabs=1)
    reservation = ring.reserve(2)
    assert reservation is not None
    end = {
        "submit": lambda: ring.submit(reservation, None),
        "cancel": lambda: ring.cancel(reservation),
    }
    end[ends]()
    for again in end.values():
        with pytest.raises(AssertionError, match="submitted or cancelled before"):
            again()


def test_a_piece_is_released_once_and_where_it_was_taken():
    rings = [small_ring(HostStreams(), slots=4, piece_rows=2, slabs=1) for _ in range(2)]
    for ring in rings:
        gathered(ring, 1, 1)
    piece = taken(rings[0])
    with pytest.raises(AssertionError, match="of another ring"):
        rings[1].release(piece)
    rings[0].release(piece)
    with pytest.raises(AssertionError, match="released before"):
        rings[0].release(piece)


def test_close_waits_for_all_that_uses_the_memory_and_lets_go_of_it():
    """Memory that is freed too early is written by a gather, or a copy, of the past."""
    streams = SimulatedStreams()
    ring = small_ring(streams, slots=4, piece_rows=1, slabs=1)
    gathered(ring, 1, 2)
    assert ring.reserve(1) is not None
    streams.forward.queue(lambda: ring.rows.fill_(3))  # launched for the last one, not submitted
    memory = weakref.ref(ring.rows.untyped_storage())
    with streams.blocking():
        ring.close()
    assert not len(streams.forward)
    assert not len(streams.copies)
    assert memory() is None
    assert (len(ring.rows), ring.pending, ring.take()) == (0, 0, None)
    with streams.blocking():
        ring.close()


def test_a_ring_and_its_slabs_are_made_in_bytes():
    streams = SimulatedStreams()
    sizes = RingSizes(piece_bytes=1000, pieces=3, slabs=2)
    ring = make_ring(streams, sizes, layers=2, hidden=HIDDEN)
    assert ring.piece_rows == 1000 // (2 * HIDDEN * 2)
    assert ring.rows.shape == (3 * ring.piece_rows, 2, HIDDEN)
    assert ring.statistics().slots == 3 * ring.piece_rows
    row_bytes = 2 * (HIDDEN * 2 + 4 * 4)
    assert streams.allocated_bytes == (3 + 2) * ring.piece_rows * row_bytes


def test_a_row_larger_than_a_piece_should_be_is_a_piece():
    sizes = RingSizes(piece_bytes=1, pieces=3, slabs=2)
    ring = make_ring(HostStreams(), sizes, layers=2, hidden=HIDDEN)
    assert (ring.piece_rows, len(ring.rows)) == (1, 3)


def test_slabs_may_be_given_by_who_shares_them():
    slabs = make_slabs(HostStreams(), 2, 1000, 2, HIDDEN)
    sizes = RingSizes(piece_bytes=1, pieces=2, slabs=9)
    ring = make_ring(HostStreams(), sizes, layers=2, hidden=HIDDEN, slabs=slabs)
    gathered(ring, 5, 2)
    assert taken(ring).rows.data_ptr() == slabs[0].rows.data_ptr()
    assert slabs[0].rows[:2, 0, 0].tolist() == [5, 6]


def test_a_simulated_stream_that_waits_for_itself_is_found():
    streams = SimulatedStreams()
    event = SimulatedEvent(streams, streams.copies)
    streams.copies.hold(event)
    event.record()
    with streams.blocking(), pytest.raises(Stuck, match="waits for itself"):
        event.wait()


def test_a_simulated_event_is_not_waited_for_where_nothing_may_block():
    streams = SimulatedStreams()
    with pytest.raises(Stuck, match="must not block"):
        streams.written().wait()
