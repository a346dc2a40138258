"""What a server does with peers that lie, shout or fall silent."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from bare_member import BareMember
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId
from harness import Producer, consuming, producing
from samples import sample
from waiting import eventually

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
    producer: Producer, peer: "zmq.Socket[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it fill the journal, which drops what comes too fast: the alarms, too."""
    for _ in range(5000):
        peer.send(b"\xc1")
    assert trains_everything(producer)
    assert producer.server.statistics().backlog == 0
    assert 1 <= caplog.text.count("refused a message") <= 3


def test_ranges_that_are_none_do_not_end_the_server(
    producer: Producer, peer: "zmq.Socket[bytes]"
) -> None:
    peer.send(m.encode(FENCE))
    granted = answer_to(peer)
    assert isinstance(granted, m.Granted)
    opening = m.Open(
        term=granted.term,
        session=granted.session,
        trained=[(*sample(0, rows=1).id.partition, 5, [0])],
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


def test_slow_disk_keeps_nobody_from_being_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never fills a pipe: what was granted would go out in one turn, in which commits are not
    looked at, and after a minute of it the watchdog ends a producer that works."""
    count, pause = 150, threading.Event()
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(count))
        read_chunk = producer.spool.read_chunk

        def slowly(id: SampleId, index: int) -> bytes | memoryview:
            pause.wait(0.01)
            return read_chunk(id, index)

        monkeypatch.setattr(producer.spool, "read_chunk", slowly)
        member, other = BareMember(producer.address), BareSocket(producer.address)
        member.open()
        reading = threading.Thread(target=member.receive, args=(count,))
        reading.start()
        eventually(lambda: len(member.received) > 2, "it flows")
        assert isinstance(other.ask(m.Inquire()), m.Account)
        assert producer.server.statistics().turn_seconds < 0.5
        assert len(member.received) < count - 20, "the answer came when everything was sent"
        reading.join()
        member.close()
        other.close()


class BareSocket:
    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self._socket.connect(address)

    def ask(self, message: m.Message) -> m.FromProducer:
        self._socket.send(m.encode(message))
        return m.decode_from_producer(self._socket.recv())

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
