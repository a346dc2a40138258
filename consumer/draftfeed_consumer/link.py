"""One connection to one producer: a DEALER that never reconnects by itself, and its monitor.

A fresh socket for every connection means that nothing of an old session can be mistaken for the
new one, and that a cut is an event instead of a silence.
"""

import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from draftfeed_consumer.errors import AddressError
from draftfeed_proto import messages as m
from draftfeed_proto.errors import MalformedMessage
from draftfeed_proto.limits import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES

CONNECT_SECONDS = 2.0
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 15_000
"""Heartbeats are answered by ZeroMQ's own thread: a trainer that compiles for minutes stays up."""
LINGER_MS = 2_000
_FRAME_SLACK_BYTES = 1 << 10


class LinkDown(Exception):
    """The connection could not be made, or is gone."""


class Link:
    """Used by one thread. Messages go out with `send`, come in with `receive`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        """Raises LinkDown when nobody answers there, AddressError when it is no address."""
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.RECONNECT_IVL, -1),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.MAXMSGSIZE, max(MAX_MESSAGE_BYTES, MAX_CHUNK_BYTES + _FRAME_SLACK_BYTES)),
            (zmq.LINGER, LINGER_MS),
        ):
            self._socket.setsockopt(option, value)
        self._down = ""
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        try:
            self._socket.connect(address)
            self._await_handshake(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(address, str(error).lower()) from error
        except LinkDown:
            self.close()
            raise

    def send(self, message: m.Message) -> None:
        """Never raises: a link that takes no more is down, and `check` says so. What the
        producer said before it went is still to be read then."""
        try:
            self._socket.send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._down = "the producer takes no more messages"

    def receive(self) -> tuple[m.FromProducer, memoryview | None, int] | None:
        """(message, chunk frame, bytes on the wire), or None when nothing is there.

        Raises ProtoError when it is not of this protocol.
        """
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if len(frames) > 2:
            raise MalformedMessage(f"{len(frames)} frames in one message")
        message = m.decode_from_producer(frames[0].buffer)
        payload = frames[1].buffer if len(frames) == 2 else None
        return message, payload, sum(len(frame) for frame in frames)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def check(self) -> None:
        """Raises LinkDown when the connection is gone. Messages may still be waiting."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self._down = "disconnected"
        if self._down:
            raise LinkDown(self._down)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _await_handshake(self, address: str) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if not self._monitor.poll(int(left * 1000) + 1):
                break
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            raise LinkDown(f"nobody answers at {address}")
        raise LinkDown(f"no handshake with {address} within {CONNECT_SECONDS} s")
