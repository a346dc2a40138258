"""The client: one thread that keeps a link to every producer and fills the buffer."""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from draftfeed_consumer import credentials
from draftfeed_consumer.actions import (
    Acknowledged,
    Action,
    Attached,
    CheckpointWanted,
    Closing,
    Deliver,
    Drop,
    Ended,
    EndWithdrawn,
    Fail,
    Finished,
    Leave,
    Say,
)
from draftfeed_consumer.buffer import Buffer
from draftfeed_consumer.credentials import Credentials
from draftfeed_consumer.errors import ConsumerError, StreamClosed
from draftfeed_consumer.ledger import Ledger, LedgerState
from draftfeed_consumer.line import Line
from draftfeed_consumer.link import Link, LinkDown
from draftfeed_consumer.local import Unreachable
from draftfeed_consumer.membership import Membership
from draftfeed_consumer.reception import Payload
from draftfeed_consumer.statistics import ClientStatistics, ProducerStatistics
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import SampleId
from draftfeed_proto.keys import check_port, local
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

POLL_MS = 200
CONNECTING_POLL_MS = 50
TEND_SECONDS = 0.05
MESSAGES_AT_ONCE, BYTES_AT_ONCE = 64, 64 << 20
"""Of one producer, before the others have their turn; it may be one message more."""
GOODBYE_SECONDS = 0.2
MAX_IO_THREADS = 4
"""ZeroMQ's: one that resolves a name must not hold up the other links."""


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    addresses: tuple[str, ...] = ("tcp://127.0.0.1:5550",)
    """Where the producers listen; samples of all of them come through one queue."""
    group: str = "default"
    """Name of the training run."""
    lost_after_seconds: float = 600.0
    """A link that was up and stays down for longer ends the stream with StreamLost. Before the
    first attachment the consumer waits for as long as it takes."""
    same_host: bool = True
    """Read the samples of a producer on this host out of its files, and not from a connection."""
    key: Path | None = None
    """Secret key file of this consumer; its public one is among the producers' `clients`."""
    server_key: Path | None = None
    """Public key file of the producers."""
    insecure: bool = False
    """Connect to other machines without keys."""

    def __post_init__(self) -> None:
        if self.lost_after_seconds < 0:
            raise ValueError(f"lost_after_seconds is {self.lost_after_seconds}, it must be >= 0")
        if not self.addresses or len(set(self.addresses)) != len(self.addresses):
            raise ValueError(f"addresses must name each producer once, not {self.addresses!r}")
        if (self.key is None) != (self.server_key is None):
            raise ValueError("key and server_key belong together, and one is missing")
        for address in self.addresses:
            check_port(address)
        away = [address for address in self.addresses if not local(address)]
        if self.key is None and not self.insecure and away:
            raise ValueError(
                f"{away[0]} is on another machine, and there are no keys for it; set key and "
                "server_key (`draftfeed keygen` makes them), or insecure = true"
            )

    def credentials(self) -> Credentials | None:
        """Raises KeyFileError."""
        if self.key is None or self.server_key is None:
            return None
        return credentials.read(self.key, self.server_key)


