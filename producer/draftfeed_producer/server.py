"""The server: one thread, one ROUTER socket, and the delivery state between them.

ROUTER drops silently what it cannot route; ROUTER_MANDATORY turns that into an error we treat.
Sends never block: a full pipe is tried again, a vanished peer ends its session.
"""

import logging
import queue
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

import msgspec
import zmq

from draftfeed_producer.delivery import Delivery
from draftfeed_producer.errors import BindError
from draftfeed_producer.session import (
    Action,
    Send,
    SendChunk,
    StoreCommit,
    StoreTerm,
    StoreTombstone,
)
from draftfeed_producer.spool import Spool
from draftfeed_producer.spool.control import Term
from draftfeed_proto import messages as m
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.limits import MAX_MESSAGE_BYTES
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

POLL_MS = 200
RETRY_MS = 5
PING_SECONDS = 1.0
"""A ROUTER learns that a peer is gone when it sends to it."""
HIGH_WATER_MESSAGES = 8
"""Only a backstop: it counts messages, not bytes. Credits bound the bytes."""
HIGH_WATER_REQUESTS = 64
MAX_BACKLOG = 1000
"""Actions waiting for one member that has stopped reading; then its session ends."""
CHECKPOINT_FILL = 0.7
"""Of the quota. Two checkpoints may have to be made before anything is freed."""
STORE_RETRY_SECONDS = 0.5
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 15_000
LINGER_MS = 2_000


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bind: str = "tcp://127.0.0.1:5550"
    """ZeroMQ address the consumer connects to."""


class ServerStatistics(NamedTuple):
    attached: bool
    member: str
    term: int
    leased: int
    wire_bytes: int
    """Frames handed to ZeroMQ since the process began."""
    backlog: int
    """Messages waiting for the member to read."""
    no_credit_seconds: float
    """Time in which samples waited and the consumer had no room for them."""


