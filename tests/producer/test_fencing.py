"""Who may take samples: terms, takeovers, ranks started again, other groups."""

from typing import Any

import pytest

from delivery_members import (
    ALICE,
    BOB,
    CAROL,
    TIMEOUT_SECONDS,
    Member,
    done,
    id_of,
    ids,
    names,
    offered,
    producer,
    said,
)
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.session import Send, StoreTerm
from draftfeed_producer.spool.control import Term
from draftfeed_proto import messages as m


@pytest.fixture
def delivery() -> Delivery:
    return producer(4)


@pytest.fixture
def first(delivery: Delivery) -> Member:
    member = Member(delivery)
    member.attach()
    return member


def second(delivery: Delivery, term: int = 2, **fence: Any) -> Member:
    """Another life of the group."""
    return Member(delivery, BOB, incarnation="second", process="other", term=term, **fence)


def test_term_is_durable_before_it_is_granted(delivery: Delivery) -> None:
    actions = Member(delivery, term=5).ask()
    assert names(actions) == ["StoreTerm", "Granted"]
    assert actions[0] == StoreTerm(5, "run", "first", 1)
    assert said(actions, m.Granted)[0].term == 5


def test_granted_says_what_was_committed_and_what_is_owned(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.take(0)
    member.commit(7, 0)
    granted = said(Member(delivery).ask(), m.Granted)[0]
    assert (granted.commit_term, granted.commit_number) == (1, 7)
    assert (granted.committed, granted.shards) == (ids(0).to_wire(), delivery.shards)


def test_the_same_member_attaches_again_within_its_term_without_a_new_one(
    delivery: Delivery, first: Member
) -> None:
    first.lose()
    assert names(Member(delivery, BOB).ask(now=1e9)) == ["Granted"]


def test_a_new_connection_of_a_member_ends_its_old_one(delivery: Delivery, first: Member) -> None:
    first.take(0)
    new = Member(delivery, BOB)
    new.attach(held=[id_of(0)])
    (refusal,) = said(first.commit(1, 0), m.Refused)
    assert refusal.code == "session"
    assert names(new.commit(1, 0))[:2] == ["StoreCommit", "Committed"]


def test_another_life_of_the_group_waits_while_the_first_is_attached(
    delivery: Delivery, first: Member
) -> None:
    refusal = second(delivery).refused(now=1e6)
    assert (refusal.code, refusal.term) == ("held", 1)
    assert "member 0 of group 'run' is attached" in refusal.reason


def test_the_stream_is_free_when_the_holder_said_goodbye(delivery: Delivery, first: Member) -> None:
    first.leave()
    assert names(second(delivery).ask(now=0.1)) == ["StoreTerm", "Granted"]


def test_the_stream_is_free_when_the_holder_was_gone_for_the_session_timeout(
    delivery: Delivery, first: Member
) -> None:
    first.lose(now=100.0)
    refusal = second(delivery).refused(now=100.0 + TIMEOUT_SECONDS - 0.1)
    assert (refusal.code, "may still come back" in refusal.reason) == ("held", True)
    assert names(second(delivery).ask(now=100.0 + TIMEOUT_SECONDS)) == ["StoreTerm", "Granted"]


def test_the_last_rank_to_be_lost_starts_the_session_timeout(delivery: Delivery) -> None:
    ranks = [Member(delivery, name, rank, 2) for rank, name in enumerate((ALICE, BOB))]
    for rank in ranks:
        rank.attach()
    ranks[0].lose(now=1.0)
    ranks[1].lose(now=50.0)
    late = Member(delivery, CAROL, incarnation="second", term=2, members=2)
    assert late.refused(now=55.0).code == "held"
    assert names(late.ask(now=60.0))[0] == "StoreTerm"


def test_one_rank_that_left_and_one_that_was_lost_still_hold_the_stream(
    delivery: Delivery,
) -> None:
    ranks = [Member(delivery, name, rank, 2) for rank, name in enumerate((ALICE, BOB))]
    for rank in ranks:
        rank.attach()
    ranks[0].leave()
    ranks[1].lose(now=5.0)
    assert second(delivery, members=2).refused(now=6.0).code == "held"


def test_after_a_restart_the_holder_has_the_session_timeout_to_come_back() -> None:
    delivery = producer(4, now=1000.0, term=Term(1, "run", "first"))
    assert second(delivery).refused(now=1000.0 + TIMEOUT_SECONDS - 1).code == "held"
    assert names(second(delivery).ask(now=1000.0 + TIMEOUT_SECONDS))[0] == "StoreTerm"


def test_after_a_restart_the_holder_attaches_in_its_term() -> None:
    delivery = producer(4, term=Term(1, "run", "first"))
    assert names(Member(delivery).ask(now=1e6)) == ["Granted"]


def test_takeover_does_not_wait(delivery: Delivery, first: Member) -> None:
    first.take(0)
    actions = second(delivery, takeover=True).ask()
    assert names(actions) == ["StoreTerm", "Refused", "Granted"]
    (told,) = said(actions, m.Refused)
    assert (told.code, told.term) == ("fenced", 2)
    assert [a.sender for a in done(actions, Send)] == [ALICE, BOB]


def test_takeover_still_needs_a_higher_term(delivery: Delivery, first: Member) -> None:
    refusal = second(delivery, term=1, takeover=True).refused()
    assert (refusal.code, refusal.term) == ("fenced", 1)
    assert names(second(delivery, term=2, takeover=True).ask())[0] == "StoreTerm"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (m.Commit, {"number": 1, "trained": ids(0).to_wire()}),
        (m.Release, {"ids": [id_of(0)]}),
        (m.Reject, {"id": id_of(0), "reason": "x"}),
        (m.Nack, {"id": id_of(0), "reason": "x"}),
        (m.AtWork, {"ids": [id_of(0)]}),
        (m.Open, {"trained": []}),
    ],
)
def test_nothing_that_a_fenced_member_says_counts(
    delivery: Delivery, first: Member, kind: type[m.InSession], fields: dict[str, Any]
) -> None:
    first.take(0)
    new = second(delivery, takeover=True)
    new.attach()
    new.take(0)
    (refusal,) = said(first.say(kind, **fields), m.Refused)
    assert (refusal.code, refusal.term) == ("fenced", 2)
    assert len(delivery.committed) == 0
    assert delivery.fencing.leased == {id_of(0)}


