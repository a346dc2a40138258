"""The delivery state alone: messages in, actions out, no sockets and no disk."""

import pytest

from delivery_members import (
    ALICE,
    BOB,
    FRAME_BYTES,
    Member,
    done,
    header,
    id_of,
    ids,
    names,
    offered,
    producer,
    said,
)
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.distribution import OFFERED_SAMPLES
from draftfeed_producer.session import StoreCommit, StoreTombstone
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Expectation
from draftfeed_proto.ids import IdSet


@pytest.fixture
def delivery() -> Delivery:
    return producer(4)


@pytest.fixture
def member(delivery: Delivery) -> Member:
    """Attached, with everything offered."""
    one = Member(delivery)
    assert names(one.attach()) == ["Opened", "Offer"]
    return one


# what is sent


def test_nothing_is_sent_before_it_is_granted_and_credited(member: Member) -> None:
    assert member.receive() == []
    member.grant(0, 1)
    assert member.receive(credit_bytes=0) == [0, 1]  # credit is cumulative: the first one stands


def test_chunks_stop_when_credit_is_used_up(delivery: Delivery, member: Member) -> None:
    member.grant(0)
    assert member.receive(credit_bytes=FRAME_BYTES) == []
    assert delivery.next_chunk(ALICE) == []
    assert delivery.waits_for == "link_full"
    assert member.receive() == [0]


def test_what_samples_wait_for_is_told_apart(delivery: Delivery, member: Member) -> None:
    """A link that is full and a trainer that has no room are mended at different ends."""
    assert delivery.waits_for == "no_credit"  # offered, and not asked for
    member.grant(0)
    member.receive(credit_bytes=FRAME_BYTES)
    assert delivery.waits_for == "link_full"
    assert member.receive() == [0]
    assert delivery.waits_for == "no_credit"
    delivery.disconnected(ALICE, now=1.0)
    assert delivery.waits_for is None


def test_offers_are_bounded(delivery: Delivery, member: Member) -> None:
    offers = [delivery.stored(header(ordinal)) for ordinal in range(4, 2 * OFFERED_SAMPLES)]
    assert sum(len(offered(actions)) for actions in offers) == OFFERED_SAMPLES - 4
    assert len(offered(member.grant(0, 1))) == 2


def test_grant_of_a_sample_never_offered_is_ignored(member: Member) -> None:
    member.grant(99)
    assert member.receive() == []


def test_mismatch_and_another_major_version_are_refused_before_a_term_is_spent(
    delivery: Delivery,
) -> None:
    mismatch = Member(delivery, expect=Expectation(layer_ids=(0, 1))).refused()
    assert (mismatch.code, "(0, 1)" in mismatch.reason) == ("mismatch", True)
    version = Member(delivery, version=(0, 9)).refused()
    assert (version.code, "0.9 cannot talk to 3." in version.reason) == ("version", True)
    assert delivery.fencing.number == 0


def test_samples_are_shared_out_among_the_ranks_and_none_is_offered_twice() -> None:
    delivery = producer(200)
    ranks = [Member(delivery, name, rank, 2) for rank, name in enumerate((ALICE, BOB))]
    assert offered(ranks[0].attach()) == [], "it could be of a spool that was lost"
    first, second = (offer.samples for offer in said(ranks[1].attach(), m.Offer))
    assert len(first) == len(second)
    assert not {id for id, _ in first} & {id for id, _ in second}


# leases


def test_leases_of_a_lost_member_stay_with_it_however_long_it_is_away() -> None:
    """It may be compiling, and have trained them."""
    delivery = producer(4)
    member, other = (Member(delivery, name, rank, 2) for rank, name in enumerate((ALICE, BOB)))
    member.attach()
    other.attach()
    member.take(0, 2)
    assert offered(member.lose(now=1.0)) == []
    delivery.ping(ALICE)
    other.attach(now=1e6)
    assert other.grant(0, 1, 2, 3) is not None
    assert other.receive() == [1, 3]


def test_what_was_only_offered_to_a_lost_member_goes_to_another() -> None:
    delivery = producer(4)
    ranks = [Member(delivery, name, rank, 2) for rank, name in enumerate((ALICE, BOB))]
    for rank in ranks:
        rank.attach()
    assert offered(ranks[0].lose()) == [0, 2]


def test_leases_of_a_lost_group_go_back_in_order(delivery: Delivery, member: Member) -> None:
    member.take(2, 0)
    member.lose()
    second = Member(delivery, BOB, incarnation="second", term=2)
    assert offered(second.attach(now=11.0)) == [0, 1, 2, 3]


def test_reattached_member_keeps_what_it_holds_and_the_rest_goes_back(
    delivery: Delivery, member: Member
) -> None:
    member.take(0, 1)
    member.lose()
    again = Member(delivery, BOB)
    assert offered(again.attach(held=[id_of(0)])) == [1, 2, 3]
    assert delivery.fencing.leased == {id_of(0)}


