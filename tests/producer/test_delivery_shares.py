"""Every rank of a group gets its share: one that has no samples trains on nothing, step by step."""

import pytest
from msgspec.structs import replace

from delivery_members import ALICE, BOB, SHARDS, Member, header, offered, producer
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.distribution import OFFERED_SAMPLES
from draftfeed_proto import messages as m


def ranks_of(delivery: Delivery, **fence: object) -> list[Member]:
    """Two, in the group's term, not yet open."""
    ranks = [Member(delivery, name, rank, 2, **fence) for rank, name in enumerate((ALICE, BOB))]
    for rank in ranks:
        rank.ask()
    return ranks


def open_at(ranks: list[Member]) -> list[list[int]]:
    """What each opening made the producer offer, to anybody."""
    return [offered(rank.say(m.Open, trained=[])) for rank in ranks]


def waiting_for(delivery: Delivery, member: Member) -> list[int]:
    """Ordinals that it was offered and has not granted."""
    session = delivery.fencing.attached[member.sender].session
    assert session is not None
    return sorted(id.ordinal for id in session.offered)


@pytest.mark.parametrize("term", [1, 2])
def test_first_rank_to_open_gets_nothing_before_the_others_are_there(term: int) -> None:
    """It would fill its buffer with all there is, and the others would have none."""
    delivery = producer(8)
    if term == 2:
        for rank in ranks_of(delivery):
            rank.leave()
    ranks = ranks_of(delivery, term=term, incarnation=f"life-{term}")
    first, second = open_at(ranks)
    assert first == []
    assert sorted(second) == list(range(8))
    assert [len(waiting_for(delivery, rank)) for rank in ranks] == [4, 4]


def test_samples_that_come_one_by_one_go_to_the_ranks_in_turn() -> None:
    """A trainer faster than generation takes each at once: none was ever left for the second."""
    delivery = producer(0, prompts=8)
    ranks = ranks_of(delivery)
    open_at(ranks)
    taken: list[list[int]] = [[], []]
    for ordinal in range(8):
        delivery.stored(header(ordinal))
        for rank, mine in zip(ranks, taken, strict=True):
            for fresh in waiting_for(delivery, rank):
                rank.take(fresh)
                mine.append(fresh)
    assert taken == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_first_samples_of_many_producers_do_not_all_go_to_the_same_rank() -> None:
    """Of 32 producers and 8 ranks, one had 5.7 times as many samples as another."""
    first_of: list[int] = []
    for number in range(32):
        delivery = producer(0, prompts=1, shards=replace(SHARDS, ranges=(0, 1, number + 1, 40)))
        ranks = ranks_of(delivery)
        open_at(ranks)
        delivery.stored(header(0))
        first_of += [rank for rank in (0, 1) if waiting_for(delivery, ranks[rank])]
    assert 8 <= sum(first_of) <= 24


def test_rank_that_was_cut_off_does_not_get_everything_until_it_has_caught_up() -> None:
    delivery = producer(0, prompts=20)
    ranks = ranks_of(delivery)
    open_at(ranks)
    ranks[1].lose()
    for ordinal in range(10):
        delivery.stored(header(ordinal))
        ranks[0].take(ordinal)
    back = Member(delivery, b"back", 1, 2)
    back.attach()
    for ordinal in range(10, 20):
        delivery.stored(header(ordinal))
        for rank in (ranks[0], back):
            for fresh in waiting_for(delivery, rank):
                rank.take(fresh)
    assert len(delivery.fencing.members["1"].received) == 5


def test_rank_without_room_does_not_hold_up_the_others() -> None:
    """One offer stays open, and all else goes to those that take it."""
    delivery = producer(0, prompts=3 * OFFERED_SAMPLES)
    ranks = ranks_of(delivery)
    open_at(ranks)
    for ordinal in range(3 * OFFERED_SAMPLES):
        delivery.stored(header(ordinal))
        for fresh in waiting_for(delivery, ranks[0]):
            ranks[0].take(fresh)
    assert waiting_for(delivery, ranks[1]) == [1]
    assert len(delivery.fencing.members["0"].received) == 3 * OFFERED_SAMPLES - 1
