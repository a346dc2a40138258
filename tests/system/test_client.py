"""What a consumer makes of a producer that leaves at once, or does not say what it is."""

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from draftfeed_consumer.errors import StreamRefused
from draftfeed_proto import messages as m
from draftfeed_proto.ids import Shards
from harness import consuming
from samples import DATASET, DESCRIPTOR


class Peer:
    """A ROUTER that plays a producer by hand."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.setsockopt(zmq.LINGER, 1_000)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._member = b""

    def expect(self, kind: type[m.Message]) -> m.Message:
        """The next message of that type; others are passed over."""
        while True:
            self._member, data = self._socket.recv_multipart()
            message = m.decode_from_member(data)
            if isinstance(message, kind):
                return message

    def say(self, message: m.Message) -> None:
        self._socket.send_multipart([self._member, m.encode(message)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def granted(**changes: object) -> m.Granted:
    fields = {
        "term": 1,
        "session": "s",
        "descriptor": DESCRIPTOR,
        "stream_id": DESCRIPTOR.stream_id(),
        "shards": Shards(DATASET, 0, (0, 64)),
        "committed": [],
        "commit_number": 0,
        **changes,
    }
    return m.Granted(**fields)  # type: ignore[arg-type]


def test_consumer_says_goodbye_when_all_is_terminal_so_that_the_producer_may_leave(
    peer: Peer,
) -> None:
    """A producer that left first could take its last acknowledgement with it, unread."""
    here = {"term": 1, "session": "s"}
    with consuming(peer.address) as stream:
        peer.expect(m.Fence)
        peer.say(granted())
        iterator = iter(stream)
        state = stream.state_dict()
        stream.committed(state)
        peer.say(m.EndOfSamples(**here))  # type: ignore[arg-type]
        assert next(iterator, None) is None
        peer.expect(m.Commit)
        peer.say(m.Committed(**here, number=state["number"]))  # type: ignore[arg-type]
        peer.say(m.AllTerminal(**here))  # type: ignore[arg-type]
        peer.expect(m.Bye)
        assert stream.wait_committed(10)


@pytest.mark.parametrize(
    "changes",
    [
        {"stream_id": "0" * 32},
        {"version": (9, 0)},
        {"descriptor": msgspec.structs.replace(DESCRIPTOR, vocab_size=9)},
    ],
)
def test_producer_that_serves_something_else_is_left_for_good(
    peer: Peer, changes: dict[str, object]
) -> None:
    """And not attached to again and again."""
    with consuming(peer.address) as stream:
        peer.expect(m.Fence)
        peer.say(granted(**changes))
        with pytest.raises(StreamRefused):
            _ = stream.descriptor
