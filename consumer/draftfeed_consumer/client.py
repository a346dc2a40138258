"""The client: one thread that keeps a link to the producer and fills the buffer."""

import logging
import math
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec
import zmq

from draftfeed_consumer.buffer import Buffer
from draftfeed_consumer.errors import (
    ConsumerError,
    ProducerClosing,
    StreamClosed,
    StreamLost,
    StreamRefused,
)
from draftfeed_consumer.ledger import Ledger, LedgerState
from draftfeed_consumer.link import Link, LinkDown
from draftfeed_consumer.reception import (
    Acknowledged,
    Action,
    CheckpointWanted,
    Closing,
    Ended,
    Finished,
    Received,
    Reception,
    Reply,
)
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.errors import DescriptorMismatch, IncompatibleVersion, ProtoError
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

POLL_MS = 200
PASSING_REFUSALS = ("held", "malformed", "session")
"""After these it is worth attaching again; every other refusal is final."""
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts to attach; the last one repeats."""
FENCE_SECONDS = 10.0
REPORT_SECONDS = 10.0
"""How often waiting is mentioned in the log."""


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str = "tcp://127.0.0.1:5550"
    """Where the producer listens."""
    group: str = "default"
    """Name of the training run."""
    member: str = "0"
    lost_after_seconds: float = 600.0
    """A link that was up and stays down for longer ends the stream with StreamLost. Before the
    first attachment the consumer waits for as long as it takes."""

    def __post_init__(self) -> None:
        if self.lost_after_seconds < 0:
            raise ValueError(f"lost_after_seconds is {self.lost_after_seconds}, it must be >= 0")


class ClientStatistics(NamedTuple):
    attached: bool
    samples: int
    tokens: int
    logical_bytes: int
    encoded_bytes: int
    """Of chunk frames only."""
    wire_bytes: int
    link_down_seconds: float


class Client:
    """Owns the thread, the context and every link. `close` ends all three."""

    def __init__(
        self,
        config: ClientConfig,
        expect: Expectation,
        buffer: Buffer,
        ledger: Ledger,
        observe: Callable[[Sample], None] | None = None,
    ) -> None:
        """observe: called in the client's thread with every sample, before the trainer sees it."""
        self._config, self._expect = config, expect
        self._buffer, self._ledger, self._observe = buffer, ledger, observe
        self._incarnation = secrets.token_hex(8)
        self._outbox: queue.SimpleQueue[Callable[[Reception], m.FromMember | None]] = (
            queue.SimpleQueue()
        )
        self._waker, self._wake_end = socket.socketpair()
        self._waker.setblocking(False)
        self._closing = threading.Event()
        self._opening = threading.Event()
        self.checkpoint_wanted = threading.Event()
        self._finished = threading.Event()
        """The producer has everything it needs from us."""
        self.granted = threading.Event()
        """Set when the descriptor is known, or when the stream failed before."""
        self.descriptor: Descriptor | None = None
        self.failure: ConsumerError | None = None
        self._commit: LedgerState | None = None
        self._acknowledged = threading.Condition()
        self._acknowledged_number = 0
        self._sent_number = 0
        """Of the commit sent in this session."""
        self._down_since = time.monotonic()
        self._reported_at = -math.inf
        self._was_attached = False
        self._closing_reason: str | None = None
        self._counts = ClientStatistics(False, 0, 0, 0, 0, 0, 0.0)
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # called by the trainer's thread

    def open(self) -> None:
        """The ledger is loaded: samples may come."""
        self._opening.set()
        self.wake()

    def wake(self) -> None:
        if not self._closing.is_set():
            self._nudge()

    def _nudge(self) -> None:
        with suppress(BlockingIOError):  # full of wake-ups already
            self._waker.send(b"\0")

    def reject(self, id: SampleId, reason: str) -> None:
        """The sample counts as held until this is sent: in a new session it is claimed first, or
        the producer would send it once more."""

        def message(session: Reception) -> m.FromMember:
            self._ledger.drop(id)
            return m.Reject(term=session.term, session=session.session, id=id, reason=reason[:500])

        self._outbox.put(message)
        self.wake()

    def commit(self, state: LedgerState) -> None:
        """Send a durable state until the producer has acknowledged it."""
        self._commit = state
        self._outbox.put(self._commit_message)
        self.wake()

    def wait_acknowledged(self, timeout_seconds: float) -> bool:
        """Whether the producer has stored the last commit, now or within the time."""
        wanted = self._commit.number if self._commit else 0
        with self._acknowledged:
            return self._acknowledged.wait_for(
                lambda: (
                    self._acknowledged_number >= wanted
                    or self._finished.is_set()
                    or self.failure is not None
                ),
                timeout_seconds,
            )

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._nudge()
        self._thread.join()
        self._waker.close()
        self._wake_end.close()

    def statistics(self) -> ClientStatistics:
        down = self._counts.link_down_seconds
        if not self._counts.attached and self._was_attached:
            down += time.monotonic() - self._down_since
        return self._counts._replace(link_down_seconds=down)

    # the thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._keep_attached(context)
        except ConsumerError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the client stopped")
            self._fail(ConsumerError(f"the client stopped: {error}"))
            raise
        finally:
            context.term()

    def _fail(self, error: ConsumerError) -> None:
        self.failure = error
        self._buffer.fail(error)
        self.granted.set()
        with self._acknowledged:
            self._acknowledged.notify_all()

    def _keep_attached(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        attempt = 0
        while not (self._closing.is_set() or self._finished.is_set()):
            try:
                attached = self._attach(context)
                attempt = 0 if attached else attempt + 1
            except LinkDown as error:
                attempt += 1
                self._check_patience(str(error))
            self._closing.wait(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
        if not self._finished.is_set():
            self._fail(StreamClosed())

    def _check_patience(self, reason: str) -> None:
        now = time.monotonic()
        down_seconds = now - self._down_since
        if self._was_attached and down_seconds > self._config.lost_after_seconds:
            if self._closing_reason is not None:
                raise ProducerClosing(self._config.address, self._closing_reason)
            raise StreamLost(self._config.address, down_seconds)
        if now - self._reported_at >= REPORT_SECONDS:
            logger.warning("waiting for the producer at %s: %s", self._config.address, reason)
            self._reported_at = now

    def _attach(self, context: "zmq.Context[zmq.Socket[bytes]]") -> bool:
        """Make a link and stay on it. Returns whether it was ever granted."""
        link = Link(context, self._config.address)
        granted = False
        try:
            answer = self._fence(link)
            granted = answer is not None
            if answer is None:
                self._check_patience("it does not answer, or serves another consumer")
            else:
                self._stay(link, answer)
        except (DescriptorMismatch, IncompatibleVersion) as error:
            raise StreamRefused(self._config.address, "mismatch", str(error)) from error
        except ProtoError as error:
            self._check_patience(str(error))
            granted = False
        except LinkDown as error:
            if self._was_attached and not self._finished.is_set():
                logger.warning("the link to %s is down: %s", self._config.address, error)
        finally:
            self._mark_down()
            link.close()
        return granted

    def _fence(self, link: Link) -> m.Granted | None:
        config = self._config
        link.send(
            m.Fence(
                group=config.group,
                member=config.member,
                incarnation=self._incarnation,
                expect=self._expect,
            )
        )
        answer = self._await_answer(link)
        if isinstance(answer, m.Refused):
            if answer.code not in PASSING_REFUSALS:
                raise StreamRefused(config.address, answer.code, answer.reason)
            self._check_patience(answer.reason)
            return None
        return answer

    def _await_answer(self, link: Link) -> m.Granted | m.Refused | None:
        poller = self._poller(link)
        deadline = time.monotonic() + FENCE_SECONDS
        while not self._closing.is_set() and time.monotonic() < deadline:
            self._wait(poller)
            link.check()
            while (got := link.receive()) is not None:
                if isinstance(got[0], m.Granted | m.Refused):
                    return got[0]
        return None

    def _stay(self, link: Link, granted: m.Granted) -> None:
        m.check_version(granted.version)
        self._expect.check(granted.descriptor)
        if granted.stream_id != granted.descriptor.stream_id():
            raise StreamRefused(
                self._config.address, "mismatch", "its stream id is not that of its descriptor"
            )
        self._mark_up(granted)
        reception = Reception(granted, self._buffer, self._ledger)
        poller = self._poller(link)
        opened = False
        try:
            while not (self._closing.is_set() or self._finished.is_set()):
                if self._opening.is_set() and not opened:
                    opened = True
                    self._perform(link, reception.open())
                    if self._commit is not None:
                        self._outbox.put(self._commit_message)
                self._step(link, reception, poller)
            self._say_goodbye(link, reception)
        finally:
            reception.close()

    def _step(self, link: Link, reception: Reception, poller: zmq.Poller) -> None:
        self._wait(poller)
        self._receive(link, reception)
        link.check()
        self._send_outbox(link, reception)
        self._perform(link, reception.grant())

    def _receive(self, link: Link, reception: Reception) -> None:
        while (got := link.receive()) is not None:
            message, frame, wire_bytes = got
            counts = self._counts
            self._counts = counts._replace(
                encoded_bytes=counts.encoded_bytes + (len(frame) if frame else 0),
                wire_bytes=counts.wire_bytes + wire_bytes,
            )
            self._check_refused(message)
            self._perform(link, reception.received(message, frame))

    def _check_refused(self, message: m.FromProducer) -> None:
        if isinstance(message, m.Refused) and message.code not in PASSING_REFUSALS:
            raise StreamRefused(self._config.address, message.code, message.reason)

    def _send_outbox(self, link: Link, reception: Reception) -> None:
        while not self._outbox.empty():
            message = self._outbox.get()(reception)
            if message is not None:
                link.send(message)

    def _say_goodbye(self, link: Link, reception: Reception) -> None:
        self._send_outbox(link, reception)
        link.send(m.Bye(term=reception.term, session=reception.session))

    def _perform(self, link: Link, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply():
                    link.send(action.message)
                case Received():
                    self._take(action.sample)
                case Ended():
                    self._buffer.end()
                case Acknowledged():
                    self._note_acknowledged(action.number)
                case CheckpointWanted():
                    self.checkpoint_wanted.set()
                case Finished():
                    self._finished.set()
                    self._note_acknowledged(self._acknowledged_number)
                case Closing() if self._finished.is_set():
                    pass
                case Closing():
                    self._closing_reason = action.reason
                    raise LinkDown(f"the producer is shutting down: {action.reason}")

    def _take(self, sample: Sample) -> None:
        if self._observe is not None:
            self._observe(sample)
        counts = self._counts
        self._counts = counts._replace(
            samples=counts.samples + 1,
            tokens=counts.tokens + len(sample.hidden_states),
            logical_bytes=counts.logical_bytes + sample.hidden_states.nbytes,
        )
        self._buffer.put(sample)

    def _note_acknowledged(self, number: int) -> None:
        with self._acknowledged:
            self._acknowledged_number = max(self._acknowledged_number, number)
            self._acknowledged.notify_all()

    def _commit_message(self, session: Reception) -> m.FromMember | None:
        state = self._commit
        if state is None or state.number <= self._sent_number:
            return None
        self._sent_number = state.number
        return m.Commit(
            term=session.term, session=session.session, number=state.number, trained=state.trained
        )

    def _mark_up(self, granted: m.Granted) -> None:
        logger.info("attached to %s, term %d", self._config.address, granted.term)
        self.descriptor = granted.descriptor
        self._ledger.follow(granted.commit_number)
        down = self.statistics().link_down_seconds
        self._counts = self._counts._replace(attached=True, link_down_seconds=down)
        self._was_attached = True
        self._closing_reason = None
        self._sent_number = self._acknowledged_number
        self.granted.set()

    def _mark_down(self) -> None:
        if self._counts.attached:
            self._counts = self._counts._replace(attached=False)
            self._down_since = time.monotonic()

    def _poller(self, link: Link) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wake_end, zmq.POLLIN)
        link.register(poller)
        return poller

    def _wait(self, poller: zmq.Poller) -> None:
        ready = dict(poller.poll(POLL_MS))
        if self._wake_end.fileno() in ready:
            self._wake_end.recv(4096)