def test_a_fenced_member_that_comes_back_is_refused_for_good(
    delivery: Delivery, first: Member
) -> None:
    second(delivery, takeover=True).attach()
    for takeover in (False, True):
        refusal = Member(delivery, CAROL, takeover=takeover).refused(now=1e6)
        assert (refusal.code, refusal.term) == ("fenced", 2)


def test_a_name_in_the_right_session_from_another_connection_is_refused(
    delivery: Delivery, first: Member
) -> None:
    first.take(0)
    assert first.granted is not None
    forged = m.Commit(term=1, session=first.granted.session, number=1, trained=ids(0).to_wire())
    assert names(delivery.received(CAROL, forged, 0.0)) == ["Refused"]
    guessed = m.Release(term=1, session="guessed", ids=[id_of(0)])
    assert names(delivery.received(ALICE, guessed, 0.0)) == ["Refused"]
    assert delivery.fencing.leased == {id_of(0)}


def test_another_group_is_refused_by_name(delivery: Delivery, first: Member) -> None:
    first.leave()
    refusal = second(delivery, group="other", takeover=True).refused(now=1e6)
    assert (refusal.code, "'run', not 'other'" in refusal.reason) == ("group", True)


def test_a_rank_that_was_started_again_alone_is_refused(delivery: Delivery) -> None:
    """What it had trained in memory is lost, and the others hold the rest of that step."""
    leader, rank = (Member(delivery, n, r, 2) for r, n in enumerate((ALICE, BOB)))
    leader.attach()
    rank.attach()
    rank.lose()
    refusal = Member(delivery, CAROL, 1, 2, process="new").refused(now=1e6)
    assert (refusal.code, "start the whole group again" in refusal.reason) == ("restarted", True)


def test_a_group_of_another_size_in_one_term_is_refused(delivery: Delivery) -> None:
    Member(delivery, members=2).attach()
    assert Member(delivery, BOB, 1, 3).refused().code == "restarted"


def test_only_the_leader_begins_a_term(delivery: Delivery) -> None:
    assert Member(delivery, BOB, 1, 2).refused().code == "held"
    Member(delivery, members=2).attach()
    refusal = Member(delivery, BOB, 1, 2, incarnation="second", term=2, takeover=True).refused()
    assert (refusal.code, refusal.term) == ("held", 1)
    assert delivery.fencing.number == 1


def test_a_leader_that_must_raise_its_term_takes_its_own_ranks_along(delivery: Delivery) -> None:
    """Another producer had a higher one: nobody was replaced, so nobody needs to give up."""
    leader, rank = (Member(delivery, n, r, 2) for r, n in enumerate((ALICE, BOB)))
    leader.attach()
    rank.attach()
    actions = Member(delivery, CAROL, members=2, term=3).ask()
    assert [refused.code for refused in said(actions, m.Refused)] == ["session", "session"]
    assert done(actions, StoreTerm) == [StoreTerm(3, "run", "first", 2)]


def test_leases_of_the_old_term_are_handed_out_in_the_new_one(
    delivery: Delivery, first: Member
) -> None:
    first.take(0, 1)
    first.commit(1, 0)
    new = second(delivery, takeover=True)
    assert offered(new.attach(trained=ids(0), ledger_term=1, ledger_number=1)) == [1, 2, 3]


def test_a_new_term_begins_without_offers_to_whoever_has_not_opened(
    delivery: Delivery, first: Member
) -> None:
    new = second(delivery, takeover=True)
    assert "Offer" not in names(new.ask())
    assert offered(new.say(m.Open, trained=[])) == [0, 1, 2, 3]


def test_a_lost_session_of_the_old_term_does_not_end_the_new_one(
    delivery: Delivery, first: Member
) -> None:
    second(delivery, takeover=True).attach()
    assert first.lose() == []
    assert list(delivery.fencing.attached) == [BOB]


def test_goodbye_that_is_read_after_the_member_was_found_gone_still_frees_the_stream(
    delivery: Delivery, first: Member
) -> None:
    first.lose(now=1.0)
    first.leave()
    assert names(second(delivery).ask(now=1.0)) == ["StoreTerm", "Granted"]
