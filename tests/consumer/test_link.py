"""A cut takes back nothing that had arrived."""

import zmq

from draftfeed_consumer.link import Link, LinkDown
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId
from waiting import eventually

MESSAGES = 200
ID = SampleId("0123456789abcdef", 0, 0, 0)


def is_down(link: Link) -> bool:
    try:
        link.check()
    except LinkDown:
        return True
    return False


def test_consumer_dies_when_a_cut_falls_between_two_frames() -> None:
    """What lies unread at a cut is read to its end, and does not abort the process."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 10_000)  # all of it goes out before the cut
    router.setsockopt(zmq.SNDTIMEO, 10_000)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    link = Link(context, f"tcp://127.0.0.1:{port}")
    eventually(link.check, "the link is up")
    link.send(m.Inquire())
    member, _ = router.recv_multipart()
    for index in range(MESSAGES):
        chunk = m.Chunk(term=1, session="s", id=ID, index=index)
        router.send_multipart([member, m.encode(chunk), bytes(1000)])
    read = 0
    router.close()
    eventually(lambda: is_down(link), "the cut is noticed")
    while (got := link.receive()) is not None:
        message, frame, _ = got
        assert isinstance(message, m.Chunk)
        assert message.index == read
        assert frame is not None
        assert len(frame) == 1000
        read += 1
    assert read == MESSAGES
    link.close()
    context.term()


def test_producer_that_sends_without_being_asked_fills_no_memory() -> None:
    """Where no credit bounds what comes: it is left in the network, and a cut is no end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, 1)
    router.setsockopt(zmq.SNDTIMEO, 500)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDBUF, 1 << 16)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    link = Link(context, f"tcp://127.0.0.1:{port}", unread_messages=4)
    eventually(link.check, "the link is up")
    link.send(m.Inquire())
    member, _ = router.recv_multipart()
    ping = m.encode(m.Ping(term=1, session="s"))
    taken = 0
    try:
        while taken < MESSAGES:
            router.send_multipart([member, ping, bytes(1 << 20)])
            taken += 1
    except zmq.Again:
        pass
    assert 4 <= taken < 40
    router.close()
    eventually(lambda: not link.discard(), "what came is read, and the cut is noticed", 20)
    link.close()
    context.term()