def test_a_member_cannot_claim_what_another_holds() -> None:
    delivery = producer(4)
    ranks = [Member(delivery, name, rank, 2) for rank, name in enumerate((ALICE, BOB))]
    for rank in ranks:
        rank.attach()
    ranks[0].take(0)
    ranks[1].lose()
    Member(delivery, b"again", 1, 2).attach(held=[id_of(0)])
    assert delivery.fencing.members["1"].leased == set()


def test_half_sent_sample_is_sent_again_whole(delivery: Delivery, member: Member) -> None:
    member.grant(0)
    assert member.receive(credit_bytes=FRAME_BYTES) == []
    again = Member(delivery, BOB)
    again.attach()
    again.grant(0)
    assert again.receive() == [0]


def test_released_samples_come_back(member: Member) -> None:
    member.take(0)
    assert offered(member.say(m.Release, ids=[id_of(0)])) == [0]
    member.take(0)


def test_a_commit_after_a_restart_covers_what_is_still_on_the_shelf() -> None:
    """Of an archive only a few samples are in stock at a time: what the other rank was given before
    the restart is elsewhere, and the leader's checkpoint was refused for it."""
    before = producer(4)
    Member(before, members=2).ask()
    here = {id_of(k): header(k) for k in range(3)}
    delivery = producer(1, prompts=4, term=before.fencing.term, header_of=here.get)
    leader = Member(delivery, members=2)
    leader.attach()
    assert names(leader.commit(1, 0, 2))[:2] == ["StoreCommit", "Committed"]
    assert names(leader.commit(2, 0, 2, 3)) == ["Refused"]  # it was never made


def test_what_is_released_while_it_is_being_sent_is_not_sent_on(member: Member) -> None:
    member.grant(0, 1)
    member.receive(credit_bytes=FRAME_BYTES)
    member.say(m.Release, ids=[id_of(0)])
    assert member.receive() == [1]


def test_after_a_restart_nothing_is_offered_before_every_rank_has_said_what_it_holds() -> None:
    before = producer(4)
    Member(before, rank=0, members=2).ask()
    delivery = producer(4, term=before.fencing.term)
    leader, other = (Member(delivery, n, r, 2) for r, n in enumerate((ALICE, BOB)))
    assert offered(leader.attach(held=[id_of(0)])) == []
    assert sorted(offered(other.attach(held=[id_of(1)]))) == [2, 3]


def test_what_a_member_holds_of_a_lost_spool_is_generated_for_it_alone() -> None:
    """Another rank would train it a second time."""
    delivery = producer(0, prompts=3)
    leader, other = (Member(delivery, n, r, 2) for r, n in enumerate((ALICE, BOB)))
    leader.attach()
    assert offered(delivery.stored(header(0))) == []
    assert offered(other.attach(held=[id_of(0), id_of(1)])) == []
    assert delivery.stored(header(1)) == []
    assert offered(delivery.stored(header(2))) == [2]
    assert delivery.fencing.members["1"].leased == {id_of(0), id_of(1)}
    assert names(leader.commit(1, 0, 1))[:2] == ["StoreCommit", "Committed"]
    assert delivery.fencing.leased == set()


def test_a_verdict_on_a_sample_of_a_lost_spool_ends_it() -> None:
    delivery = producer(0, prompts=1)
    member = Member(delivery)
    member.attach(held=[id_of(0)])
    actions = member.say(m.Reject, id=id_of(0), reason="policy")
    assert actions == [StoreTombstone(id_of(0), "rejected", "policy")]
    assert delivery.stored(header(0)) == []
    assert "AllTerminal" in names(delivery.finish())


def test_what_a_rank_says_it_trained_is_left_to_the_leader(delivery: Delivery) -> None:
    leader, other = (Member(delivery, n, r, 2) for r, n in enumerate((ALICE, BOB)))
    leader.attach()
    assert "StoreCommit" not in names(other.attach(trained=ids(0)))
    assert len(delivery.committed) == 0


def test_a_rank_that_opens_before_the_leader_gets_nothing_yet(delivery: Delivery) -> None:
    leader, other = (Member(delivery, n, r, 2) for r, n in enumerate((ALICE, BOB)))
    leader.ask()
    assert offered(other.attach()) == []
    assert offered(leader.say(m.Open, trained=[]))


# commits


def test_commit_is_durable_before_it_is_acknowledged(member: Member) -> None:
    member.take(0)
    actions = member.commit(1, 0)
    assert names(actions)[:2] == ["StoreCommit", "Committed"]
    assert actions[0] == StoreCommit(1, ids(0), 1)


