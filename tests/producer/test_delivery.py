"""The delivery state alone: messages in, actions out, no sockets and no disk."""

import pytest

from draftfeed_producer.delivery import MAX_NACKS, OFFERED_SAMPLES, Delivery
from draftfeed_producer.session import (
    Action,
    Send,
    SendChunk,
    StoreCommit,
    StoreTerm,
    StoreTombstone,
)
from draftfeed_proto import codecs
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Expectation
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import SampleHeader, encode_chunks, header_of
from samples import DESCRIPTOR, sample

ALICE, BOB = b"alice", b"bob"


def header(ordinal: int) -> SampleHeader:
    frames = list(encode_chunks(sample(ordinal, rows=6), codecs.by_name("raw"), chunk_bytes=1024))
    size = sum(map(len, frames))
    return header_of(sample(ordinal, rows=6), chunks=len(frames), encoded_bytes=size, audit=False)


def id_of(ordinal: int) -> SampleId:
    return sample(ordinal, rows=1).id


class Member:
    """A member that answers by hand, against a delivery without I/O."""

    def __init__(self, delivery: Delivery, sender: bytes = ALICE, incarnation: str = "1") -> None:
        self.delivery, self.sender = delivery, sender
        self.fence = m.Fence(group="g", member="0", incarnation=incarnation)
        self.granted: m.Granted | None = None

    def attach(self, trained: IdSet | None = None, held: list[SampleId] | None = None) -> list[str]:
        for action in self.delivery.received(self.sender, self.fence):
            if isinstance(action, Send) and isinstance(action.message, m.Granted):
                self.granted = action.message
        wire = (trained or IdSet()).to_wire()
        return names(self.say(m.Open, trained=wire, held=held or []))

    def say(self, kind: type[m.InSession], **fields: object) -> list[Action]:
        assert self.granted is not None
        session = {"term": self.granted.term, "session": self.granted.session}
        return self.delivery.received(self.sender, kind(**session, **fields))  # type: ignore[arg-type]

    def receive(self, credit_bytes: int = 1 << 30) -> list[int]:
        """Everything that may be sent now; the ordinals of whole samples."""
        self.say(m.Credit, total_bytes=credit_bytes)
        whole: list[int] = []
        while actions := self.delivery.next_chunk():
            for action in actions:
                if isinstance(action, SendChunk):
                    self.delivery.sent(self.sender, 1000)
                    whole.append(action.message.id.ordinal)
        return list(dict.fromkeys(whole))


def names(actions: list[Action]) -> list[str]:
    return [
        type(a.message).__name__ if isinstance(a, Send | SendChunk) else type(a).__name__
        for a in actions
    ]


@pytest.fixture
def delivery() -> Delivery:
    return Delivery(
        DESCRIPTOR,
        committed=IdSet(),
        commit_number=0,
        term=0,
        stored=[header(k) for k in range(4)],
    )


def test_term_is_durable_before_it_is_granted(delivery: Delivery) -> None:
    actions = delivery.received(ALICE, Member(delivery).fence)
    assert names(actions) == ["StoreTerm", "Granted"]
    assert actions[0] == StoreTerm(1, "g", "1")


def test_commit_is_durable_before_it_is_acknowledged(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0)])
    member.receive()
    trained = IdSet([id_of(0)])
    actions = member.say(m.Commit, number=1, trained=trained.to_wire())
    assert names(actions) == ["StoreCommit", "Committed"]
    assert actions[0] == StoreCommit(1, trained)


def test_repeated_commit_is_acknowledged_and_stored_once(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0)])
    member.receive()
    trained = IdSet([id_of(0)]).to_wire()
    for expected in (["StoreCommit", "Committed"], ["Committed"]):
        assert names(member.say(m.Commit, number=1, trained=trained)) == expected


def test_nothing_is_sent_before_it_is_granted_and_credited(delivery: Delivery) -> None:
    member = Member(delivery)
    assert member.attach() == ["Opened", "Offer"]
    assert member.receive() == []
    member.say(m.Grant, ids=[id_of(0), id_of(1)])
    assert member.receive(credit_bytes=0) == [0, 1]  # credit is cumulative: the first one stands


def test_chunks_stop_when_credit_is_used_up(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0)])
    member.say(m.Credit, total_bytes=1)
    sent = [delivery.next_chunk(), delivery.next_chunk()]
    delivery.sent(ALICE, 1000)
    assert names(sent[0]) == ["Begin"]
    assert names(sent[1]) == ["Chunk"]
    assert delivery.next_chunk() == []
    assert delivery.starved_of_credit


def test_offers_are_bounded(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    for ordinal in range(4, 2 * OFFERED_SAMPLES):
        delivery.stored(header(ordinal))
    assert delivery.session is not None
    assert len(delivery.session.offered) == OFFERED_SAMPLES


def test_grant_of_a_sample_never_offered_is_ignored(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(99)])
    assert member.receive() == []


