"""The buffer: bounded in bytes, shuffled in a window, never a silent deadlock."""

import threading
from collections.abc import Callable

import pytest
import torch

from draftfeed_consumer.buffer import Buffer, BufferConfig, size_of
from draftfeed_consumer.errors import BufferTooSmall, StreamLost
from draftfeed_consumer.stream import to_item
from samples import DESCRIPTOR, sample

SIZE = size_of(sample(0))


def buffer(
    samples: int,
    window: int = 1,
    stall_seconds: float = 30.0,
    seed: int = 0,
    hoard_seconds: float = 0.0,
) -> Buffer:
    return Buffer(
        BufferConfig(
            capacity_bytes=samples * SIZE,
            window_samples=window,
            stall_seconds=stall_seconds,
            seed=seed,
            hoard_seconds=hoard_seconds,
        )
    )


def fill(target: Buffer, ordinals: range) -> None:
    for ordinal in ordinals:
        assert target.reserve(SIZE)
        target.put(sample(ordinal))


def drain(target: Buffer) -> list[int]:
    ordinals = []
    while (taken := target.take()) is not None:
        ordinals.append(taken.id.ordinal)
        target.release(taken.id)
    return ordinals


def test_room_is_refused_beyond_the_capacity_and_comes_back_with_release() -> None:
    room = buffer(2)
    fill(room, range(2))
    assert not room.reserve(SIZE)
    taken = room.take()
    assert taken is not None
    assert not room.reserve(SIZE)  # the trainer still holds its tensors
    assert room.release(taken.id)
    assert room.reserve(SIZE)
    assert not room.release(taken.id)


def test_cancelled_reservation_gives_its_room_back() -> None:
    room = buffer(1)
    assert room.reserve(SIZE)
    room.cancel(SIZE)
    assert room.reserve(SIZE)


def test_window_of_one_keeps_the_order_of_arrival() -> None:
    room = buffer(8)
    fill(room, range(8))
    room.end()
    assert drain(room) == list(range(8))


def test_window_shuffles_and_the_seed_repeats_it() -> None:
    def order(seed: int) -> list[int]:
        room = buffer(32, window=8, seed=seed)
        fill(room, range(32))
        room.end()
        return drain(room)

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(32))
    # The k-th sample taken is drawn from the first k + 8 that arrived.
    assert all(ordinal < position + 8 for position, ordinal in enumerate(order(1)))


def test_end_yields_a_window_that_is_not_full() -> None:
    room = buffer(8, window=8)
    fill(room, range(3))
    room.end()
    assert sorted(drain(room)) == [0, 1, 2]


def test_buffer_full_by_bytes_yields_a_window_that_is_not_full() -> None:
    room = buffer(2, window=8)
    fill(room, range(2))
    assert not room.reserve(SIZE)
    assert room.take() is not None


def test_stalled_stream_yields_a_window_that_is_not_full() -> None:
    room = buffer(8, window=8, stall_seconds=0.0)
    fill(room, range(1))
    assert room.take() is not None


def test_waiting_trainer_hears_of_the_end_and_of_a_failure() -> None:
    for act, outcome in (
        (Buffer.end, None),
        (lambda room: room.fail(StreamLost("tcp://x", 3.0)), StreamLost),
    ):
        room = buffer(2)
        assert taken_while(room, act) is outcome


def taken_while(room: Buffer, act: Callable[[Buffer], None]) -> object:
    """What a thread gets that waits for a sample while `act` happens: None, or a kind of error."""
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(room.take())
        except StreamLost as error:
            outcome.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    act(room)
    thread.join(10)
    return outcome[0]


def test_trainer_that_waits_while_holding_everything_is_told() -> None:
    room = buffer(2)
    fill(room, range(2))
    for _ in range(2):
        room.take()
    assert not room.reserve(SIZE)
    with pytest.raises(BufferTooSmall, match=f"capacity_bytes to {3 * SIZE}"):
        room.take()


def test_release_by_another_thread_is_waited_for() -> None:
    room = buffer(2, hoard_seconds=30.0)
    fill(room, range(2))
    held = [room.take() for _ in range(2)]
    assert not room.reserve(SIZE)

    def release_and_send(target: Buffer) -> None:
        assert held[0] is not None
        target.release(held[0].id)
        fill(target, range(2, 3))
        target.fail(StreamLost("tcp://x", 3.0))

    assert taken_while(room, release_and_send) is StreamLost


def test_released_room_is_not_mistaken_for_hoarding() -> None:
    room = buffer(2)
    fill(room, range(2))
    held = [room.take() for _ in range(2)]
    assert not room.reserve(SIZE)
    assert held[0] is not None
    room.release(held[0].id)
    room.end()
    assert room.take() is None


def test_sample_larger_than_the_whole_buffer_is_told_at_once() -> None:
    with pytest.raises(BufferTooSmall, match=f"one sample has {2 * SIZE} bytes"):
        buffer(1).reserve(2 * SIZE)


def test_statistics_add_up() -> None:
    room = buffer(4)
    fill(room, range(2))
    assert room.reserve(SIZE)
    room.take()
    seen = room.statistics()
    assert (seen.bytes, seen.held_bytes, seen.ready) == (3 * SIZE, SIZE, 1)


def test_window_full_by_count_yields_at_once() -> None:
    room = buffer(8, window=3)
    fill(room, range(2))
    assert not room.wait(0.0)
    fill(room, range(2, 3))
    assert room.wait(0.0)


def test_waiting_for_a_sample_has_an_end() -> None:
    assert not buffer(1).wait(0.01)


def test_drained_buffer_names_what_the_trainer_has_not_seen_and_ends() -> None:
    room = buffer(4)
    fill(room, range(3))
    taken = room.take()
    assert taken is not None
    assert [id.ordinal for id in room.drain()] == [1, 2]
    assert room.take() is None
    assert room.statistics().bytes == SIZE  # the trainer still has the first


def test_sample_that_comes_after_the_end_is_yielded() -> None:
    """Another rank has given it back."""
    room = buffer(4)
    room.end()
    assert room.ended
    room.reopen()
    assert not room.ended
    fill(room, range(1))
    room.end()
    assert not room.ended
    assert drain(room) == [0]


def test_collator_that_keeps_a_view_after_release_reads_what_it_was_given() -> None:
    """Room is counted anew, memory is not written anew: a view keeps its arrays alive."""
    room = buffer(2)
    fill(room, range(2))
    first = room.take()
    assert first is not None
    item = to_item(first, DESCRIPTOR)
    view = item["hidden_states"][3:5]  # what a collator that forgot to copy holds
    wanted, tokens = view.clone(), item["input_ids"].clone()
    room.release(first.id)
    del first
    for ordinal in range(2, 200):
        fill(room, range(ordinal, ordinal + 1))
        taken = room.take()
        assert taken is not None
        room.release(taken.id)
    assert torch.equal(view, wanted)
    assert torch.equal(item["input_ids"], tokens)
