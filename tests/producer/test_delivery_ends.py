"""The ends of a stream, and the sums: every prompt is in exactly one place."""

import pytest

from delivery_members import (
    ALICE,
    BOB,
    Member,
    header,
    id_of,
    ids,
    names,
    offered,
    producer,
    said,
)
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.session import StoreTombstone
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet

SENDERS = (ALICE, BOB)


def group(delivery: Delivery, members: int = 2) -> list[Member]:
    """Attached ranks; what there is was offered to them in turn."""
    ranks = [Member(delivery, SENDERS[rank], rank, members) for rank in range(members)]
    for rank in ranks:
        rank.attach()
    return ranks


def test_end_comes_after_the_last_chunk_and_again_after_a_damaged_one() -> None:
    delivery = producer(4)
    (member,) = group(delivery, 1)
    assert delivery.finish() == []
    member.grant(0, 1, 2, 3)
    member.say(m.Credit, total_bytes=1 << 30)
    sent = [action for actions in iter(member.chunk, []) for action in actions]
    assert names(sent)[-2:] == ["Chunk", "EndOfSamples"]
    assert names(sent).count("EndOfSamples") == 1
    member.say(m.Nack, id=id_of(3), reason="x")
    assert names(delivery.verified(id_of(3), True)) == ["Offer"]
    member.grant(3)
    sent = [action for actions in iter(member.chunk, []) for action in actions]
    assert [end.refused for end in said(sent, m.EndOfSamples)] == [1]


def test_refusal_of_what_is_not_leased_is_answered_with_an_end_that_knows_of_it() -> None:
    delivery = producer(1)
    (member,) = group(delivery, 1)
    delivery.finish()
    member.take(0)
    actions = member.say(m.Nack, id=id_of(1), reason="x")
    assert [end.refused for end in said(actions, m.EndOfSamples)] == [1]


def test_no_rank_hears_of_the_end_while_another_may_still_give_samples_back() -> None:
    delivery = producer(4)
    first, second = group(delivery)
    delivery.finish()
    first.grant(0)
    assert "EndOfSamples" not in names(first.say(m.Credit, total_bytes=1 << 30))
    assert first.receive() == [0]
    assert names(second.say(m.AtWork, ids=[])) == []
    actions = first.lose()  # what it was only offered goes to the other
    assert offered(actions) == [2]
    second.grant(1, 2, 3)
    second.say(m.Credit, total_bytes=1 << 30)
    sent = [action for actions in iter(second.chunk, []) for action in actions]
    assert names(sent)[-1] == "EndOfSamples"


def test_a_rank_cut_off_in_the_middle_of_a_sample_holds_up_the_end() -> None:
    """It will say what it has when it is back; the sample may then be the other's."""
    delivery = producer(1)
    first, second = group(delivery)
    delivery.finish()
    first.grant(0)
    first.receive(credit_bytes=1)
    assert names(first.lose()) == []
    assert second.say(m.AtWork, ids=[]) == []
    again = Member(delivery, b"again", members=2)
    assert sorted({*names(again.attach())}) == ["Offer", "Opened"]


def test_both_ranks_hear_of_both_ends() -> None:
    delivery = producer(1)
    first, second = group(delivery)
    delivery.finish()
    first.grant(0)
    first.say(m.Credit, total_bytes=1 << 30)
    sent = [action for actions in iter(first.chunk, []) for action in actions]
    assert names(sent).count("EndOfSamples") == 2
    committed = first.commit(1, 0)
    assert names(committed) == ["StoreCommit", "Committed", "AllTerminal", "AllTerminal"]
    assert delivery.all_terminal
    second.leave()


def test_a_rank_that_attaches_after_the_end_hears_of_it() -> None:
    delivery = producer(1)
    first, second = group(delivery)
    delivery.finish()
    first.take(0)
    second.lose()
    again = Member(delivery, b"again", 1, 2)
    assert names(again.attach()) == ["Opened", "EndOfSamples"]


def test_everything_terminal_is_said_after_commits_and_rejections() -> None:
    delivery = producer(4)
    (member,) = group(delivery, 1)
    delivery.finish()
    member.take(0, 1, 2, 3)
    member.say(m.Reject, id=id_of(2), reason="no full step", state="tail")
    member.say(m.Reject, id=id_of(3), reason="non-finite")
    assert "AllTerminal" in names(member.commit(1, 0, 1))
    assert delivery.all_terminal
    assert delivery.tombstones == {id_of(2): "tail", id_of(3): "rejected"}


