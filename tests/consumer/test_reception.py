"""What a member asks for, takes, claims and refuses, with the test as producers and network."""

import xxhash

from draftfeed_consumer.actions import Drop, Ended, Fail
from draftfeed_consumer.errors import BufferTooSmall
from draftfeed_consumer.ledger import parse
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet
from draftfeed_proto.sample import Sample
from member_bench import SIZE, A, B, Bench, frames_of, ids
from samples import sample


def receive_half(bench: Bench) -> tuple[Sample, bytes]:
    """Sample 0, of two frames, of which the first has come; and the other."""
    bench.offer(A, 0)
    made = sample(0, rows=2)
    first, last = frames_of(made)
    bench.start(A, made, [first, last])
    bench.chunk(A, made.id, 0, first)
    return made, last


def receive_damaged(bench: Bench) -> Sample:
    made, last = receive_half(bench)
    bench.chunk(A, made.id, 1, last[:-1] + bytes([last[-1] ^ 1]))
    return made


# R3, R4, R14, R15: what is claimed


def test_cut_link_claims_what_is_held_and_trained_of_that_producer_only() -> None:
    bench = Bench()
    bench.begin()
    bench.offer(A, 0, 1, 2, 3)
    bench.offer(B, 16)
    bench.send(A, 0, 1, 2)
    bench.send(B, 16)
    state = parse(bench.train(0))  # type: ignore[arg-type]
    bench.ledger.committed(state)
    bench.train(1)
    bench.cut(A)
    bench.link(A)
    bench.grant(A)
    again = bench.said(A, m.Open)[-1]
    assert IdSet.from_wire(again.trained) == IdSet(ids(0))
    assert again.held == ids(1, 2)  # 3 was due and never came
    assert again.ledger_number == state.number


def test_room_for_what_was_due_is_free_when_the_link_is_cut() -> None:
    bench = Bench(A)
    bench.begin()
    before = bench.room.left_bytes
    bench.offer(A, 0, 1)
    assert bench.room.left_bytes == before - 2 * SIZE
    bench.cut(A)
    assert bench.room.left_bytes == before


def test_sample_that_is_offered_twice_does_not_take_room_for_good() -> None:
    bench = Bench(A)
    bench.begin()
    before = bench.room.left_bytes
    bench.offer(A, 0, 1)
    bench.offer(A, 1)
    assert any(isinstance(action, Drop) for action in bench.actions)
    assert bench.room.left_bytes == before


def test_half_received_sample_is_dropped_with_its_session_and_taken_whole_later() -> None:
    bench = Bench(A)
    bench.begin()
    receive_half(bench)
    bench.cut(A)
    bench.link()
    bench.grant(A)
    bench.offer(A, 0)
    bench.send(A, 0)
    assert bench.delivered == [0]


def test_sample_that_comes_twice_is_delivered_once() -> None:
    bench = Bench(A)
    bench.begin()
    for _ in range(2):
        bench.offer(A, 0)
        bench.send(A, 0)
    assert bench.delivered == [0]


def test_damaged_chunk_is_asked_for_again_and_its_room_returned() -> None:
    bench = Bench(A)
    bench.begin()
    before = bench.room.left_bytes
    made = receive_damaged(bench)
    assert [nack.id for nack in bench.said(A, m.Nack)] == [made.id]
    assert bench.room.left_bytes == before


def test_end_that_was_on_its_way_when_the_last_sample_was_refused_is_none() -> None:
    """The trainer left, and the producer had its last sample and nobody to give it to."""
    bench = Bench(A)
    bench.begin()
    receive_damaged(bench)
    bench.tell(A, m.EndOfSamples)
    assert Ended not in bench.kinds()
    bench.offer(A, 0)
    bench.send(A, 0)
    assert Ended not in bench.kinds()
    bench.tell(A, m.EndOfSamples, refused=1)
    assert bench.kinds().count(Ended) == 1


def test_a_codec_that_is_not_known_here_ends_the_stream_and_is_no_damage() -> None:
    """Asked for again it would come the same way, and the producer would give the sample up."""
    bench = Bench(A)
    bench.begin()
    bench.offer(A, 0)
    made = sample(0, rows=2)
    tokens, states = frames_of(made)
    newer = bytearray(states)
    newer[5] = 200  # the codec
    checksum = xxhash.xxh3_64(newer[:32] + newer[40:]).intdigest()
    newer[32:40] = checksum.to_bytes(8, "little")
    bench.start(A, made, [tokens, newer])
    bench.chunk(A, made.id, 0, tokens)
    bench.chunk(A, made.id, 1, newer)
    (failure,) = [action.error for action in bench.actions if isinstance(action, Fail)]
    assert "unknown codec 200" in str(failure)
    assert "upgrade" in str(failure)
    assert not bench.said(A, m.Nack)


# R16: one queue


def test_producers_share_the_buffer_by_bytes_and_not_by_their_haste() -> None:
    bench = Bench(room=4)
    bench.begin()
    bench.offer(A, *range(8))
    assert [len(grant.ids) for grant in bench.said(A, m.Grant)] == [4]
    bench.offer(B, *range(16, 24))
    for _ in range(4):  # the trainer releases one after the other
        bench.room.cancel(SIZE)
        bench.do(bench.member.grant())
    assert sum(len(grant.ids) for grant in bench.said(B, m.Grant)) == 4
    assert sum(len(grant.ids) for grant in bench.said(A, m.Grant)) == 4


def test_late_producer_does_not_get_the_queue_for_itself() -> None:
    bench = Bench(without=(B,), room=6)
    bench.link(A)
    bench.grant(A)
    bench.do(bench.member.open())
    bench.offer(A, *range(8))
    bench.link(B)
    bench.grant(B)
    bench.offer(B, *range(16, 24))
    bench.room.cancel(2 * SIZE)
    bench.do(bench.member.grant())
    assert [sum(len(g.ids) for g in bench.said(x, m.Grant)) for x in (A, B)] == [7, 1]


def test_step_larger_than_the_buffer_is_told_at_attach_instead_of_deadlocking() -> None:
    """The trainer waits for the fourth sample of a step while the first three fill the buffer."""
    bench = Bench(A, capacity_bytes=3 * SIZE, batch_samples=4)
    bench.link()
    bench.grant(A, max_sample_bytes=SIZE)
    error = bench.failure
    assert isinstance(error, BufferTooSmall)
    assert error.needed_bytes == 5 * SIZE
    assert f"capacity_bytes to {5 * SIZE}" in str(error)


# what comes wrong


def test_message_of_another_session_changes_nothing() -> None:
    bench = Bench(A)
    bench.begin()
    old = m.AllTerminal(term=1, session="another")
    assert bench.member.received(A, old) == []


def test_malformed_message_ends_its_session_and_no_other() -> None:
    bench = Bench()
    bench.begin()
    made = sample(0, rows=2)
    bench.start(A, made, frames_of(made))  # never offered
    dropped = bench.only(Drop)
    assert isinstance(dropped, Drop)
    assert dropped.address == A
    assert bench.member.peer(B).attached


def test_membership_can_be_copied_in_the_middle_of_a_sample() -> None:
    """A search of all schedules needs that."""
    bench = Bench(A)
    bench.begin()
    made, last = receive_half(bench)
    twin = bench.twin()
    for branch in (bench, twin):
        branch.chunk(A, made.id, 1, last)
        assert branch.delivered == [0]
    assert twin.ledger.held_count == bench.ledger.held_count == 1
