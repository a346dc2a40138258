"""Samples damaged on their way, damaged where they lie, and those that kill their trainer."""

import pytest
from msgspec.structs import replace

from delivery_members import SHARDS, Member, done, header, id_of, ids, names, offered, producer
from draftfeed_producer.delivery import MAX_NACKS, Delivery
from draftfeed_producer.distribution import Handed
from draftfeed_producer.session import (
    Regenerate,
    Send,
    SendChunk,
    Session,
    StoreTombstone,
    Verify,
    Void,
)
from draftfeed_producer.spool.control import Term
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId
from draftfeed_proto.limits import MAX_PLACES


@pytest.fixture
def delivery() -> Delivery:
    return producer(4)


@pytest.fixture
def member(delivery: Delivery) -> Member:
    one = Member(delivery)
    one.attach()
    return one


def told(member: Member, ordinal: int) -> list[m.Message]:
    """What a member of this host is sent of a sample."""

    def place(session: Session, id: SampleId, index: int) -> Handed:
        return Handed(0, tuple((100 * (index + n), 100) for n in range(MAX_PLACES)))

    member.grant(ordinal)
    member.say(m.Credit, total_bytes=1)
    actions = iter(lambda: member.delivery.next_chunk(member.sender, place), [])
    said = [action for one in actions for action in one]
    return [action.message for action in said if isinstance(action, Send | SendChunk)]


def test_a_sample_damaged_on_its_way_is_verified_and_sent_again(
    delivery: Delivery, member: Member
) -> None:
    member.take(0)
    assert member.say(m.Nack, id=id_of(0), reason="checksum") == [Verify(id_of(0))]
    assert offered(delivery.verified(id_of(0), True)) == [0]
    member.take(0)


def test_a_sample_refused_five_times_is_quarantined(delivery: Delivery, member: Member) -> None:
    for _ in range(MAX_NACKS - 1):
        member.take(0)
        member.say(m.Nack, id=id_of(0), reason="checksum")
        delivery.verified(id_of(0), True)
    member.take(0)
    actions = member.say(m.Nack, id=id_of(0), reason="checksum")
    assert actions[0] == StoreTombstone(id_of(0), "quarantined", "checksum")
    assert delivery.verified(id_of(0), True) == []


def test_a_sample_whose_file_a_member_cannot_read_is_sent_and_never_quarantined(
    delivery: Delivery, member: Member
) -> None:
    """Each start of a trainer that may open too few files counted, and the fifth was the end."""
    for life in range(1, 2 * MAX_NACKS):
        if life > 1:
            member = Member(delivery, incarnation=f"{life}", term=life, takeover=True)
            member.attach()
        assert [type(one) for one in told(member, 0)] == [m.Begin, m.ChunksAt]
        assert member.say(m.Nack, id=id_of(0), reason="out of reach") == [Verify(id_of(0))]
        assert offered(delivery.verified(id_of(0), True)) == [0]
        assert [type(one) for one in told(member, 1)] == [m.Begin, m.ChunksAt]
        assert {type(one) for one in told(member, 0)} == {m.Begin, m.Chunk}


def test_bytes_that_are_refused_count_though_the_file_was_refused_before(
    delivery: Delivery, member: Member
) -> None:
    told(member, 0)
    for _ in range(MAX_NACKS):
        assert member.say(m.Nack, id=id_of(0), reason="checksum") == [Verify(id_of(0))]
        delivery.verified(id_of(0), True)
        member.take(0)
    assert done(member.say(m.Nack, id=id_of(0), reason="checksum"), StoreTombstone)


def test_a_sample_damaged_where_it_lies_is_made_again_under_its_id(
    delivery: Delivery, member: Member
) -> None:
    member.take(0, 1, 2, 3)
    member.commit(1, 1, 2, 3)
    delivery.finish()
    member.say(m.Nack, id=id_of(0), reason="checksum")
    actions = delivery.verified(id_of(0), False)
    assert done(actions, Void)[0].id == id_of(0)
    assert done(actions, Regenerate) == [Regenerate([id_of(0)])]
    assert "EndOfSamples" not in names(actions)
    assert not delivery.all_terminal
    assert offered(delivery.stored(header(0))) == [0]
    member.take(0)
    assert "AllTerminal" in names(member.commit(2, 0, 1, 2, 3))
    assert delivery.regenerated == ids(0)


def test_a_regenerated_sample_starts_with_no_refusals(delivery: Delivery, member: Member) -> None:
    for attempt in range(2 * MAX_NACKS - 2):
        member.take(0)
        assert member.say(m.Nack, id=id_of(0), reason="x") == [Verify(id_of(0))]
        whole = attempt != MAX_NACKS - 2
        delivery.verified(id_of(0), whole)
        if not whole:
            delivery.stored(header(0))


def test_a_sample_that_nobody_can_make_again_does_not_hold_up_the_end(
    delivery: Delivery, member: Member
) -> None:
    member.take(0, 1, 2, 3)
    member.commit(1, 1, 2, 3)
    delivery.finish()
    member.say(m.Nack, id=id_of(0), reason="checksum")
    delivery.verified(id_of(0), False)
    assert names(delivery.skip(ids(0))) == ["EndOfSamples", "AllTerminal"]


@pytest.mark.parametrize("kind", [m.Nack, m.Reject])
def test_unknown_sample_is_ignored(member: Member, kind: type[m.InSession]) -> None:
    assert member.say(kind, id=id_of(77), reason="x") == []


