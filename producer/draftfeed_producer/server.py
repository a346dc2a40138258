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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from draftfeed_producer.archive.shelf import Shelf
from draftfeed_producer.asset_desk import AssetDesk, Piece
from draftfeed_producer.attempts import Attempts
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.distribution import Handed
from draftfeed_producer.figures import DeliveryFigures, Figures
from draftfeed_producer.listener import LINGER_MS, Listener
from draftfeed_producer.session import (
    Action,
    Regenerate,
    Send,
    SendChunk,
    Session,
    Store,
    StoreCommit,
    StoreSuspects,
    StoreTerm,
    StoreTombstone,
    Verify,
    Void,
)
from draftfeed_producer.sparing import Sparing
from draftfeed_producer.spool import Spool
from draftfeed_producer.spool.control import Term
from draftfeed_proto import messages as m
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.limits import MAX_PLACES
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

POLL_MS = 200
RETRY_MS = 5
MESSAGES_AT_ONCE = 64
"""Read before others are sent to: whoever never stops asking must not keep samples from them."""
SEND_SECONDS = 0.05
"""Of one turn. A disk that is slower than the link never fills a pipe, and commits would wait."""
PING_SECONDS = 1.0
"""A ROUTER learns that a peer is gone when it sends to it."""
MAX_BACKLOG = 1000
"""Actions waiting for one member that has stopped reading; then its session ends."""
MAX_NOTICES = 64
MAX_UNSENT = 16
"""Frames, of at most 8 MiB each."""
OVER = ("fenced", "session")
"""Codes of refusals after which nothing is said any more: who misses one trains, or waits, for
nothing."""
SHUT_OUT = m.Refused(code="session", reason="your key is not known here any more")
"""It may ask again: a new connection is told so by its handshake."""
TOO_MANY_ATTEMPTS = "there are too many attempts to attach; this one was not looked at"
FIGURES_SECONDS = 0.2
RESTOCK_SECONDS = 0.02
RESTOCK_SAMPLES = 128
"""Waiting to be offered."""
CHECKPOINT_FILL = 0.7
"""Of the quota. Two checkpoints may have to be made before anything is freed."""
STORE_RETRY_SECONDS = 0.5
DISK_SECONDS = 0.1
"""Between looks at how much space is left, which ask the system."""


class ServerStatistics(NamedTuple):
    attached: bool
    """Whether samples may go out to somebody."""
    members: tuple[str, ...]
    """Those that have a session."""
    term: int
    leased: int
    wire_bytes: int
    """Frames handed to ZeroMQ, and those that members of this host were told of, since the process
    began."""
    backlog: int
    """Messages waiting for the member to read."""
    asset_bytes: int
    """Of the target's files, sent; not among the wire bytes."""
    turn_seconds: float
    """Since the server's loop last came round; more than a few say that it hangs."""
    figures: DeliveryFigures
    same_host: tuple[str, ...] = ()
    """Of the members, those that read the spool's files."""


