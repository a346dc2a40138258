"""Too many attempts to attach are refused before they cost anything, and samples go on flowing."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from bare_member import BareMember
from delivery_members import ALICE, BOB, Member, producer
from draftfeed_producer.attempts import ALL_BURST, ALL_PER_SECOND, EACH_BURST, MAX_SENDERS, Attempts
from draftfeed_producer.server import TOO_MANY_ATTEMPTS
from draftfeed_proto import messages as m
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.limits import MAX_MEMBERS
from harness import Producer, producing
from waiting import eventually

FENCE = m.Fence(group="g", member="0", incarnation="evil", process="evil", term=1)


def test_connection_has_a_burst_and_then_one_a_second() -> None:
    attempts = Attempts(now=100.0)
    assert [attempts.allow(ALICE, 100.0) for _ in range(int(EACH_BURST) + 1)][-2:] == [True, False]
    assert attempts.allow(BOB, 100.0)
    assert attempts.allow(ALICE, 101.0)
    assert not attempts.allow(ALICE, 101.1)


def test_many_connections_are_limited_together() -> None:
    attempts = Attempts(now=0.0)
    senders = [b"%d" % number for number in range(int(ALL_BURST) + 10)]
    assert sum(attempts.allow(sender, 0.0) for sender in senders) == ALL_BURST
    assert sum(attempts.allow(b"later%d" % k, 1.0) for k in range(1000)) == ALL_PER_SECOND
    assert len(attempts._each) <= MAX_SENDERS


def test_group_of_the_largest_size_attaches_at_once() -> None:
    attempts = Attempts(now=0.0)
    assert all(attempts.allow(b"rank %d" % rank, 0.0) for rank in range(MAX_MEMBERS))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Producer]:
    with producing(tmp_path / "spool") as made:
        made.generate(range(40))
        made.server.finish()
        yield made


def flood(address: str, over: threading.Event, answers: list[m.FromProducer]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        data = m.encode(FENCE)
        while not over.is_set():
            if socket.poll(1, zmq.POLLOUT):
                socket.send(data)
            while socket.poll(0):
                answers.append(m.decode_from_producer(socket.recv_multipart()[0]))


def test_flood_of_attempts_does_not_starve_a_stream(served: Producer) -> None:
    member = BareMember(served.address)
    over, answers = threading.Event(), list[m.FromProducer]()
    flooder = threading.Thread(target=flood, args=(served.address, over, answers))
    flooder.start()
    try:
        eventually(lambda: len(answers) > 4 * EACH_BURST, "answers to the flood")
        member.open()
        assert len(set(member.receive(40))) == 40
        member.commit(member.received)
    finally:
        over.set()
        flooder.join()
        member.close()
    refused = [answer for answer in answers if isinstance(answer, m.Refused)]
    looked_at = [one for one in refused if one.reason != TOO_MANY_ATTEMPTS]
    assert len(looked_at) < len(refused) / 2
    held = next(one for one in refused if one.reason == TOO_MANY_ATTEMPTS)
    assert (held.code, held.term) == ("held", 0)


def test_group_takes_no_more_members_than_it_said() -> None:
    """The state of each would be kept."""
    delivery = producer()
    Member(delivery, members=2).attach()
    Member(delivery, BOB, 1, 2).attach()
    refusal = Member(delivery, b"third", 2, 2).refused()
    assert (refusal.code, refusal.reason) == (
        "restarted",
        "all 2 members of the group have come, and none is called '2'",
    )


def test_group_of_absurd_size_cannot_be_said() -> None:
    fields = {"group": "g", "member": "0", "incarnation": "i", "process": "p", "term": 1}
    with pytest.raises(ProtoError):
        m.decode_from_member(m.encode(m.Fence(**fields, members=MAX_MEMBERS + 1)))
