"""The member's half of the delivery rules, with the test as producers, trainer and network."""

import logging

import msgspec
import pytest

from draftfeed_consumer.actions import (
    Acknowledged,
    Attached,
    CheckpointWanted,
    Closing,
    Drop,
    Ended,
    EndWithdrawn,
    Fail,
    Finished,
    Leave,
)
from draftfeed_consumer.errors import Fenced, StreamRefused
from draftfeed_consumer.ledger import parse
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, Shards
from member_bench import DATASET, DESCRIPTOR, SHARDS, A, B, Bench, ids

# R8, R10, R11: fencing


def test_nothing_is_opened_before_every_producer_has_granted() -> None:
    bench = Bench()
    bench.link()
    bench.grant(A)
    bench.do(bench.member.open())
    assert not bench.said(A, m.Open)
    assert Attached not in bench.kinds()
    bench.grant(B)
    assert Attached in bench.kinds()
    assert bench.said(A, m.Open)
    assert bench.said(B, m.Open)


def test_nothing_is_opened_before_the_checkpoint_is_loaded() -> None:
    bench = Bench(A)
    bench.link()
    bench.grant(A)
    assert not bench.said(A, m.Open)


def test_two_groups_that_start_at_once_cannot_each_hold_one_producer() -> None:
    """The second producer is asked only by who has got the first."""
    bench = Bench(B, A)
    bench.link(B, A)
    assert not bench.said(B, m.Fence)
    bench.refuse(A, "held", term=1)
    bench.link(A)
    assert not bench.said(B, m.Fence)
    bench.grant(A)
    assert bench.said(B, m.Fence)


def test_all_producers_are_fenced_with_one_term_above_the_highest_seen() -> None:
    bench = Bench()
    bench.link()
    bench.refuse(A, "fenced", term=4)
    assert [fence.term for fence in bench.said(A, m.Fence)] == [1, 5]
    bench.grant(A)
    bench.refuse(B, "fenced", term=7)
    assert Drop(A, "asking for term 8") in bench.actions
    bench.link(A)
    bench.grant(A)
    bench.grant(B)
    bench.do(bench.member.open())
    assert {bench.said(address, m.Open)[0].term for address in (A, B)} == {8}


def test_grant_of_a_term_no_longer_asked_for_is_ignored() -> None:
    bench = Bench(A)
    bench.link()
    bench.refuse(A, "fenced", term=4)
    granted = m.Granted(
        term=1,
        session="old",
        descriptor=DESCRIPTOR,
        stream_id=DESCRIPTOR.stream_id(),
        shards=SHARDS[A],
        committed=[],
        commit_number=0,
    )
    assert bench.member.received(A, granted) == []


def test_member_that_is_told_of_a_higher_term_after_its_grant_stops_everywhere() -> None:
    bench = Bench()
    bench.begin()
    bench.refuse(B, "fenced", term=2)
    error = bench.failure
    assert isinstance(error, Fenced)
    assert (error.address, error.term) == (B, 2)


@pytest.mark.parametrize("term", [2, 1])
def test_member_that_was_cut_off_and_replaced_hears_it_when_it_comes_back(term: int) -> None:
    """With its own term too: that producer lost its spool, and another process got the term."""
    bench = Bench()
    bench.begin()
    bench.cut(A)
    bench.link(A)
    bench.refuse(A, "fenced", term=term)
    assert isinstance(bench.failure, Fenced)


def test_stream_that_somebody_holds_is_asked_for_again() -> None:
    bench = Bench(A)
    bench.link()
    bench.refuse(A, "held", term=3)
    assert Drop(A, "held!") in bench.actions
    bench.link()
    assert bench.said(A, m.Fence)[-1].term == 4


@pytest.mark.parametrize("code", ["mismatch", "version", "group", "restarted", "new in 1.7"])
def test_final_refusal_ends_the_stream_with_the_address(code: str) -> None:
    bench = Bench(A)
    bench.link()
    bench.refuse(A, code)
    error = bench.failure
    assert isinstance(error, StreamRefused)
    assert (error.address, error.code) == (A, code)


def test_rollback_is_reported_for_all_producers_at_once() -> None:
    bench = Bench()
    bench.link()
    bench.grant(A, committed=IdSet(ids(0, 1)).to_wire())
    bench.grant(B, committed=IdSet(ids(16)).to_wire())
    bench.do(bench.member.open())
    bench.refuse(A, "rollback")
    assert "2 at tcp://a:5550, 1 at tcp://b:5550" in str(bench.failure)


def test_rollback_is_asked_for_once_and_not_when_attaching_again() -> None:
    """What was committed since would be rolled back too."""
    bench = Bench(A, rollback="deliver")
    bench.begin()
    bench.cut(A)
    bench.link()
    bench.grant(A)
    assert [opened.rollback for opened in bench.said(A, m.Open)] == ["deliver", ""]