class Client:
    """Owns the thread, the context and every link. `close` ends all three."""

    def __init__(
        self,
        config: ClientConfig,
        buffer: Buffer,
        ledger: Ledger,
        observe: Callable[[Sample], None] | None = None,
    ) -> None:
        """observe: called in the client's thread with every sample, before the trainer sees it."""
        self._config = config
        self._buffer, self._ledger, self._observe = buffer, ledger, observe
        self._outbox: queue.SimpleQueue[Callable[[Membership], list[Action]]] = queue.SimpleQueue()
        self._waker, self._wake_end = socket.socketpair()
        self._waker.setblocking(False)
        self._closing = threading.Event()
        self._drain = False
        """Plain: a signal handler may set it while its thread holds any lock."""
        self._at_work_changed = False
        self._failed = False
        self._turned_at = time.monotonic()
        self._cut, self._link_down_seconds = False, 0.0
        self._poller, self._polled = zmq.Poller(), list[Link | None]()
        """Of these links, in the order of the lines."""
        self._tend_due = 0.0
        self._over = False
        """The loop has ended, as it should or with a failure that is known."""
        self._finished = False
        """The producers have everything they need from us."""
        self.checkpoint_wanted = threading.Event()
        self.granted = threading.Event()
        """Set when the descriptor is known, or when the stream failed before."""
        self.descriptor: Descriptor | None = None
        self.failure: ConsumerError | None = None
        self.checkpoint_samples = 0
        """Of the group between two checkpoints; 0 = not known."""
        self._wanted_number = 0
        self._acknowledged = threading.Condition()
        self._acknowledged_number = 0
        self._counts = ClientStatistics(False, 0, 0, 0, 0, 0, 0.0)
        now = time.monotonic()
        keys = config.credentials()
        self._lines = {address: Line(address, now, keys) for address in config.addresses}
        self._member: Membership | None = None
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)

    def start(self, member: Membership) -> None:
        """From now on the membership belongs to the thread."""
        self._member = member
        self._thread.start()

    # called by the trainer's threads

    @property
    def term(self) -> int:
        return self._member.term if self._member else 0

    @property
    def draining(self) -> bool:
        return self._drain

    def open(self) -> None:
        """The ledger is loaded: samples may come."""
        samples = self.checkpoint_samples
        self._ask(lambda member: member.open(samples))

    def reject(self, id: SampleId, reason: str, state: str) -> None:
        self._ask(lambda member: member.reject(id, reason, state))

    def commit(self, state: LedgerState) -> None:
        """Send a durable state until every producer has acknowledged it."""
        self._wanted_number = state.number
        self._ask(lambda member: member.commit(state))

    def at_work_changed(self) -> None:
        self._at_work_changed = True
        self.wake()

    def drain(self) -> None:
        """Takes no lock, so that a signal handler may call it."""
        self._drain = True
        self.wake()

    def wake(self) -> None:
        with suppress(OSError):  # full of wake-ups already, or closed
            self._waker.send(b"\0")

    def wait_acknowledged(self, timeout_seconds: float) -> bool:
        """Whether every producer has stored the last commit, now or within the time."""
        with self._acknowledged:
            self._acknowledged.wait_for(
                lambda: self._is_acknowledged() or self.failure is not None, timeout_seconds
            )
            return self._is_acknowledged()

    def _is_acknowledged(self) -> bool:
        return self._finished or self._acknowledged_number >= self._wanted_number

    def close(self, failed: bool = False) -> None:
        if self._closing.is_set():
            return
        self._failed = failed
        self._closing.set()
        self.wake()
        if self._member is not None:
            self._thread.join()
        else:
            self._fail(StreamClosed())
        self._waker.close()
        self._wake_end.close()

    def statistics(self) -> ClientStatistics:
        producers = self._producer_statistics()
        must = [p for p in producers if p.state not in ("done", "out") and p.term]
        return self._counts._replace(
            attached=bool(must) and self.granted.is_set() and all(p.attached for p in must),
            link_down_seconds=self._link_down_seconds,
            turn_seconds=0.0 if self._over else max(0.0, time.monotonic() - self._turned_at),
            producers=producers,
        )

    def _producer_statistics(self) -> tuple[ProducerStatistics, ...]:
        if self._member is None:
            return ()
        return tuple(
            ProducerStatistics(
                address=peer.address,
                state=peer.state,
                attached=peer.attached,
                term=peer.term,
                offers=len(session.offers) if (session := peer.reception) else 0,
                due_bytes=session.due_bytes if session else 0,
                logical_bytes=peer.logical_bytes,
                wire_bytes=self._lines[peer.address].wire_bytes,
                same_host=self._lines[peer.address].same_host,
            )
            for peer in self._member.peers
        )

    def _ask(self, event: Callable[[Membership], list[Action]]) -> None:
        self._outbox.put(event)
        self.wake()

    # the thread

    def _run(self) -> None:
        assert self._member is not None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(min(len(self._lines), MAX_IO_THREADS))
        try:
            self._serve(context, self._member)
        except ConsumerError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the client stopped")
            self._fail(ConsumerError(f"the client stopped: {error}"))
            raise
        finally:
            self._over = True
            for line in self._lines.values():
                line.drop("closed", time.monotonic())
            context.term()

    def _fail(self, error: ConsumerError) -> None:
        self.failure = error
        self._buffer.fail(error)
        self.granted.set()
        with self._acknowledged:
            self._acknowledged.notify_all()

    def _serve(self, context: "zmq.Context[zmq.Socket[bytes]]", member: Membership) -> None:
        try:
            while not (self._closing.is_set() or self._finished):
                self._turn(member)
                self._tend(context, member)
                for line in self._wait():
                    self._read(member, line)
                self._obey(member)
                self._perform(member.grant())
            self._obey(member)
            self._perform(member.drain(self._buffer.drain()))
        finally:
            self._say_goodbye(member)
        if not self._finished:
            raise StreamClosed

    def _turn(self, member: Membership) -> None:
        now = time.monotonic()
        if self._cut:
            self._link_down_seconds += now - self._turned_at
        self._turned_at = now
        lines = self._lines.values()
        self._cut = any(line.cut and member.peer(line.address).wanted for line in lines)

    def _say_goodbye(self, member: Membership) -> None:
        """And stay for a moment: a producer that finds us gone while it answers what we gave back
        would take us for lost, and never read the goodbye behind it."""
        goodbyes = member.leave(self._failed)
        for say in goodbyes:
            self._say(say)
        deadline = time.monotonic() + (GOODBYE_SECONDS if goodbyes else 0.0)
        links = [line.link for line in self._lines.values() if line.link is not None]
        while links and (left_seconds := deadline - time.monotonic()) > 0:
            poller = zmq.Poller()
            for link in links:
                link.register(poller)
            poller.poll(max(1, int(1000 * left_seconds)))
            links = [link for link in links if link.discard()]

    def _tend(self, context: "zmq.Context[zmq.Socket[bytes]]", member: Membership) -> None:
        """Lines that are down, and patience with the others: by the clock, not in every turn."""
        now = time.monotonic()
        if now < self._tend_due:
            return
        self._tend_due = now + TEND_SECONDS
        self._check_patience(member, now)
        for line in self._lines.values():
            if member.peer(line.address).wanted and line.due(now):
                line.begin(context, now)

    def _wait(self) -> list[Line]:
        """Until something happens. The lines to look at: with many producers most have nothing to
        say at a time, and asking each of them would cost more than what the others sent."""
        lines = list(self._lines.values())
        links = [line.link for line in lines]
        if links != self._polled:
            self._poller, self._polled = self._poller_of(links), links
        all_up = all(line.linked for line in lines)
        ready = dict(self._poller.poll(POLL_MS if all_up else CONNECTING_POLL_MS))
        if self._wake_end.fileno() in ready:
            self._wake_end.recv(4096)
        return [line for line in lines if line.link is not None and line.link.to_read(ready)]

    def _poller_of(self, links: list[Link | None]) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wake_end, zmq.POLLIN)
        for link in links:
            if link is not None:
                link.register(poller)
        return poller

    def _read(self, member: Membership, line: Line) -> None:
        """What was said before a link went down is read first."""
        try:
            all_read = self._read_on(member, line)
            # Whether it is up is asked when all was read: what came before the end counts.
            if all_read and line.link is not None and line.link.check() and not line.linked:
                line.up(time.monotonic())
                self._perform(member.linked(line.address))
        except (LinkDown, ProtoError) as error:
            self._lose(member, line, str(error))
        if member.peer(line.address).attached and not line.attached:
            term = member.peer(line.address).term
            where = ", on this host" if line.same_host else ""
            logger.info("attached to %s, term %d%s", line.address, term, where)
            line.attach()

    def _read_on(self, member: Membership, line: Line) -> bool:
        """Whether nothing more is there, for now or for good."""
        left_bytes = BYTES_AT_ONCE
        for _ in range(MESSAGES_AT_ONCE):
            if line.link is None or (got := line.link.receive()) is None:
                return True
            message, payload = got[0], self._beside(line, *got[:2])
            left_bytes -= self._count(line, message, payload, got[2])
            self._perform(member.received(line.address, message, payload))
            if left_bytes <= 0:
                break
        return False

    def _beside(
        self, line: Line, message: m.FromProducer, frame: memoryview | None
    ) -> Payload | None:
        """The frame that a message came with, or where frames are to be read."""
        if isinstance(message, m.ChunksAt):
            return line.frames_at(message)
        if isinstance(message, m.Chunk):
            line.check_files()
        if isinstance(message, m.Granted) and self._config.same_host:
            line.look_for_files(message)
        return None if frame is None else [frame]

    def _count(
        self, line: Line, message: m.FromProducer, frames: Payload | None, wire_bytes: int
    ) -> int:
        """Returns the bytes that came. What is read from a file counts as if it had been sent."""
        encoded_bytes = sum(len(one) for one in frames or () if not isinstance(one, Unreachable))
        wire_bytes += encoded_bytes if isinstance(message, m.ChunksAt) else 0
        line.wire_bytes += wire_bytes
        counts = self._counts
        self._counts = counts._replace(
            encoded_bytes=counts.encoded_bytes + encoded_bytes,
            wire_bytes=counts.wire_bytes + wire_bytes,
        )
        return wire_bytes

    def _lose(self, member: Membership, line: Line, reason: str) -> None:
        actions = member.unlinked(line.address)
        self._drop(line, reason)
        self._perform(actions)

    def _drop(self, line: Line, reason: str, *, closing: bool = False) -> None:
        if line.attached:
            logger.warning("the link to %s is down: %s", line.address, reason)
        line.drop(reason, time.monotonic(), closing=closing)

    def _obey(self, member: Membership) -> None:
        """What the trainer's threads asked for."""
        while not self._outbox.empty():
            self._perform(self._outbox.get()(member))
        if self._at_work_changed:
            self._at_work_changed = False  # before reading it: what changes meanwhile sets it again
            self._perform(member.at_work(self._ledger.at_work))
        if self._drain and not member.draining:
            self._perform(member.drain(self._buffer.drain()))

    def _check_patience(self, member: Membership, now: float) -> None:
        for line in self._lines.values():
            peer = member.peer(line.address)
            if not peer.wanted:
                continue
            if overdue := line.overdue(peer.state, now):
                self._lose(member, line, overdue)
            if line.to_report(now):
                hint = "" if self.granted.is_set() else self._without_hint(line)
                logger.warning(
                    "waiting for the producer at %s: %s%s", line.address, line.reason, hint
                )
            if error := line.lost(self._config.lost_after_seconds, now):
                raise error

    def _without_hint(self, line: Line) -> str:
        """Training has not begun, and one producer is missing."""
        if len(self._lines) < 2:
            return ""
        return f"; training begins when all have granted it, or without: --without {line.address}"

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Say():
                    self._say(action)
                case Deliver():
                    self._take(action.sample)
                case Drop():
                    self._drop(self._lines[action.address], action.reason)
                case Leave():
                    logger.info("left %s", action.address)
                    self._lines[action.address].drop("it is done", time.monotonic())
                case Closing():
                    reason = action.reason
                    self._drop(self._lines[action.address], reason, closing=True)
                case Attached():
                    self.descriptor = action.descriptor
                    self.granted.set()
                case Ended():
                    self._buffer.end()
                case EndWithdrawn():
                    self._buffer.reopen()
                case Acknowledged():
                    self._note_acknowledged(action.number)
                case CheckpointWanted():
                    self.checkpoint_wanted.set()
                case Finished():
                    self._finished = True
                    self._note_acknowledged(self._acknowledged_number)
                case Fail():
                    self._fail(action.error)  # the trainer stops now, and not after the goodbyes
                    raise action.error

    def _say(self, say: Say) -> None:
        line = self._lines[say.address]
        assert line.link is not None
        line.link.send(say.message)
        if isinstance(say.message, m.Fence):
            line.asked(time.monotonic())

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
