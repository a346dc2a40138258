"""The staging ring, one rule at a time. Every order of them: test_tap_ring_machine.py."""

import weakref

import pytest

from draftfeed_producer.errors import RingTooSmall
from draftfeed_producer.tap.ring import Piece, RingSizes, StagingRing, make_ring, make_slabs
from draftfeed_producer.tap.streams import HostStreams
from simulated_streams import HIDDEN, SimulatedEvent, SimulatedStreams, Stuck, small_ring


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


def test_wait_is_for_the_oldest_copy_and_for_no_other():
    streams = SimulatedStreams()
    ring = small_ring(streams, slots=4, piece_rows=1, slabs=2)
    gathered(ring, 1, 2)
    with streams.blocking():
        ring.wait()
    statistics = ring.statistics()
    assert (statistics.ready, statistics.in_flight) == (1, 1)


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