@pytest.mark.parametrize("state", ["committed", "from the future", ""])
def test_a_state_that_ends_no_sample_is_ignored(member: Member, state: str) -> None:
    member.take(0)
    assert member.say(m.Reject, id=id_of(0), reason="x", state=state) == []


# samples that kill their trainer


def crash(
    delivery: Delivery, term: int, *at_work: int, leaves: bool = False, failed: bool = False
) -> list[str]:
    """One life of the group, and what the next one's fence stores."""
    name = f"life-{term}".encode()
    member = Member(delivery, name, incarnation=f"life-{term}", term=term, takeover=True)
    stored = [type(action).__name__ for action in member.ask()]
    member.say(m.Open, trained=delivery.committed.to_wire(), ledger_term=delivery.authority.key[0])
    if at_work:
        member.take(*at_work)
        member.say(m.AtWork, ids=[id_of(k) for k in at_work])
    if leaves:
        member.say(m.Bye, failed=failed)
    else:
        member.lose()
    return stored


def test_a_sample_at_work_whenever_the_trainer_dies_is_quarantined_after_three_terms() -> None:
    delivery = producer(4)
    crash(delivery, 1, 0, 1)
    assert "StoreSuspects" in crash(delivery, 2, 0)
    crash(delivery, 3, 0, 2)
    assert "StoreTombstone" in crash(delivery, 4)
    assert delivery.tombstones == {id_of(0): "quarantined"}


def test_a_trainer_that_fails_in_an_orderly_way_counts_as_dead() -> None:
    """An exception over a sample ends with a goodbye, and is the commonest way to die of one."""
    delivery = producer(4)
    for term in (1, 2, 3):
        crash(delivery, term, 0, leaves=True, failed=True)
    crash(delivery, 4)
    assert delivery.tombstones == {id_of(0): "quarantined"}


@pytest.mark.parametrize("leaves", [True, False])
def test_a_term_that_ends_well_clears_its_suspects(leaves: bool) -> None:
    """It said goodbye, or died over another sample."""
    delivery = producer(4)
    crash(delivery, 1, 0)
    crash(delivery, 2, 0)
    crash(delivery, 3, *([0] if leaves else [1]), leaves=leaves)
    for term in (4, 5, 6):
        crash(delivery, term, 0)
    assert not delivery.tombstones
    crash(delivery, 7)
    assert delivery.tombstones == {id_of(0): "quarantined"}


def test_suspicion_survives_a_restart_of_the_producer() -> None:
    delivery = producer(4, suspects={id_of(0): 2}, term=Term(1, "run", "life-1"))
    crash(delivery, 2, 0)
    crash(delivery, 3)
    assert delivery.tombstones == {id_of(0): "quarantined"}


def test_what_kills_the_trainer_does_not_come_again_in_the_epoch_that_has_begun() -> None:
    """The last samples of an epoch are trained while the next one is in stock already."""
    delivery = producer(2, shards=replace(SHARDS, epochs=3))
    here, later = (replace(header(0), id=id_of(0).in_epoch(epoch)) for epoch in (1, 2))
    delivery.stored(here)
    for term in (1, 2, 3):
        crash(delivery, term, 0)
    crash(delivery, 4)
    assert delivery.tombstones == dict.fromkeys([id_of(0), here.id], "quarantined")
    assert done(delivery.stored(later), StoreTombstone)
    assert later.id not in delivery.stock


def test_what_is_damaged_in_one_epoch_is_not_taken_from_a_trainer_that_was_offered_the_next() -> (
    None
):
    """It keeps room for it, asks for it when its turn comes, and would wait for ever. It refuses it
    when it comes, and then it ends."""
    delivery = producer(1, shards=replace(SHARDS, epochs=2))
    again = replace(header(0), id=id_of(0).in_epoch(1))
    member = Member(delivery)
    member.attach()
    delivery.prompts.update([again.id])
    member.take(0)
    delivery.stored(again)
    delivery.finish()
    member.say(m.Nack, id=id_of(0), reason="x")
    delivery.verified(id_of(0), False)
    delivery.quarantine(id_of(0), "cannot be made again")
    assert delivery.tombstones == {id_of(0): "quarantined"}
    member.say(m.Grant, ids=[again.id])
    assert member.receive() == [0]
    member.say(m.Nack, id=again.id, reason="x")
    delivery.verified(again.id, False)
    actions = delivery.quarantine(again.id, "it was quarantined in another epoch")
    assert names(actions) == ["StoreTombstone", "EndOfSamples", "AllTerminal"]


def test_a_restart_while_nobody_was_there_neither_clears_nor_adds_suspicion() -> None:
    before = producer(4)
    Member(before).ask()
    delivery = producer(4, suspects={id_of(0): 2}, term=before.fencing.term)
    second = Member(delivery, incarnation="second", term=2, takeover=True)
    assert names(second.ask()) == ["StoreTerm", "Granted"]


def test_only_samples_that_a_member_received_can_be_at_work(delivery: Delivery) -> None:
    delivery.finish()
    for term in range(1, 6):
        name = f"life-{term}".encode()
        member = Member(delivery, name, incarnation=f"life-{term}", term=term, takeover=True)
        member.attach()
        member.say(m.AtWork, ids=[id_of(0), id_of(99)])
        member.lose()
    assert not delivery.tombstones
