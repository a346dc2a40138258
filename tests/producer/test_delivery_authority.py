"""Which checkpoint counts: adopted, older than the last commit, rolled back to, regenerated."""

from collections.abc import Callable

import pytest

from delivery_members import BOB, Member, done, header, id_of, ids, names, offered, producer, said
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.session import Regenerate, StoreCommit
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import SampleHeader


def records(*ordinals: int) -> Callable[[SampleId], SampleHeader | None]:
    """What is still in the spool of what was committed."""
    return lambda id: header(id.ordinal) if id.ordinal in ordinals else None


@pytest.fixture
def delivery() -> Delivery:
    """Commit 5 of term 3 holds samples 0 to 2; the records of 1 and 2 still exist."""
    return producer(
        samples=0,
        prompts=4,
        committed=ids(0, 1, 2),
        commit_term=3,
        commit_number=5,
        header_of=records(1, 2),
    )


def leader(delivery: Delivery) -> Member:
    return Member(delivery, BOB, term=4)


def test_checkpoint_newer_than_the_last_commit_is_adopted(delivery: Delivery) -> None:
    actions = leader(delivery).attach(ids(0, 1, 2, 3), ledger_term=3, ledger_number=6)
    assert done(actions, StoreCommit) == [StoreCommit(6, ids(0, 1, 2, 3), 3)]
    assert names(actions) == ["StoreCommit", "Opened"]


def test_the_checkpoint_of_the_last_commit_changes_nothing(delivery: Delivery) -> None:
    actions = leader(delivery).attach(ids(0, 1, 2), ledger_term=3, ledger_number=5)
    assert names(actions) == ["Opened"]


def test_an_adopted_checkpoint_never_lowers_the_number_of_the_last_commit(
    delivery: Delivery,
) -> None:
    """Or the commit after it would pass for one that came twice."""
    member = leader(delivery)
    member.attach(ids(0, 1, 2, 3), ledger_term=3, ledger_number=2)
    assert delivery.authority.key == (3, 6)
    assert names(member.commit(1, 0, 1, 2, 3))[0] == "StoreCommit"


def test_checkpoint_without_samples_of_the_last_commit_is_refused_by_name(
    delivery: Delivery,
) -> None:
    (refusal,) = said(leader(delivery).attach(ids(0), ledger_term=3), m.Refused)
    assert refusal.code == "rollback"
    assert f"2 samples more than the one loaded (first: {id_of(1)})" in refusal.reason
    assert not delivery.fencing.attached


def test_checkpoint_of_an_older_term_is_refused_even_with_every_sample(delivery: Delivery) -> None:
    """Another process trained these samples since: the weights loaded are not theirs."""
    (refusal,) = said(leader(delivery).attach(ids(0, 1, 2), ledger_term=2), m.Refused)
    assert (refusal.code, "of an older term" in refusal.reason) == ("rollback", True)


def test_a_refused_leader_does_not_hold_the_stream(delivery: Delivery) -> None:
    leader(delivery).attach(ids(0))
    other = Member(delivery, b"other", incarnation="second", term=5)
    assert names(other.attach(ids(0, 1, 2), ledger_term=3)) == ["Opened"]


def test_rollback_delivers_again_what_still_exists(delivery: Delivery) -> None:
    opening = {"rollback": "deliver", "ledger_term": 3, "ledger_number": 4}
    actions = leader(delivery).attach(ids(0), **opening)
    assert done(actions, StoreCommit) == [StoreCommit(4, ids(0), 3, rollback=True)]
    assert offered(actions) == [1, 2]
    assert delivery.committed == ids(0)


def test_rollback_that_would_lose_samples_is_refused_by_name(delivery: Delivery) -> None:
    actions = leader(delivery).attach(rollback="deliver", ledger_term=3, ledger_number=1)
    (refusal,) = said(actions, m.Refused)
    assert refusal.code == "rollback"
    assert str(id_of(0)) in refusal.reason
    assert "--rollback regenerate" in refusal.reason
    assert delivery.committed == ids(0, 1, 2)


def test_rollback_regenerates_what_is_gone(delivery: Delivery) -> None:
    member = leader(delivery)
    actions = member.attach(rollback="regenerate", ledger_term=3, ledger_number=1)
    assert done(actions, Regenerate) == [Regenerate([id_of(0)])]
    assert offered(actions) == [1, 2]
    delivery.finish()
    member.take(1, 2)
    assert "EndOfSamples" not in names(member.commit(2, 1, 2))
    assert offered(delivery.stored(header(0))) == [0]
    assert delivery.regenerated == ids(0)


def test_a_rollback_to_an_older_term_with_the_same_samples_is_stored(delivery: Delivery) -> None:
    opening = {"rollback": "deliver", "ledger_term": 2, "ledger_number": 9}
    actions = leader(delivery).attach(ids(0, 1, 2), **opening)
    assert done(actions, StoreCommit) == [StoreCommit(9, ids(0, 1, 2), 2, rollback=True)]


def test_commits_go_on_from_the_checkpoint_that_was_rolled_back_to(delivery: Delivery) -> None:
    member = leader(delivery)
    member.attach(ids(0), rollback="deliver", ledger_term=3, ledger_number=4)
    member.take(1)
    assert done(member.commit(5, 0, 1), StoreCommit) == [StoreCommit(5, ids(0, 1), 4)]


def test_a_flag_that_was_not_needed_changes_nothing(delivery: Delivery) -> None:
    opening = {"rollback": "regenerate", "ledger_term": 3, "ledger_number": 5}
    assert names(leader(delivery).attach(ids(0, 1, 2), **opening)) == ["Opened"]


def test_sample_generated_while_a_member_brought_it_as_trained_is_not_offered() -> None:
    """A producer rebuilt on an empty disk was at work on what the member had trained before."""
    delivery = producer(0, prompts=2)
    assert not delivery.ledger_known
    Member(delivery).attach(ids(0), ledger_number=1)
    assert delivery.ledger_known
    assert delivery.stored(header(0)) == []
    assert offered(delivery.stored(header(1))) == [1]


def test_what_a_checkpoint_has_is_not_generated_again() -> None:
    """It was damaged at rest, but an adopted checkpoint has it: the end does not wait for it."""
    delivery = producer(1)
    first = Member(delivery)
    first.attach()
    first.take(0)
    delivery.finish()
    first.say(m.Nack, id=id_of(0), reason="checksum")
    delivery.verified(id_of(0), False)
    actions = Member(delivery, BOB, term=2).attach(ids(0), ledger_term=1, ledger_number=1)
    assert "AllTerminal" in names(actions)


@pytest.mark.parametrize("how", ["deliver", "regenerate"])
def test_a_rollback_does_not_miss_what_was_rejected_in_the_line_gone_back_to(how: str) -> None:
    """Trained in one line of checkpoints, rejected in another: nobody would generate it again,
    and the end would wait for it."""
    delivery = producer(
        samples=0,
        prompts=2,
        committed=ids(0, 1),
        commit_term=3,
        commit_number=5,
        tombstones={id_of(0): "rejected"},
    )
    opening = {"rollback": how, "ledger_term": 3, "ledger_number": 4}
    actions = leader(delivery).attach(ids(1), **opening)
    assert names(actions) == ["StoreCommit", "Opened"]
    assert names(delivery.finish()) == ["EndOfSamples", "AllTerminal"]