def test_leases_of_a_vanished_member_go_back_in_order(delivery: Delivery) -> None:
    first = Member(delivery)
    first.attach()
    first.say(m.Grant, ids=[id_of(2), id_of(0)])
    first.receive()
    delivery.disconnected(ALICE)
    second = Member(delivery, BOB, "2")
    second.attach()
    second.say(m.Grant, ids=[id_of(k) for k in range(4)])
    assert second.receive() == [0, 1, 2, 3]


def test_reattached_member_keeps_what_it_holds(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0), id_of(1)])
    member.receive()
    delivery.disconnected(ALICE)
    again = Member(delivery, BOB, "1")
    again.attach(held=[id_of(0)])
    again.say(m.Grant, ids=[id_of(k) for k in range(4)])
    assert again.receive() == [1, 2, 3]
    assert delivery.leased == 4


def test_half_sent_sample_is_sent_again_whole(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0)])
    member.say(m.Credit, total_bytes=1)
    delivery.next_chunk()
    delivery.next_chunk()
    again = Member(delivery, BOB, "1")
    again.attach()
    again.say(m.Grant, ids=[id_of(0)])
    again.say(m.Credit, total_bytes=1 << 30)
    assert names(delivery.next_chunk()) == ["Begin"]
    (chunk,) = delivery.next_chunk()
    assert isinstance(chunk, SendChunk)
    assert chunk.message.index == 0


def test_messages_of_an_old_session_do_nothing(delivery: Delivery) -> None:
    old = Member(delivery)
    old.attach()
    new = Member(delivery, BOB, "1")
    new.attach()
    assert names(old.say(m.Commit, number=9, trained=[])) == ["Refused"]
    forged = m.Grant(term=1, session="forged", ids=[id_of(0)])
    assert names(delivery.received(BOB, forged)) == ["Refused"]
    assert len(delivery.committed) == 0


def test_second_process_is_refused_while_the_first_is_attached(delivery: Delivery) -> None:
    Member(delivery).attach()
    (refusal,) = delivery.received(BOB, Member(delivery, BOB, "2").fence)
    assert isinstance(refusal, Send)
    assert isinstance(refusal.message, m.Refused)
    assert refusal.message.code == "held"


def test_older_major_version_is_refused_with_both(delivery: Delivery) -> None:
    fence = m.Fence(version=(0, 9), group="g", member="0", incarnation="1")
    (refusal,) = delivery.received(ALICE, fence)
    assert isinstance(refusal, Send)
    assert "0.9 cannot talk to 1.0" in str(refusal.message)


def test_mismatch_is_refused_before_any_term_is_spent(delivery: Delivery) -> None:
    expect = Expectation(layer_ids=(0, 1))
    fence = m.Fence(group="g", member="0", incarnation="1", expect=expect)
    assert names(delivery.received(ALICE, fence)) == ["Refused"]
    assert delivery.term == 0


def test_damaged_sample_is_offered_again_and_quarantined_in_the_end(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    for attempt in range(1, MAX_NACKS + 1):
        member.say(m.Grant, ids=[id_of(0)])
        assert member.receive() == [0]
        actions = member.say(m.Nack, id=id_of(0), reason="checksum")
        assert names(actions)[0] == ("Offer" if attempt < MAX_NACKS else "StoreTombstone")


def test_end_comes_after_the_last_chunk_and_again_after_a_damaged_one(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    assert delivery.finish() == []
    member.say(m.Grant, ids=[id_of(k) for k in range(4)])
    member.say(m.Credit, total_bytes=1 << 30)
    sent = [action for actions in iter(delivery.next_chunk, []) for action in actions]
    assert names(sent)[-2:] == ["Chunk", "EndOfSamples"]
    assert names(sent).count("EndOfSamples") == 1
    assert names(member.say(m.Nack, id=id_of(3), reason="x")) == ["Offer"]
    member.say(m.Grant, ids=[id_of(3)])
    sent = [action for actions in iter(delivery.next_chunk, []) for action in actions]
    assert names(sent)[-1] == "EndOfSamples"


def test_last_damaged_sample_does_not_leave_the_member_waiting(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    delivery.finish()
    member.say(m.Grant, ids=[id_of(k) for k in range(4)])
    member.receive()
    actions: list[Action] = []
    for _ in range(MAX_NACKS):
        actions = member.say(m.Nack, id=id_of(3), reason="x")
        member.say(m.Grant, ids=[id_of(3)])
        member.receive()
    assert names(actions) == ["StoreTombstone", "EndOfSamples"]


def test_everything_terminal_is_said_after_commits_and_rejections(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    delivery.finish()
    member.say(m.Grant, ids=[id_of(k) for k in range(4)])
    member.receive()
    rejection = member.say(m.Reject, id=id_of(3), reason="non-finite")
    assert rejection[0] == StoreTombstone(id_of(3), "rejected", "non-finite")
    trained = IdSet(id_of(k) for k in range(3))
    actions = member.say(m.Commit, number=1, trained=trained.to_wire())
    assert names(actions) == ["StoreCommit", "Committed", "EndOfSamples", "AllTerminal"]
    assert delivery.all_terminal


def test_released_samples_come_back(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0)])
    member.receive()
    assert names(member.say(m.Release, ids=[id_of(0)])) == ["Offer"]
    member.say(m.Grant, ids=[id_of(0)])
    assert member.receive() == [0]


def test_checkpoint_older_than_the_last_commit_is_refused(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0), id_of(1)])
    member.receive()
    member.say(m.Commit, number=3, trained=IdSet([id_of(0), id_of(1)]).to_wire())
    delivery.disconnected(ALICE)
    assert Member(delivery, BOB, "2").attach(trained=IdSet([id_of(0)])) == ["Refused"]
    assert delivery.session is None