def test_repeated_commit_is_acknowledged_and_stored_once(member: Member) -> None:
    member.take(0)
    for expected in (["StoreCommit", "Committed"], ["Committed"]):
        assert names(member.commit(1, 0)) == expected


def test_a_checkpoint_without_new_samples_here_still_moves_the_window_of_kept_ones(
    delivery: Delivery, member: Member
) -> None:
    """Or a producer with few samples would keep what K newer checkpoints all contain."""
    member.take(0)
    member.commit(1, 0)
    assert done(member.commit(2, 0), StoreCommit) == [StoreCommit(2, ids(0), 1)]
    assert delivery.authority.key == (1, 2)


def test_a_late_commit_that_was_overtaken_is_acknowledged_and_takes_nothing_away(
    delivery: Delivery, member: Member
) -> None:
    member.take(0, 1)
    member.commit(2, 0, 1)
    assert names(member.commit(1, 0)) == ["Committed"]
    assert delivery.committed == ids(0, 1)


def test_samples_of_other_producers_in_a_commit_are_passed_over(
    delivery: Delivery, member: Member
) -> None:
    member.take(0)
    assert names(member.commit(1, 0, 16 * 1000)) == ["StoreCommit", "Committed"]
    assert delivery.committed == ids(0)


def test_a_commit_covers_what_every_rank_received(delivery: Delivery) -> None:
    leader, other = (Member(delivery, n, r, 2) for r, n in enumerate((ALICE, BOB)))
    leader.attach()
    other.attach()
    leader.take(0)
    leader.lose()
    other.take(1)
    again = Member(delivery, b"again", members=2)
    again.attach(held=[id_of(0)])
    assert names(again.commit(1, 0, 1))[:2] == ["StoreCommit", "Committed"]
    assert delivery.fencing.leased == set()


def test_commit_of_a_member_that_is_not_the_leader_is_refused(delivery: Delivery) -> None:
    leader, other = (Member(delivery, n, r, 2) for r, n in enumerate((ALICE, BOB)))
    other_offers = [leader.ask(), other.attach(), leader.say(m.Open, trained=[])]
    assert other_offers
    (refusal,) = said(other.commit(1), m.Refused)
    assert (refusal.code, "not an open leader" in refusal.reason) == ("malformed", True)


def test_commit_that_takes_samples_away_ends_the_session(
    delivery: Delivery, member: Member
) -> None:
    member.take(0)
    member.commit(1, 0)
    (refusal,) = said(member.commit(2), m.Refused)
    assert "without 1 samples" in refusal.reason
    assert not delivery.fencing.attached
    assert delivery.committed == ids(0)


def test_an_older_number_with_other_samples_is_refused(delivery: Delivery, member: Member) -> None:
    member.take(0, 1)
    member.commit(3, 0)
    (refusal,) = said(member.commit(2, 0, 1), m.Refused)
    assert "commit 2 of term 1 after 3 of term 1" in refusal.reason
    assert delivery.committed == ids(0)


@pytest.mark.parametrize("ordinals", [(2,), (0, 2)])
def test_commit_of_samples_never_given_out_frees_nothing(
    delivery: Delivery, member: Member, ordinals: tuple[int, ...]
) -> None:
    member.take(0)
    assert names(member.commit(1, *ordinals)) == ["Refused"]
    assert len(delivery.committed) == 0


def test_commit_of_what_is_still_being_sent_is_refused(member: Member) -> None:
    member.grant(0)
    member.receive(credit_bytes=FRAME_BYTES)
    assert names(member.commit(1, 0)) == ["Refused"]


def test_a_claim_of_billions_of_samples_costs_nothing(delivery: Delivery, member: Member) -> None:
    """A few bytes can name 2^39 ids: nothing may work through them one by one."""
    claim = IdSet.from_wire([(*id_of(0).partition, 0, [1 << 39])])
    assert names(member.say(m.Commit, number=1, trained=claim.to_wire())) == ["Refused"]
    assert len(delivery.committed) == 0
    second = Member(delivery, BOB)
    assert names(second.attach(trained=claim, ledger_number=1)) == ["Refused"]
    assert len(delivery.committed) == 0


def test_a_commit_after_a_restart_covers_a_rank_that_is_not_back_yet() -> None:
    before = producer(4)
    Member(before, members=2).ask()
    delivery = producer(4, term=before.fencing.term)
    leader = Member(delivery, members=2)
    leader.attach()
    assert names(leader.commit(1, 2)) == ["StoreCommit", "Committed"]


def test_thousands_of_granted_samples_that_became_terminal_are_passed_over() -> None:
    delivery = producer(1500)
    member = Member(delivery)
    fresh = offered(member.attach())
    while fresh:
        fresh = offered(member.grant(*fresh))
    for ordinal in range(1500):
        member.say(m.Reject, id=id_of(ordinal), reason="x")
    assert member.receive() == []