def test_checkpoint_of_a_term_the_producers_forgot_gets_a_higher_one() -> None:
    made = Bench(A)
    made.ledger.follow(6, 0)
    bench = Bench(A)
    bench.ledger.load(made.ledger.state("s"))
    bench.link()
    bench.grant(A)
    bench.do(bench.member.open())
    assert not bench.said(A, m.Open)
    bench.link()
    bench.grant(A)
    (opened,) = bench.said(A, m.Open)
    assert (opened.term, opened.ledger_term) == (7, 6)


def test_other_rank_waits_for_its_leader_and_never_begins_a_term() -> None:
    bench = Bench(A, leader=False, term=5)
    bench.link()
    bench.refuse(A, "held", term=4)
    bench.link()
    assert [fence.term for fence in bench.said(A, m.Fence)] == [5, 5]
    bench.grant(A)
    assert Attached in bench.kinds()


# R1: what producers may be named together


def test_two_producers_of_one_shard_are_refused_with_both_named() -> None:
    bench = Bench()
    bench.link()
    bench.grant(A, shards=Shards(DATASET, 0, (0, 3, 5, 6)))
    bench.grant(B, shards=Shards(DATASET, 0, (2, 9)))
    words = str(bench.failure)
    assert "shards 2, 5," in words
    assert A in words
    assert B in words


def test_two_producers_of_different_models_are_refused_with_both_values() -> None:
    bench = Bench()
    bench.link()
    bench.grant(A)
    other = msgspec.structs.replace(DESCRIPTOR, layer_ids=(0, 4, 7))
    bench.grant(B, descriptor=other, stream_id=other.stream_id())
    assert all(value in str(bench.failure) for value in ("(0, 4, 7)", "(1, 4, 7)", A, B))


def test_sample_of_a_shard_that_its_producer_does_not_own_is_not_taken() -> None:
    bench = Bench()
    bench.begin()
    bench.offer(A, 16)
    assert isinstance(bench.only(Drop), Drop)
    assert not bench.said(A, m.Grant)


# R11: producers that come late


def test_producer_that_comes_late_joins_the_term_by_itself() -> None:
    bench = Bench(without=(B,))
    bench.link(A)
    bench.grant(A)
    bench.do(bench.member.open())
    bench.tell(A, m.Opened)
    bench.link(B)
    bench.grant(B)
    (opened,) = bench.said(B, m.Open)
    assert opened.term == 1
    bench.offer(B, 16)
    bench.send(B, 16)
    assert bench.delivered == [16]


def test_producer_that_comes_late_with_a_higher_term_stays_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(without=(B,))
    bench.link(A)
    bench.grant(A)
    bench.do(bench.member.open())
    bench.tell(A, m.Opened)
    bench.link(B)
    with caplog.at_level(logging.ERROR):
        bench.refuse(B, "fenced", term=9)
    assert Leave(B) in bench.actions
    assert Fail not in bench.kinds()
    assert "stays out" in caplog.text
    bench.tell(A, m.AllTerminal)
    assert Finished in bench.kinds()


# R6, R7: commits


def test_commit_counts_when_every_producer_has_it() -> None:
    bench = Bench()
    bench.begin()
    bench.offer(A, 0)
    bench.send(A, 0)
    state = parse(bench.train(0))  # type: ignore[arg-type]
    bench.do(bench.member.commit(state))
    assert IdSet.from_wire(bench.said(A, m.Commit)[0].trained) == IdSet(ids(0))
    assert bench.said(B, m.Commit)[0].trained == []
    bench.tell(A, m.Committed, number=state.number)
    assert Acknowledged not in bench.kinds()
    bench.tell(B, m.Committed, number=state.number)
    assert bench.only(Acknowledged) == Acknowledged(state.number)


def test_commit_is_said_again_in_every_session_until_acknowledged() -> None:
    bench = Bench(A)
    bench.begin()
    state = parse(bench.train())
    bench.do(bench.member.commit(state))
    bench.cut(A)
    bench.link()
    bench.grant(A)
    assert [c.number for c in bench.said(A, m.Commit)] == [state.number] * 2
    bench.tell(A, m.Committed, number=state.number)
    bench.tell(A, m.Committed, number=state.number)  # said twice, answered twice
    assert bench.kinds().count(Acknowledged) == 1


def test_only_the_leader_commits() -> None:
    bench = Bench(A, leader=False)
    bench.begin()
    bench.do(bench.member.commit(parse(bench.train())))
    assert not bench.said(A, m.Commit)


# R15: at work