def test_checkpoint_newer_than_the_last_commit_is_adopted(delivery: Delivery) -> None:
    trained = IdSet([id_of(0), id_of(2)])
    names_of = Member(delivery).attach(trained=trained)
    assert names_of == ["StoreCommit", "Opened", "Offer"]
    assert delivery.committed == trained


@pytest.mark.parametrize("kind", [m.Nack, m.Reject])
def test_unknown_sample_is_ignored(delivery: Delivery, kind: type[m.InSession]) -> None:
    member = Member(delivery)
    member.attach()
    assert member.say(kind, id=id_of(77), reason="x") == []


def test_checkpoint_is_asked_for_once_for_each_commit(delivery: Delivery) -> None:
    assert delivery.short_of_space(0) == []
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0), id_of(1)])
    member.receive()
    assert names(delivery.short_of_space(1)) == ["CheckpointWanted"]
    assert delivery.short_of_space(1) == []
    member.say(m.Commit, number=1, trained=IdSet([id_of(0)]).to_wire())
    assert delivery.short_of_space(1 << 20) == []  # too little to be worth one
    assert names(delivery.short_of_space(1)) == ["CheckpointWanted"]


def test_commit_that_takes_samples_away_ends_the_session(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0)])
    member.receive()
    member.say(m.Commit, number=1, trained=IdSet([id_of(0)]).to_wire())
    (refusal,) = member.say(m.Commit, number=2, trained=[])
    assert isinstance(refusal, Send)
    assert "without 1 samples" in str(refusal.message)
    assert delivery.session is None
    assert delivery.committed == IdSet([id_of(0)])


@pytest.mark.parametrize("ranges", [[0, 1 << 39], [2, 3]])
def test_commit_of_samples_never_given_out_frees_nothing(
    delivery: Delivery, ranges: list[int]
) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0)])
    actions = member.say(m.Commit, number=1, trained=[(*id_of(0).partition, ranges)])
    assert names(actions) == ["Refused"]
    assert len(delivery.committed) == 0


def test_checkpoint_that_claims_a_billion_samples_does_not_hang(delivery: Delivery) -> None:
    claim = IdSet.from_wire([(*id_of(0).partition, [0, 1 << 39])])
    Member(delivery).attach(trained=claim)
    delivery.disconnected(ALICE)
    assert Member(delivery, BOB, "2").attach() == ["Refused"]


def test_sample_generated_while_a_member_brought_it_as_trained_is_not_offered() -> None:
    """A producer rebuilt on an empty disk was at work on what the member had trained before."""
    delivery = Delivery(DESCRIPTOR, committed=IdSet(), commit_number=0, term=0, stored=[])
    Member(delivery).attach(trained=IdSet([id_of(0)]))
    assert delivery.stored(header(0)) == []
    assert names(delivery.stored(header(1))) == ["Offer"]


def test_commit_of_what_is_still_being_sent_is_refused(delivery: Delivery) -> None:
    member = Member(delivery)
    member.attach()
    member.say(m.Grant, ids=[id_of(0)])
    member.say(m.Credit, total_bytes=1)
    delivery.next_chunk()
    delivery.next_chunk()
    actions = member.say(m.Commit, number=1, trained=IdSet([id_of(0)]).to_wire())
    assert names(actions) == ["Refused"]


def test_commit_after_an_adopted_checkpoint_is_stored_whatever_its_number(
    delivery: Delivery,
) -> None:
    member = Member(delivery)
    member.attach(trained=IdSet([id_of(0)]))
    member.say(m.Grant, ids=[id_of(1)])
    member.receive()
    trained = IdSet([id_of(0), id_of(1)])
    assert names(member.say(m.Commit, number=1, trained=trained.to_wire())) == [
        "StoreCommit",
        "Committed",
    ]
    assert delivery.committed == trained


def test_thousands_of_granted_samples_that_became_terminal_are_passed_over() -> None:
    headers = [header(k) for k in range(1500)]
    delivery = Delivery(DESCRIPTOR, committed=IdSet(), commit_number=0, term=0, stored=headers)
    member = Member(delivery)
    member.attach()
    for _ in range(len(headers) // OFFERED_SAMPLES + 1):
        assert delivery.session is not None
        member.say(m.Grant, ids=list(delivery.session.offered))
    for one in headers:
        member.say(m.Reject, id=one.id, reason="x")
    assert member.receive() == []