class Listener:
    """The bound socket, made before anything slow so that a taken port is known at once."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises BindError."""
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, HIGH_WATER_MESSAGES),
            (zmq.RCVHWM, HIGH_WATER_REQUESTS),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.LINGER, LINGER_MS),
        ):
            self.socket.setsockopt(option, value)
        try:
            self.socket.bind(config.bind)
        except zmq.ZMQError as error:
            self.close()
            raise BindError(config.bind, str(error).lower()) from error
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Server:
    """Serves a spool until `close`. Owns the listener."""

    def __init__(self, listener: Listener, spool: Spool, delivery: Delivery) -> None:
        self._listener, self._spool, self._delivery = listener, spool, delivery
        self._socket = listener.socket
        self._inbox: queue.SimpleQueue[SampleHeader | None] = queue.SimpleQueue()
        self._waker, self._wake_end = socket.socketpair()
        self._waker.setblocking(False)
        self._unsent: deque[Send | SendChunk] = deque()
        """For the member of the session, in order."""
        self._closing: str | None = None
        self._closed = threading.Event()
        self._wire_bytes = 0
        self._no_credit_seconds = 0.0
        self._ping_due = 0.0
        self.all_terminal = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # called by other threads

    def stored(self, header: SampleHeader) -> None:
        self._inbox.put(header)
        self._wake()

    def finish(self) -> None:
        """No further samples will be stored."""
        self._inbox.put(None)
        self._wake()

    def close(self, reason: str) -> None:
        """Tell the member why, and end the thread."""
        if self._closing is not None:
            return
        self._closing = reason
        self._closed.set()
        self._wake()
        self._thread.join()
        self._listener.close()
        self._waker.close()
        self._wake_end.close()

    def statistics(self) -> ServerStatistics:
        session = self._delivery.session
        return ServerStatistics(
            session is not None and session.open,
            session.member if session else "",
            self._delivery.term,
            self._delivery.leased,
            self._wire_bytes,
            len(self._unsent),
            self._no_credit_seconds,
        )

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full of wake-ups already
            self._waker.send(b"\0")

    # the thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            logger.exception("the server stopped")
            self.failure = error
            self.all_terminal.set()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_end, zmq.POLLIN)
        while self._closing is None:
            began = time.monotonic()
            ready = dict(poller.poll(RETRY_MS if self._unsent else POLL_MS))
            if self._wake_end.fileno() in ready:
                self._wake_end.recv(4096)
            self._drain_inbox()
            self._receive()
            sent = self._pump()
            self._ping()
            self._look_after_disk()
            if not sent and self._delivery.starved_of_credit:
                self._no_credit_seconds += time.monotonic() - began
            if self._delivery.all_terminal and not self._unsent:
                self.all_terminal.set()
        self._perform(self._delivery.close(self._closing))
        deadline = time.monotonic() + LINGER_MS / 1000
        while not self._flush() and time.monotonic() < deadline:
            poller.poll(RETRY_MS)

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            header = self._inbox.get()
            if header is None:
                self._perform(self._delivery.finish())
            else:
                self._perform(self._delivery.stored(header))

    def _receive(self) -> None:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._received(parts)

    def _received(self, parts: list[bytes]) -> None:
        sender = parts[0]
        try:
            if len(parts) != 2:
                raise ProtoError(f"{len(parts) - 1} frames where one message was due")
            self._perform(self._delivery.received(sender, m.decode_from_member(parts[1])))
        except ProtoError as error:
            logger.warning("refused a message: %s", error)
            self._perform([Send(sender, m.Refused(code="malformed", reason=str(error)))])

    def _pump(self) -> bool:
        """Send what credit and the socket take; whether anything went out."""
        sent = False
        while self._flush() and (actions := self._delivery.next_chunk()):
            self._perform(actions)
            sent = True
        return sent

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send | SendChunk):
                self._post(action)
            else:
                self._store(action)

    def _post(self, action: Send | SendChunk) -> None:
        """Send now, or keep it for the member of the session. Others are not waited for: whoever
        sends nonsense and reads nothing must not fill our memory or hold up the one who does."""
        if action.sender != self._member():
            with suppress(zmq.Again):
                self._dispatch(action)
            return
        self._unsent.append(action)
        self._flush()
        if len(self._unsent) > MAX_BACKLOG:
            logger.warning("the member does not read; its session ends")
            self._drop(action.sender)

    def _member(self) -> bytes | None:
        session = self._delivery.session
        return session.sender if session else None

    def _flush(self) -> bool:
        """Send what waits, in order; False when the socket takes no more for now."""
        while self._unsent:
            try:
                self._dispatch(self._unsent[0])
            except zmq.Again:
                return False
            if self._unsent:  # a peer found gone takes its backlog along
                self._unsent.popleft()
        return True

    def _drop(self, sender: bytes) -> None:
        self._unsent.clear()
        self._delivery.disconnected(sender)

    def _dispatch(self, action: Send | SendChunk) -> None:
        if isinstance(action, SendChunk):
            self._send_chunk(action)
        else:
            self._send(action.sender, [m.encode(action.message)])

    def _store(self, action: StoreTerm | StoreCommit | StoreTombstone) -> None:
        """Until it is durable: what follows must not be said before."""
        while self._closing is None:
            try:
                self._store_once(action)
                return
            except OSError as error:
                logger.error("the control log cannot be written (%s); trying again", error)
                self._closed.wait(STORE_RETRY_SECONDS)

    def _store_once(self, action: StoreTerm | StoreCommit | StoreTombstone) -> None:
        match action:
            case StoreCommit():
                self._spool.commit(action.number, action.trained)
            case StoreTombstone():
                self._spool.tombstone(action.id, action.state, action.reason)
            case StoreTerm():
                self._unsent.clear()  # what waited was for the session before
                self._spool.grant(Term(action.term, action.group, action.incarnation))

    def _send_chunk(self, action: SendChunk) -> None:
        try:
            frame = self._spool.read_chunk(action.message.id, action.message.index)
        except KeyError:  # it became terminal while it waited here
            return
        if self._send(action.sender, [m.encode(action.message), frame]):
            self._delivery.sent(action.sender, len(frame))

    def _send(self, sender: bytes, frames: list[bytes]) -> bool:
        """False when the peer is gone. Raises zmq.Again when its pipe is full."""
        try:
            self._socket.send_multipart([sender, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if sender == self._member():
                self._drop(sender)
            return False
        self._wire_bytes += sum(map(len, frames))
        return True

    def _look_after_disk(self) -> None:
        self._spool.sync_when_due()
        if self._spool.fill > CHECKPOINT_FILL:
            self._perform(self._delivery.short_of_space(self._spool.checkpoint_bytes))

    def _ping(self) -> None:
        session = self._delivery.session
        if session is None or self._unsent or time.monotonic() < self._ping_due:
            return
        self._ping_due = time.monotonic() + PING_SECONDS
        self._perform([Send(session.sender, m.Ping(term=session.term, session=session.name))])