def test_last_damaged_sample_does_not_leave_the_member_waiting() -> None:
    delivery = producer(1)
    (member,) = group(delivery, 1)
    delivery.finish()
    actions: list[str] = []
    while "StoreTombstone" not in actions:
        member.take(0)
        actions = names(member.say(m.Nack, id=id_of(0), reason="x"))
        delivery.verified(id_of(0), True)
    assert actions == ["StoreTombstone", "EndOfSamples", "AllTerminal"]


def test_a_prompt_that_cannot_be_made_does_not_hold_up_the_end() -> None:
    """The list is done, one prompt of it never becomes a sample, and everybody waits for it."""
    delivery = producer(1, prompts=2)
    (member,) = group(delivery, 1)
    stored = StoreTombstone(id_of(1), "quarantined", "too long")
    assert delivery.quarantine(id_of(1), "too long") == [stored]
    assert delivery.quarantine(id_of(1), "too long") == []
    assert places(account(delivery)) == {"deliverable": [0], "quarantined": [1]}
    delivery.finish()
    member.take(0)
    assert "AllTerminal" in names(member.commit(1, 0))
    assert places(account(delivery)) == {"committed": [0], "quarantined": [1]}
    assert delivery.stored(header(1)) == []
    assert delivery.all_terminal


def test_a_sample_that_cannot_be_made_again_ends_the_wait_for_it() -> None:
    """It was damaged on disk, and the engine dies with its prompt now."""
    delivery = producer(1)
    (member,) = group(delivery, 1)
    delivery.finish()
    member.take(0)
    member.say(m.Nack, id=id_of(0), reason="x")
    delivery.verified(id_of(0), False)
    assert not delivery.all_terminal
    actions = delivery.quarantine(id_of(0), "dies")
    assert names(actions) == ["StoreTombstone", "EndOfSamples", "AllTerminal"]
    assert delivery.all_terminal


def test_what_a_member_rejects_while_it_is_made_again_is_not_waited_for() -> None:
    """A rollback has it made again, and a rank had it all the time: nobody makes it any more."""
    delivery = producer(0, prompts=1, committed=ids(0), commit_term=1, commit_number=1)
    member = Member(delivery, term=2)
    opening = {"rollback": "regenerate", "ledger_term": 1, "ledger_number": 0}
    member.attach(held=[id_of(0)], **opening)
    delivery.finish()
    assert not delivery.all_terminal
    assert "AllTerminal" in names(member.say(m.Reject, id=id_of(0), reason="policy"))


def test_what_only_a_member_has_ends_when_it_gives_it_back_and_nobody_can_make_it() -> None:
    """A spool was lost, the trainer still had samples of it, and the engine dies with those prompts
    now: they would be neither trained nor ended, and the run over without them."""
    delivery = producer(0, prompts=2)
    member = Member(delivery)
    member.attach(held=[id_of(0), id_of(1)])
    assert delivery.quarantine(id_of(0), "dies") == []
    assert delivery.quarantine(id_of(1), "dies") == []
    delivery.finish()
    assert not delivery.all_terminal
    assert "AllTerminal" not in names(member.commit(1, 0))
    actions = member.say(m.Release, ids=[id_of(1)])
    assert names(actions) == ["StoreTombstone", "AllTerminal"]


def test_what_only_a_dead_trainer_had_ends_with_its_term() -> None:
    delivery = producer(0, prompts=1)
    Member(delivery).attach(held=[id_of(0)])
    delivery.quarantine(id_of(0), "dies")
    delivery.finish()
    second = Member(delivery, b"second", incarnation="second", term=2, takeover=True)
    assert names(second.ask())[:2] == ["StoreTerm", "StoreTombstone"]
    assert delivery.all_terminal


def test_trainer_is_not_kept_waiting_for_what_it_has_and_nobody_can_make_again() -> None:
    delivery = producer(0, prompts=1)
    member = Member(delivery)
    member.attach(held=[id_of(0)])
    delivery.remake(id_of(0))
    delivery.finish()
    assert names(delivery.quarantine(id_of(0), "dies")) == ["EndOfSamples"]
    assert "AllTerminal" in names(member.commit(1, 0))


def test_samples_that_are_there_cannot_be_given_up() -> None:
    """Stored, held by a member, in a checkpoint, or none of our prompts."""
    delivery = producer(3)
    (member,) = group(delivery, 1)
    member.take(0, 1)
    member.commit(1, 0)
    for ordinal in (0, 1, 2, 3):
        assert delivery.quarantine(id_of(ordinal), "too long") == []
    assert delivery.tombstones == {}
    assert places(account(delivery)) == {"committed": [0], "leased": [1], "deliverable": [2]}


