"""When a producer whose spool fills up asks for a checkpoint."""

import pytest

from delivery_members import Member, header, id_of, names, producer
from draftfeed_producer import distribution
from draftfeed_producer.delivery import Delivery
from draftfeed_proto import messages as m


@pytest.fixture
def delivery() -> Delivery:
    return producer(4)


@pytest.fixture
def member(delivery: Delivery) -> Member:
    one = Member(delivery)
    one.attach()
    return one


def test_checkpoint_is_asked_for_once_for_each_commit(delivery: Delivery) -> None:
    assert delivery.short_of_space(0) == []
    member = Member(delivery)
    member.attach()
    member.train(0, 1)
    assert names(delivery.short_of_space(1)) == ["CheckpointWanted"]
    assert delivery.short_of_space(1) == []
    member.commit(1, 0)
    assert delivery.short_of_space(1 << 20) == []  # too little to be worth one
    assert names(delivery.short_of_space(1)) == ["CheckpointWanted"]


def test_samples_that_wait_in_the_buffer_are_not_worth_a_checkpoint(
    delivery: Delivery, member: Member
) -> None:
    """A buffer as large as the spool would have a checkpoint made after every step."""
    member.take(0, 1)
    member.say(m.AtWork, ids=[id_of(0)])
    assert delivery.short_of_space(1) == []
    member.say(m.AtWork, ids=[])
    assert names(delivery.short_of_space(1)) == ["CheckpointWanted"]


def test_slow_trainer_at_a_full_spool_makes_no_checkpoint_after_every_step(
    delivery: Delivery, member: Member
) -> None:
    member.train(0)
    one = header(0).encoded_bytes
    assert delivery.short_of_space(2 * one, kept_bytes=one, paused=True) == []
    asked = delivery.short_of_space(2 * one, kept_bytes=2 * one, paused=True)
    assert names(asked) == ["CheckpointWanted"]


@pytest.mark.parametrize("kept_bytes", [0, 1])
def test_trainer_that_can_get_nothing_more_is_asked_however_little_it_frees(
    kept_bytes: int,
) -> None:
    delivery = producer(2, prompts=4)
    member = Member(delivery)
    member.attach()
    member.take(0)  # and trained before anybody heard that it was at work
    assert delivery.short_of_space(1 << 40, kept_bytes=kept_bytes, paused=True) == []
    member.take(1)
    asked = delivery.short_of_space(1 << 40, kept_bytes=kept_bytes, paused=True)
    assert names(asked) == ["CheckpointWanted"]


def test_checkpoint_is_asked_for_when_much_was_trained_though_no_space_is_short(
    delivery: Delivery, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then a crash loses all of it."""
    monkeypatch.setattr(distribution, "MAX_UNCOMMITTED_SAMPLES", 2)
    member.take(0, 1, 2)
    member.say(m.AtWork, ids=[id_of(0), id_of(1)])
    assert delivery.overdue_checkpoint() == []
    member.say(m.AtWork, ids=[])
    assert names(delivery.overdue_checkpoint()) == ["CheckpointWanted"]
    assert delivery.overdue_checkpoint() == []
    member.commit(1, 0, 1)
    assert delivery.overdue_checkpoint() == []
    member.say(m.AtWork, ids=[id_of(2)])
    member.train(3)
    assert names(delivery.overdue_checkpoint()) == ["CheckpointWanted"]


def test_checkpoint_that_would_free_nothing_is_not_asked_for() -> None:
    delivery = producer(2, prompts=4)
    member = Member(delivery)
    member.attach()
    member.train(0, 1)
    member.commit(1, 0, 1)
    assert delivery.short_of_space(0.5, kept_bytes=0, paused=True) == []
    assert names(delivery.short_of_space(0.5, kept_bytes=1, paused=True)) == ["CheckpointWanted"]


def test_full_spool_beside_samples_of_one_that_was_lost() -> None:
    """The group still has them; here they are not even generated yet."""
    delivery = producer(1, prompts=4)
    member = Member(delivery)
    member.attach(held=[id_of(3)])
    member.take(0)
    assert names(delivery.short_of_space(1, paused=True)) == ["CheckpointWanted"]
