"""What a server does with peers that lie, shout or fall silent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from draftfeed_proto import messages as m
from harness import Producer, consuming, producing
from samples import sample

FENCE = m.Fence(group="default", member="0", incarnation="1", process="1", term=1)


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[Producer]:
    with producing(tmp_path / "spool") as made:
        made.generate(range(6))
        made.server.finish()
        yield made


@pytest.fixture
def peer(producer: Producer) -> Iterator["zmq.Socket[bytes]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(producer.address)
    yield socket
    socket.close()
    context.term()


def answer_to(peer: "zmq.Socket[bytes]") -> m.FromProducer:
    """The next message that is not a ping."""
    while isinstance(message := m.decode_from_producer(peer.recv()), m.Ping):
        pass
    return message


def trains_everything(producer: Producer) -> bool:
    with consuming(producer.address) as stream:
        seen = []
        for item in stream:
            seen.append(item["id"].ordinal)
            stream.trained([item["id"]], step=len(seen))
    return sorted(seen) == list(range(6))


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"GET / HTTP/1.1", b"\x81\xa4type\xa3Nop"])
def test_garbage_is_answered_and_serving_goes_on(
    producer: Producer, peer: "zmq.Socket[bytes]", garbage: bytes
) -> None:
    peer.send(garbage)
    answer = answer_to(peer)
    assert isinstance(answer, m.Refused)
    assert answer.code == "malformed"
    assert trains_everything(producer)


def test_peer_that_shouts_and_never_reads_holds_nobody_up(
    producer: Producer, peer: "zmq.Socket[bytes]"
) -> None:
    for _ in range(5000):
        peer.send(b"\xc1")
    assert trains_everything(producer)
    assert producer.server.statistics().backlog == 0


def test_ranges_that_are_none_do_not_end_the_server(
    producer: Producer, peer: "zmq.Socket[bytes]"
) -> None:
    peer.send(m.encode(FENCE))
    granted = answer_to(peer)
    assert isinstance(granted, m.Granted)
    opening = m.Open(
        term=granted.term,
        session=granted.session,
        trained=[(*sample(0, rows=1).id.partition, [5, 3])],
    )
    peer.send(m.encode(opening))
    answer = answer_to(peer)
    assert isinstance(answer, m.Refused)
    peer.send(m.encode(m.Bye(term=granted.term, session=granted.session)))
    assert trains_everything(producer)


def test_member_that_stops_reading_in_mid_stream_is_let_go(
    producer: Producer, peer: "zmq.Socket[bytes]"
) -> None:
    peer.send(m.encode(FENCE))
    granted = answer_to(peer)
    assert isinstance(granted, m.Granted)
    session = {"term": granted.term, "session": granted.session}
    peer.send(m.encode(m.Open(**session, trained=[])))
    peer.send(m.encode(m.Grant(**session, ids=[sample(0).id])))
    peer.send(m.encode(m.Credit(**session, total_bytes=1 << 30)))
    peer.close()
    assert trains_everything(producer)