def test_a_rank_that_leaves_with_samples_does_not_end_them() -> None:
    delivery = producer(2)
    first, second = group(delivery)
    delivery.finish()
    first.take(0)
    second.take(1)
    second.leave()
    assert delivery.fencing.leased == {id_of(0), id_of(1)}
    first.leave()
    assert delivery.fencing.leased == set()
    late = Member(delivery, b"late", incarnation="second", term=2)
    assert offered(late.attach()) == [0, 1]


def test_a_producer_that_closes_says_so_to_every_rank() -> None:
    delivery = producer(1)
    group(delivery)
    assert [one.reason for one in said(delivery.close("restart"), m.Closing)] == ["restart"] * 2


# the sums


def account(delivery: Delivery) -> m.Account:
    """As anyone may ask for it, without a session."""
    (answer,) = said(delivery.received(b"anyone", m.Inquire(), 0.0), m.Account)
    return answer


def places(answer: m.Account) -> dict[str, list[int]]:
    """Ordinals by place. Fails when one is in two, or none."""
    wires = {
        "committed": answer.committed,
        "leased": answer.leased,
        "deliverable": answer.deliverable,
        "pending": answer.pending,
        **answer.terminal,
    }
    found = {name: [id.ordinal for id in IdSet.from_wire(wire)] for name, wire in wires.items()}
    flat = [ordinal for ordinals in found.values() for ordinal in ordinals]
    assert len(flat) == len(set(flat)), found
    return {name: ordinals for name, ordinals in found.items() if ordinals}


def test_every_prompt_is_in_exactly_one_place() -> None:
    delivery = producer(5, prompts=7)
    (member,) = group(delivery, 1)
    member.take(0, 1, 2)
    member.commit(1, 0)
    member.say(m.Reject, id=id_of(1), reason="x")
    delivery.skip(ids(6))
    answer = account(delivery)
    assert places(answer) == {
        "committed": [0],
        "rejected": [1],
        "leased": [2],
        "deliverable": [3, 4],
        "pending": [5],
    }
    assert answer.skipped == ids(6).to_wire()
    assert (answer.group, answer.term, answer.members) == ("run", 1, ["0"])


def test_a_sample_to_be_made_again_is_pending() -> None:
    delivery = producer(1)
    (member,) = group(delivery, 1)
    member.take(0)
    member.say(m.Nack, id=id_of(0), reason="x")
    delivery.verified(id_of(0), False)
    answer = account(delivery)
    assert places(answer) == {"pending": [0]}
    assert answer.regenerated == ids(0).to_wire()


def test_a_sample_with_a_tombstone_that_a_checkpoint_has_all_the_same_is_committed() -> None:
    """The trainer gave it up in one life, and trained it in another."""
    delivery = producer(2, tombstones={id_of(0): "rejected"})
    Member(delivery).attach(ids(0), ledger_number=1)
    assert places(account(delivery)) == {"committed": [0], "deliverable": [1]}


def test_anyone_may_ask_without_disturbing_a_session() -> None:
    delivery = producer(1)
    (member,) = group(delivery, 1)
    assert delivery.received(ALICE, m.Inquire(), 0.0)
    member.take(0)


@pytest.mark.parametrize("count", [1, 1 << 39])
def test_a_prompt_list_of_any_length_is_accounted_for_by_ranges(count: int) -> None:
    delivery = producer(1)
    delivery.prompts = IdSet.from_wire([(*id_of(0).partition, 0, [count])])
    answer = account(delivery)
    assert answer.pending == ([(*id_of(0).partition, 1, [count - 1])] if count > 1 else [])


def test_a_rank_hears_of_the_end_though_the_leader_heard_it_before_a_restart_and_left() -> None:
    """The leader needs nothing more of this producer and does not come again."""
    before = producer(1)
    first, _ = group(before)
    before.finish()
    first.take(0)
    first.commit(1, 0)
    first.leave()
    state = {"committed": ids(0), "commit_term": 1, "commit_number": 1}
    delivery = producer(0, prompts=1, term=before.fencing.term, **state)
    delivery.finish()
    second = Member(delivery, BOB, 1, 2)
    assert names(second.attach()) == ["Opened", "EndOfSamples", "AllTerminal"]