def test_producers_hear_what_the_trainer_is_at_work_on() -> None:
    bench = Bench()
    bench.begin()
    bench.do(bench.member.at_work(ids(0, 16)))
    bench.do(bench.member.at_work(ids(0, 17)))
    assert [said.ids for said in bench.said(A, m.AtWork)] == [ids(0)]
    assert [said.ids for said in bench.said(B, m.AtWork)] == [ids(16), ids(17)]
    bench.cut(A)
    bench.link(A)
    bench.grant(A)
    assert [said.ids for said in bench.said(A, m.AtWork)] == [ids(0), ids(0)]


# rejecting, draining


def test_sample_rejected_while_the_link_is_down_is_claimed_and_then_rejected() -> None:
    bench = Bench(A)
    bench.begin()
    bench.offer(A, 0)
    bench.send(A, 0)
    bench.cut(A)
    bench.do(bench.member.reject(ids(0)[0], "non-finite", "rejected"))
    bench.link()
    bench.grant(A)
    assert bench.said(A, m.Open)[-1].held == ids(0)
    (said,) = bench.said(A, m.Reject)
    assert (said.id, said.state, said.reason) == (ids(0)[0], "rejected", "non-finite")
    bench.offer(A, 0)
    bench.send(A, 0)
    assert bench.delivered == [0]


def test_tail_of_a_run_is_named_so() -> None:
    bench = Bench(A)
    bench.begin()
    bench.do(bench.member.reject(ids(3)[0], "did not fill a step", "tail"))
    assert bench.said(A, m.Reject)[0].state == "tail"


def test_draining_gives_back_what_the_trainer_has_not_seen_and_asks_for_no_more() -> None:
    bench = Bench(A)
    bench.begin()
    bench.offer(A, 0, 1, 2)
    bench.send(A, 0, 1)
    bench.do(bench.member.drain(ids(1)))
    assert [released.ids for released in bench.said(A, m.Release)] == [ids(1, 2)]
    grants = len(bench.said(A, m.Grant))
    bench.offer(A, 1, 3)
    assert len(bench.said(A, m.Grant)) == grants
    bench.send(A, 2)  # it was on its way
    assert bench.delivered == [0, 1]
    bench.cut(A)
    bench.link()
    bench.grant(A)
    assert bench.said(A, m.Open)[-1].held == ids(0)
    bench.do(bench.member.leave())
    assert bench.said(A, m.Bye)


# R25: ends


def test_stream_ends_when_every_producer_has_ended_and_all_was_received() -> None:
    bench = Bench()
    bench.begin()
    bench.offer(A, 0)
    bench.tell(B, m.EndOfSamples)
    bench.tell(A, m.EndOfSamples)
    assert Ended not in bench.kinds()
    bench.send(A, 0)
    assert bench.kinds().count(Ended) == 1


def test_sample_offered_after_the_end_withdraws_it() -> None:
    bench = Bench(A)
    bench.begin()
    bench.tell(A, m.EndOfSamples)
    assert EndWithdrawn not in bench.kinds()
    bench.actions.clear()
    bench.offer(A, 0)
    # Before the producer can know of it: to the other ranks it says then that nothing is left.
    assert bench.kinds()[0] is EndWithdrawn
    bench.send(A, 0)
    assert Ended not in bench.kinds()
    bench.tell(A, m.EndOfSamples)
    assert bench.kinds().count(Ended) == 1


def test_producer_that_needs_nothing_more_gets_a_goodbye_and_is_left_alone() -> None:
    bench = Bench()
    bench.begin()
    for address in (A, B):
        bench.tell(address, m.EndOfSamples)
    state = parse(bench.train())
    bench.do(bench.member.commit(state))
    bench.tell(A, m.AllTerminal)
    assert bench.said(A, m.Bye)
    assert Leave(A) in bench.actions
    assert Finished not in bench.kinds()
    bench.cut(A)
    assert bench.member.linked(A) == [Leave(A)]
    bench.tell(B, m.Committed, number=state.number)
    assert bench.kinds().count(Acknowledged) == 1  # A has everything: its answer may have been lost
    bench.tell(B, m.AllTerminal)
    assert Finished in bench.kinds()


def test_orderly_shutdown_and_a_full_disk_are_passed_on() -> None:
    bench = Bench(A)
    bench.begin()
    bench.tell(A, m.CheckpointWanted)
    bench.tell(A, m.Closing, reason="maintenance")
    assert bench.kinds().count(CheckpointWanted) == 1
    assert bench.only(Closing) == Closing(A, "maintenance")


def test_reason_of_any_length_fits_into_a_message() -> None:
    bench = Bench(A)
    bench.begin()
    bench.do(bench.member.reject(ids(0)[0], "x" * 100_000))
    (said,) = bench.said(A, m.Reject)
    assert m.encode(said)