class Server:
    """Serves a spool until `close`. Owns the listener."""

    def __init__(
        self,
        listener: Listener,
        spool: Spool,
        delivery: Delivery,
        target: Path | None = None,
        shelf: Shelf | None = None,
        *,
        no_target: str = "this producer has no target to serve files of",
    ) -> None:
        """target: its directory, of which trainers get some files; no_target: why there is none.
        shelf: samples that exist already."""
        self._shelf = shelf
        self._listener, self._spool, self._delivery = listener, spool, delivery
        self._attempts = Attempts(time.monotonic())
        self._nonsense = Sparing(logger)
        self._assets = AssetDesk(delivery.descriptor.stream_id(), target, no_target)
        self._socket, self._access = listener.socket, listener.access
        self._handover = listener.handover
        self._inbox: queue.SimpleQueue[Callable[[], list[Action]]] = queue.SimpleQueue()
        """Events of the producer, to be given to the delivery state by our thread."""
        self._waker, self._wake_end = socket.socketpair()
        self._waker.setblocking(False)
        self._backlogs: dict[bytes, deque[Send | SendChunk]] = {}
        """What waits for each member that has a session, in order."""
        self._notices: deque[Send | SendChunk] = deque(maxlen=MAX_NOTICES)
        """To members that were replaced and whose pipes were full."""
        self._gone: deque[bytes] = deque()
        """Members that were found gone, whose sessions are to end."""
        self._dropping = False
        self._unsent: dict[SendChunk, bytes | memoryview] = {}
        """Frames that a pipe did not take, by what is to be sent."""
        self._due: deque[bytes] = deque()
        """Members that more could be sent to when the last turn was over."""
        self.regenerate: queue.SimpleQueue[list[SampleId]] = queue.SimpleQueue()
        """Samples to be generated once more."""
        self.ledger_known = threading.Event()
        """A leader has said what is trained."""
        self._closing: str | None = None
        self._closed = threading.Event()
        self._wire_bytes = self._asset_bytes = 0
        self._sessions: dict[str, str] = {}
        """Of members that were looked for on this host: by its name, the member's."""
        self._same_host: tuple[str, ...] = ()
        self._figures = Figures(delivery.stock, time.monotonic())
        self._figures_now = DeliveryFigures()
        self._figures_due = 0.0
        self._turned_at = time.monotonic()
        self._ping_due = self._disk_due = 0.0
        self._judged_samples = 0
        self.all_terminal = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> None:
        self._assets.start(self._wake)
        self._thread.start()

    # called by other threads

    def stored(self, header: SampleHeader) -> None:
        self._tell(partial(self._stored, header, time.monotonic()))

    def skip(self, ids: IdSet) -> None:
        """Lines that turned out to be no prompts."""
        self._tell(lambda: self._delivery.skip(ids))

    def quarantine(self, id: SampleId, reason: str) -> None:
        """A prompt that the engine cannot make."""
        self._tell(lambda: self._delivery.quarantine(id, reason))

    def settled(self, ids: IdSet) -> None:
        """Samples of a lost spool that are generated again."""
        self._tell(lambda: self._delivery.settled(ids))

    def finish(self) -> None:
        """No further samples will be stored, but those to be generated again."""
        self._tell(self._delivery.finish)

    def shut_out(self) -> None:
        """Keys were taken away: the sessions of those who have them end."""

        def tell() -> list[Action]:
            assert self._access is not None
            gone = self._access.shut_out()
            self._spool.retire_files()
            for sender in gone:
                self._drop(sender)
            return [Send(sender, SHUT_OUT) for sender in gone]

        self._tell(tell)

    def _tell(self, event: Callable[[], list[Action]]) -> None:
        self._inbox.put(event)
        self._wake()

    def close(self, reason: str) -> None:
        """Tell the member why, and end the thread."""
        if self._closing is not None:
            return
        self._closing = reason
        self._closed.set()
        self._wake()
        if self._thread.ident is not None:  # an error may come before the start
            self._thread.join()
        self._assets.close()
        self._listener.close()
        self._waker.close()
        self._wake_end.close()

    def statistics(self) -> ServerStatistics:
        fencing = self._delivery.fencing
        return ServerStatistics(
            bool(fencing.live),
            tuple(sorted(member.name for member in list(fencing.attached.values()))),
            fencing.number,
            len(fencing.leased),
            self._wire_bytes,
            sum(map(len, list(self._backlogs.values()))),
            self._asset_bytes,
            max(0.0, time.monotonic() - self._turned_at),  # it may be set in between
            self._figures_now,
            self._same_host,
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
        self._handover.register(poller)
        while self._closing is None:
            self._turned_at = time.monotonic()
            soon = self._waiting or self._assets.waiting
            self._figures.waits("link_full" if self._waiting else self._delivery.waits_for)
            pause_ms = RETRY_MS if soon else POLL_MS
            ready = dict(poller.poll(0 if self._due else pause_ms))
            self._figures.waits(None)
            if self._wake_end.fileno() in ready:
                self._wake_end.recv(4096)
            self._drain_inbox()
            self._restock()
            self._look_for_local(ready)
            self._receive()
            self._pump()
            self._send_piece()
            self._ping()
            for _ in range(len(self._notices)):
                self._notify(self._notices.popleft())
            self._look_after_disk()
            if self._delivery.all_terminal and not self._waiting:
                self.all_terminal.set()
            self._publish_figures()
        self._perform(self._delivery.close(self._closing))
        deadline = time.monotonic() + LINGER_MS / 1000
        while self._waiting and time.monotonic() < deadline:
            self._flush_all()
            poller.poll(RETRY_MS)

    def _look_for_local(self, ready: Mapping[Any, int]) -> None:
        """Members of this host. What is generated for them alone need not be small."""
        members = self._delivery.fencing.attached.values()
        sessions = {one.session.name: one.name for one in members if one.session is not None}
        if sessions == self._sessions and not self._handover.to_look(ready):
            return
        self._sessions = sessions
        self._handover.look(sessions)
        local = sorted(name for session, name in sessions.items() if session in self._handover)
        self._same_host = tuple(local)
        self._spool.prefer_rows(0 < len(local) == len(sessions))
        self._spool.keep_fresh(len(local) < len(sessions))

    def _publish_figures(self) -> None:
        """Others may not look at what this thread changes meanwhile."""
        now = time.monotonic()
        if now < self._figures_due:
            return
        self._figures_due = now + FIGURES_SECONDS
        stock, attached = self._delivery.stock, self._delivery.fencing.attached
        self._figures_now = self._figures.now(stock, attached.values(), now)

    @property
    def _waiting(self) -> bool:
        return any(self._backlogs.values())

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            self._perform(self._inbox.get()())

    def _remake(self, ids: list[SampleId]) -> None:
        """By the engine, unless there is another copy."""
        shelf = self._shelf
        ids = [id for id in ids if shelf is None or not shelf.give_back(id)]
        if ids:
            self.regenerate.put(ids)

    def _restock(self) -> None:
        """Off the shelf, as many as members may soon ask for: no more, for each takes memory, and
        no longer than others can wait."""
        until = time.monotonic() + RESTOCK_SECONDS
        while self._shelf is not None and self._delivery.stock.spooled < RESTOCK_SAMPLES:
            if time.monotonic() >= until:
                self._wake()
                return
            taken = self._shelf.take()
            if taken is None:
                return
            id, header = taken
            if id in self._delivery.stock:
                continue  # a rollback brought it back before
            if header is None:
                self._perform(self._delivery.remake(id))
            else:
                self._perform(self._stored(header, time.monotonic()))

    def _stored(self, header: SampleHeader, at: float) -> list[Action]:
        self._figures.stored(header.id, at)
        return self._delivery.stored(header)

    def _receive(self) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            sender = frames[0].bytes
            if self._access is not None and not self._access.admits(sender, frames[-1]):
                self._perform([Send(sender, SHUT_OUT)])
                continue
            self._received([sender, *(frame.bytes for frame in frames[1:])])

    def _received(self, parts: list[bytes]) -> None:
        sender = parts[0]
        try:
            if len(parts) != 2:
                raise ProtoError(f"{len(parts) - 1} frames where one message was due")
            message = m.decode_from_member(parts[1])
            if isinstance(message, m.ListAssets | m.FetchAsset):
                self._asked(sender, message)
                return
            now = time.monotonic()
            if isinstance(message, m.Fence) and not self._attempts.allow(sender, now):
                # Without its term: nobody is to answer with a higher one.
                self._perform([Send(sender, m.Refused(code="held", reason=TOO_MANY_ATTEMPTS))])
                return
            self._perform(self._delivery.received(sender, message, now))
        except ProtoError as error:
            self._nonsense.warn(f"refused a message: {error}")
            self._perform([Send(sender, m.Refused(code="malformed", reason=str(error)))])

    def _asked(self, sender: bytes, message: m.ListAssets | m.FetchAsset) -> None:
        if answer := self._assets.answer(sender, message, time.monotonic()):
            self._perform([Send(sender, answer)])

    def _send_piece(self) -> None:
        """At most one in a turn: samples come first."""
        piece = self._assets.next_piece(time.monotonic())
        if piece is None:
            return
        if isinstance(piece.message, m.Refused):
            self._assets.dropped(piece)
            self._perform([Send(piece.sender, piece.message)])
            return
        try:
            self._try_twice(lambda: self._send_tracked(piece))
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._assets.dropped(piece)

    def _send_tracked(self, piece: Piece) -> None:
        """Raises zmq.ZMQError when the peer is gone, or its pipe full: then it does not read."""
        # Small ones too, or nobody would know what of theirs ZeroMQ still holds.
        last = zmq.Frame(piece.data, track=True, copy_threshold=0)
        frames: list[bytes | zmq.Frame] = [piece.sender, m.encode(piece.message), last]
        tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        self._assets.sent(piece, tracker)
        self._asset_bytes += len(piece.data)

    def _pump(self) -> None:
        """Send what credit and the socket take, a message to each member in turn, until it is time
        to look at what has come."""
        until = time.monotonic() + SEND_SECONDS
        attached = self._delivery.fencing.attached
        turns = dict.fromkeys([*(one for one in self._due if one in attached), *attached])
        # A flush ends the session of a peer that is gone.
        self._due = deque(sender for sender in turns if self._flush(sender))
        while self._due and time.monotonic() < until:
            sender = self._due.popleft()
            actions = self._delivery.next_chunk(sender, self._place)
            self._perform(actions)
            if actions and self._flush(sender):
                self._due.append(sender)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send() | SendChunk():
                    self._post(action)
                case Verify():
                    whole = self._spool.whole(action.id)
                    self._perform(self._delivery.verified(action.id, whole))
                case Regenerate():
                    self._remake(action.ids)
                case _:
                    if not self._store(action):
                        break  # what follows must not be said
        self._forget_the_gone()
        if self._delivery.ledger_known and not self.ledger_known.is_set():
            self.ledger_known.set()

    def _post(self, action: Send | SendChunk) -> None:
        """Send now, or keep it for a member that has a session. Others are not waited for:
        whoever sends nonsense and reads nothing must not fill our memory or hold anybody up."""
        if action.sender not in self._delivery.fencing.attached:
            self._notify(action)
            return
        backlog = self._backlogs.setdefault(action.sender, deque())
        backlog.append(action)
        self._flush(action.sender)
        if len(backlog) > MAX_BACKLOG:
            logger.warning("a member does not read; its session ends")
            self._drop(action.sender)

    def _notify(self, action: Send | SendChunk) -> None:
        """To somebody without a session: once. But who was replaced or shut out must hear it: the
        last few of these are tried again."""
        try:
            self._try_twice(lambda: self._dispatch(action))
        except zmq.Again:
            final = isinstance(action.message, m.Refused) and action.message.code in OVER
            if final:
                self._notices.append(action)

    def _try_twice(self, send: Callable[[], object]) -> None:
        """ZeroMQ learns about once a millisecond what a peer has read, and until then takes the
        pipe of one that asks and reads quickly for full. Raises zmq.Again when it is."""
        try:
            send()
        except zmq.Again:
            self._socket.getsockopt(zmq.EVENTS)  # it learns now
            send()

    def _forget_the_gone(self) -> None:
        """What waited for a session that is over is not for the next one."""
        attached = self._delivery.fencing.attached
        for sender in [one for one in self._backlogs if one not in attached]:
            del self._backlogs[sender]
        for action in [one for one in self._unsent if one.sender not in attached]:
            del self._unsent[action]

    def _flush_all(self) -> None:
        for sender in list(self._backlogs):
            self._flush(sender)

    def _flush(self, sender: bytes) -> bool:
        """Send what waits for a member, in order; False when its pipe takes no more for now."""
        while backlog := self._backlogs.get(sender):
            try:
                self._dispatch(backlog[0])
            except zmq.Again:
                return False
            if backlog:  # a peer found gone takes its backlog along
                backlog.popleft()
        return True

    def _drop(self, sender: bytes) -> None:
        """End its session. What it gives back is offered to others, who may be found gone in their
        turn: not by recursion, for all ranks of a big group may vanish at once."""
        self._backlogs.pop(sender, deque()).clear()
        self._gone.append(sender)
        if self._dropping:
            return
        self._dropping = True
        try:
            while self._gone:
                sender = self._gone.popleft()
                self._perform(self._delivery.disconnected(sender, time.monotonic()))
        finally:
            self._dropping = False

    def _dispatch(self, action: Send | SendChunk) -> None:
        if isinstance(action, SendChunk):
            self._send_chunk(action)
        else:
            self._send(action.sender, [m.encode(action.message)])

    def _store(self, action: Store) -> bool:
        """Whether it is durable now. A log that cannot be written is tried until we close."""
        told = False
        while self._closing is None:
            try:
                self._store_once(action)
                return True
            except OSError as error:
                if not told:
                    logger.error("everything waits: the control log cannot be written (%s)", error)
                told = True
                self._turned_at = time.monotonic()  # it waits, and does not hang
                self._closed.wait(STORE_RETRY_SECONDS)
        return False

    def _store_once(self, action: Store) -> None:
        match action:
            case StoreCommit():
                self._spool.commit(action.number, action.trained, action.term, action.rollback)
                self._figures.committed(time.monotonic())
            case StoreTombstone():
                logger.warning("sample %s ends as %s: %s", action.id, action.state, action.reason)
                self._spool.tombstone(action.id, action.state, action.reason)
            case StoreTerm():
                term = Term(action.term, action.group, action.incarnation, action.members)
                self._spool.grant(term)
                self._figures.granted(takeover=action.takeover)
            case StoreSuspects():
                self._spool.suspect(action.counts)
            case Void():
                logger.warning("sample %s: %s; it is generated again", action.id, action.reason)
                self._spool.void(action.id, action.reason)

    def _send_chunk(self, action: SendChunk) -> None:
        """Unless it ended, or is made again, while it waited here: a later one would look the
        same. Raises zmq.Again."""
        chunk, kept = action.message, self._unsent.pop(action, None)
        if chunk.id not in self._delivery.stock:
            return
        if isinstance(chunk, m.ChunksAt):
            self._send_places(action.sender, chunk)
            return
        try:
            frame = kept or self._spool.read_chunk(chunk.id, chunk.index)
        except KeyError:  # it became terminal while it waited here
            return
        try:
            sent = self._send(action.sender, [m.encode(chunk), frame])
        except zmq.Again:
            self._keep_unsent(action, frame)
            raise
        if sent:
            self._delivery.sent(action.sender, len(frame))
            self._count_chunks(action.sender, chunk, 1)

    def _send_places(self, sender: bytes, chunks: m.ChunksAt) -> None:
        """Raises zmq.Again."""
        sizes = [size for _, size in chunks.places]
        if self._send(sender, [m.encode(chunks)], read_bytes=sum(sizes)):
            self._delivery.sent(sender, max(sizes))
            self._count_chunks(sender, chunks, len(sizes))

    def _place(self, session: Session, id: SampleId, index: int) -> Handed | None:
        """See `distribution.Place`. The file is handed over when the member has not got it."""
        if index == 0:
            for behind in islice(session.granted, 1):
                self._spool.read_ahead(behind)
        if session.name not in self._handover:
            return None
        try:
            found = self._spool.places(id, index, MAX_PLACES)
        except KeyError:  # it is not to be had: who reads it is told so
            return None
        if found is None or not found.frames:
            return None
        number = self._handover.number(session.name, found.path)
        return None if number is None else Handed(number, found.frames)

    def _keep_unsent(self, action: SendChunk, frame: bytes | memoryview) -> None:
        """Where the link is full it is tried again at once, and would be read again each time."""
        self._unsent[action] = frame
        if len(self._unsent) > MAX_UNSENT:
            del self._unsent[next(iter(self._unsent))]

    def _count_chunks(self, sender: bytes, chunk: m.Chunk | m.ChunksAt, count: int) -> None:
        member, stock = self._delivery.fencing.attached.get(sender), self._delivery.stock
        if member is not None and chunk.id in stock:
            first, header = chunk.index, stock[chunk.id]
            self._figures.sent_chunks(member.name, header, first, first + count)

    def _send(self, sender: bytes, frames: list[bytes | memoryview], read_bytes: int = 0) -> bool:
        """False when the peer is gone. Raises zmq.Again when its pipe is full.

        read_bytes: what the member reads itself; it counts as if it were sent."""
        try:
            self._socket.send_multipart([sender, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(sender)
            return False
        size = sum(map(len, frames)) + read_bytes
        self._wire_bytes += size
        if (member := self._delivery.fencing.attached.get(sender)) is not None:
            self._figures.sent(member.name, size)
        return True

    def _look_after_disk(self) -> None:
        self._spool.sync_when_due()
        if time.monotonic() < self._disk_due:
            return
        self._disk_due = time.monotonic() + DISK_SECONDS
        self._judge_interval()
        self._perform(self._delivery.overdue_checkpoint())
        spool, paused = self._spool, bool(self._spool.alarm)
        if paused or spool.fill > CHECKPOINT_FILL:
            kept_bytes = spool.kept_bytes if paused else 0
            self._perform(
                self._delivery.short_of_space(
                    spool.checkpoint_bytes, kept_bytes=kept_bytes, paused=paused
                )
            )

    def _judge_interval(self) -> None:
        """Once for each that a leader states."""
        interval = self._delivery.checkpoint_samples
        if interval == self._judged_samples or not self._spool.statistics().samples:
            return
        self._judged_samples = interval
        if shortage := self._spool.shortage(interval):
            logger.warning("%s", shortage)

    def _ping(self) -> None:
        if time.monotonic() < self._ping_due:
            return
        self._ping_due = time.monotonic() + PING_SECONDS
        for sender in list(self._delivery.fencing.attached):
            if not self._backlogs.get(sender):
                self._perform(self._delivery.ping(sender))
