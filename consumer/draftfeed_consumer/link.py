"""One connection to one producer: a DEALER that never reconnects by itself, and its monitor.

A fresh socket for every connection means that nothing of an old session can be mistaken for the
new one, and that a cut is an event instead of a silence.
"""

import threading
from collections.abc import Mapping
from typing import Any, Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from draftfeed_consumer.credentials import Credentials
from draftfeed_consumer.errors import AddressError
from draftfeed_proto import messages as m
from draftfeed_proto.errors import MalformedMessage, ProtoError
from draftfeed_proto.keys import is_ipv6
from draftfeed_proto.limits import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES

HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 15_000
"""Heartbeats are answered by ZeroMQ's own thread: a trainer that compiles for minutes stays up.
The producer sends none of its own: it is told after how long a silence of ours means the same."""
LINGER_MS = 2_000
NEVER_MS = 24 * 3600 * 1000
"""Until ZeroMQ would reconnect: long after the link was closed. With -1 it ends the endpoint when
the connection is cut, which drops what was not read yet, and aborts the process when that falls
between two frames of a message (libzmq 4.3.5: "Assertion failed: !_more")."""
_FRAME_SLACK_BYTES = 1 << 10


class LinkDown(Exception):
    """The connection could not be made, or is gone."""


class Link:
    """Belongs to the thread that made it; sockets must not be shared.

    Messages go out with `send` when `check` has said that it is up, and come in with `receive`.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        credentials: Credentials | None = None,
        *,
        unread_messages: int = 0,
    ) -> None:
        """Begins to connect and returns at once: a producer that is down must not hold up the
        others. Names are resolved again for every link. Raises AddressError when it is no
        address, LinkDown when the system has nothing left to make one of.

        unread_messages: how many are taken from the network before they are read, for a link where
        no credit bounds what comes. It has no heartbeats: whoever uses it has patience of its own.
        0: any number.
        """
        self._thread = threading.get_ident()
        self.address = address
        self.state: Literal["connecting", "up", "down"] = "connecting"
        self._why = "nobody answers there"
        self._no_handshake = (
            "it speaks without keys, or with others: is server_key its public key?"
            if credentials
            else "it closes the connection: does it want keys?"
        )
        try:
            self._socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise LinkDown(str(error).lower()) from None
        for option, value in (
            (zmq.RECONNECT_IVL, NEVER_MS),
            (zmq.HEARTBEAT_IVL, 0 if unread_messages else HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
            # With a limit, libzmq 4.3.5 aborts the process when a heartbeat is due on a link that
            # was cut while so many messages were unread.
            (zmq.RCVHWM, unread_messages),
            (zmq.MAXMSGSIZE, max(MAX_MESSAGE_BYTES, MAX_CHUNK_BYTES + _FRAME_SLACK_BYTES)),
            (zmq.LINGER, LINGER_MS),
            (zmq.IPV6, is_ipv6(address)),
        ):
            self._socket.setsockopt(option, value)
        if credentials is not None:
            credentials.secure(self._socket)
        try:
            self._monitor = self._socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_CONNECTED
                | zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CLOSED
            )
        except zmq.ZMQError as error:
            self._socket.close()
            raise LinkDown(str(error).lower()) from None
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(address, str(error).lower()) from error

    def send(self, message: m.Message) -> None:
        """Never raises: a link that takes no more is down, and `check` says so. What the
        producer said before it went is still to be read then."""
        self._assert_owner()
        try:
            self._socket.send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._fall("the producer takes no more messages")

    def receive(self) -> tuple[m.FromProducer, memoryview | None, int] | None:
        """(message, chunk frame, bytes on the wire), or None when nothing is there.

        Raises ProtoError when it is not of this protocol.
        """
        self._assert_owner()
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if len(frames) > 2:
            raise MalformedMessage(f"{len(frames)} frames in one message")
        message = m.decode_from_producer(frames[0].buffer)
        payload = frames[1].buffer if len(frames) == 2 else None
        return message, payload, sum(len(frame) for frame in frames)

    def discard(self) -> bool:
        """Reads and forgets what has come; whether more may."""
        try:
            while self.receive() is not None:
                pass
            return self.check()
        except (LinkDown, ProtoError):
            return False

    def register(self, poller: zmq.Poller) -> None:
        self._assert_owner()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def to_read(self, ready: Mapping[Any, int]) -> bool:
        """Whether a poller that we are registered at found something, or we are down since."""
        return self.state == "down" or self._socket in ready or self._monitor in ready

    def check(self) -> bool:
        """Whether the connection is up, not merely under way. Raises LinkDown when it is gone;
        messages may still be waiting."""
        self._assert_owner()
        while self.state != "down" and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state, self._why = "up", "disconnected"
            elif event == zmq.EVENT_CONNECTED:
                self._why = self._no_handshake
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._fall("it does not know our key: add it to the producer's [server] clients")
            else:
                self._fall(self._why)
        if self.state == "down":
            raise LinkDown(self._why)
        return self.state == "up"

    def close(self) -> None:
        self._assert_owner()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _fall(self, why: str) -> None:
        self.state, self._why = "down", why

    def _assert_owner(self) -> None:
        assert self._thread == threading.get_ident(), "a socket shared between threads"
