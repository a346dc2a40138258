"""Who gets which sample: the producer's half of the protocol, without any I/O.

Events go in as method calls, actions come out in order. An action that stores something must be
durable before the next action is carried out.
"""

import heapq
import itertools
import logging
from collections import deque

from draftfeed_producer.session import (
    Action,
    Send,
    SendChunk,
    Session,
    StoreCommit,
    StoreTerm,
    StoreTombstone,
)
from draftfeed_producer.spool import Spool
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.errors import DescriptorMismatch, IncompatibleVersion
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

OFFERED_SAMPLES = 64
"""Offers a member may have open; it grants them as its buffer has room."""
MAX_NACKS = 5
"""A sample refused this often as damaged is quarantined instead of being sent for ever."""


class Delivery:
    """State of every sample between the spool and a trainer's checkpoint."""

    def __init__(
        self,
        descriptor: Descriptor,
        *,
        committed: IdSet,
        commit_number: int,
        term: int,
        stored: list[SampleHeader],
    ) -> None:
        """stored: headers of the spool's samples that are neither committed nor rejected."""
        self._descriptor = descriptor
        self.committed = committed.copy()
        self._commit_number = commit_number
        self._term = term
        self.session: Session | None = None
        self._samples: dict[SampleId, SampleHeader] = {}
        self._counter = itertools.count()
        self._sequence: dict[SampleId, int] = {}
        self._queue: list[tuple[int, SampleId]] = []
        self._nacks: dict[SampleId, int] = {}
        self.generation_done = False
        for header in stored:
            self._enqueue_new(header)

    @classmethod
    def of(cls, spool: Spool, descriptor: Descriptor) -> "Delivery":
        """The state that a spool's contents mean, after a start or a restart."""
        return cls(
            descriptor,
            committed=spool.committed,
            commit_number=spool.commit_number,
            term=spool.term.term if spool.term else 0,
            stored=[record.header for record in spool.deliverable()],
        )

    @property
    def term(self) -> int:
        return self._term

    @property
    def leased(self) -> int:
        session = self.session  # another thread asks; the session may end meanwhile
        return len(session.leased) if session else 0

    @property
    def all_terminal(self) -> bool:
        """Generation is over and every sample is committed or otherwise terminal."""
        return self.generation_done and not self._samples

    @property
    def starved_of_credit(self) -> bool:
        """Samples are there, a member is attached, and it has no room for them."""
        session = self.session
        return session is not None and session.open and bool(session.offered or session.granted)

    # events of the producer

    def stored(self, header: SampleHeader) -> list[Action]:
        """A sample that a member's checkpoint already had when it attached is not offered: the
        engine was at work on it when the member came."""
        if header.id in self.committed:
            return []
        self._enqueue_new(header)
        return self._offers()

    def finish(self) -> list[Action]:
        """No further samples will be stored."""
        self.generation_done = True
        return self._endings()

    def close(self, reason: str) -> list[Action]:
        session = self.session
        if session is None:
            return []
        return [
            Send(session.sender, m.Closing(term=self._term, session=session.name, reason=reason))
        ]

    def short_of_space(self, worth_bytes: float) -> list[Action]:
        """The spool fills up: ask for a checkpoint, once for each commit, and only when one would
        cover so many encoded bytes: a spool at its quota must not mean one after every step."""
        session = self.session
        if session is None or not session.open or session.asked_at == self._commit_number:
            return []
        if sum(self._samples[id].encoded_bytes for id in session.received) < worth_bytes:
            return []
        session.asked_at = self._commit_number
        wanted = m.CheckpointWanted(term=self._term, session=session.name)
        return [Send(session.sender, wanted)]

    # events of the wire

    def received(self, sender: bytes, message: m.FromMember) -> list[Action]:
        """Messages of a session that is over, or never was, are ignored."""
        if isinstance(message, m.Fence):
            return self._fence(sender, message)
        session = self.session
        if session is None or sender != session.sender or not session.owns(message):
            return self._stale(sender, message)
        return self._in_session(session, message)

    def _stale(self, sender: bytes, message: m.InSession) -> list[Action]:
        """Whoever still speaks in a session that is over must hear that it is."""
        logger.info("%s of a session that is over", type(message).__name__)
        if isinstance(message, m.Bye):
            return []
        return [
            Send(sender, m.Refused(code="session", reason="this session is over; attach again"))
        ]

    def disconnected(self, sender: bytes) -> None:
        """The member's leases go back; it may attach again and claim those it still holds."""
        session = self.session
        if session is not None and sender == session.sender:
            logger.warning("member %s of group %s is gone", session.member, session.group)
            self._end_session(session)

    def next_chunk(self) -> list[Action]:
        """The next chunk to send, if credit allows one."""
        session = self.session
        if session is None or not session.open:
            return []
        while session.sending is None and session.granted:
            if begin := self._begin(session, session.granted.popleft()):
                return begin
        if session.sending is None or session.sent_bytes >= session.credit_bytes:
            return []
        return self._send_chunk(session, *session.sending)

    def sent(self, sender: bytes, frame_bytes: int) -> None:
        if self.session is not None and self.session.sender == sender:
            self.session.sent_bytes += frame_bytes

    # handshake

    def _fence(self, sender: bytes, fence: m.Fence) -> list[Action]:
        try:
            m.check_version(fence.version)
            fence.expect.check(self._descriptor)
        except IncompatibleVersion as error:
            return [Send(sender, m.Refused(code="version", reason=str(error)))]
        except DescriptorMismatch as error:
            return [Send(sender, m.Refused(code="mismatch", reason=str(error)))]
        holder = self.session
        if holder is not None and holder.incarnation != fence.incarnation:
            reason = f"member {holder.member!r} of group {holder.group!r} is attached"
            return [Send(sender, m.Refused(code="held", reason=reason))]
        return self._grant(sender, fence)

    def _grant(self, sender: bytes, fence: m.Fence) -> list[Action]:
        if self.session is not None:
            self._end_session(self.session)
        self._term += 1
        self.session = session = Session(sender, fence, self._term)
        granted = m.Granted(
            term=self._term,
            session=session.name,
            descriptor=self._descriptor,
            stream_id=self._descriptor.stream_id(),
            committed=self.committed.to_wire(),
            commit_number=self._commit_number,
        )
        return [StoreTerm(self._term, fence.group, fence.incarnation), Send(sender, granted)]

    def _open(self, session: Session, message: m.Open) -> list[Action]:
        trained = IdSet.from_wire(message.trained)
        forgotten = self.committed - trained
        if forgotten:
            self._end_session(session)
            return [Send(session.sender, _rollback_refusal(self._commit_number, forgotten))]
        actions = self._adopt(trained)
        held = {id for id in message.held if id in self._samples}
        session.leased |= held
        session.received |= held
        self._queue = [(order, id) for order, id in self._queue if id not in held]
        heapq.heapify(self._queue)
        session.open = True
        opened = Send(session.sender, m.Opened(term=self._term, session=session.name))
        return [*actions, opened, *self._offers(), *self._endings()]

    def _adopt(self, trained: IdSet) -> list[Action]:
        """Samples that only the member's checkpoint knows as trained become committed."""
        if trained == self.committed:
            return []
        return self._commit_set(self._commit_number + 1, trained)

    # messages of an established session

    def _in_session(self, session: Session, message: m.FromMember) -> list[Action]:
        match message:
            case m.Open():
                return self._open(session, message)
            case m.Grant():
                return self._granted(session, message.ids)
            case m.Credit():
                session.credit_bytes = max(session.credit_bytes, message.total_bytes)
                return []
            case m.Nack():
                return self._nack(session, message)
            case m.Reject():
                return self._tombstone(message.id, "rejected", message.reason)
            case m.Release():
                self._give_back(session, set(message.ids))
                return self._offers()
            case m.Commit():
                return self._commit(session, message)
            case m.Bye():
                logger.info("member %s of group %s left", session.member, session.group)
                self._end_session(session)
        return []

    def _granted(self, session: Session, ids: list[SampleId]) -> list[Action]:
        for id in ids:
            if id in session.offered:
                session.offered.discard(id)
                session.leased.add(id)
                session.granted.append(id)
        return self._offers()

    def _nack(self, session: Session, message: m.Nack) -> list[Action]:
        id = message.id
        if id not in session.leased:
            return []
        session.end_sent = False
        self._nacks[id] = self._nacks.get(id, 0) + 1
        logger.warning("sample %s arrived damaged (%s)", id, message.reason)
        if self._nacks[id] >= MAX_NACKS:
            return self._tombstone(id, "quarantined", message.reason)
        self._give_back(session, {id})
        return self._offers()

    def _commit(self, session: Session, message: m.Commit) -> list[Action]:
        done = Send(
            session.sender,
            m.Committed(term=self._term, session=session.name, number=message.number),
        )
        trained = IdSet.from_wire(message.trained)
        if trained == self.committed:
            return [done]
        fault = self._commit_fault(session, trained)
        if fault:
            self._end_session(session)
            return [Send(session.sender, m.Refused(code="malformed", reason=fault))]
        stored = self._commit_set(max(message.number, self._commit_number + 1), trained)
        return [*stored, done, *self._endings()]

    def _commit_fault(self, session: Session, trained: IdSet) -> str:
        """A commit adds samples that this member was given, and takes none away."""
        if lost := self.committed - trained:
            return f"commit without {len(lost)} samples that the last one had"
        fresh = trained - self.committed
        # The count first: a few bytes can claim ranges of a billion samples.
        if len(fresh) > len(session.received) or any(id not in session.received for id in fresh):
            return "commit of samples that this member does not hold"
        return ""

    def _commit_set(self, number: int, trained: IdSet) -> list[Action]:
        self.committed = trained.copy()
        self._commit_number = number
        self._forget([id for id in self._samples if id in trained])
        return [StoreCommit(number, trained)]

    def _tombstone(self, id: SampleId, state: str, reason: str) -> list[Action]:
        if id not in self._samples:
            return []
        self._forget([id])
        return [StoreTombstone(id, state, reason), *self._offers(), *self._endings()]

    # sending

    def _begin(self, session: Session, id: SampleId) -> list[Action]:
        header = self._samples.get(id)
        if header is None:
            return []
        session.sending = (id, 0)
        return [Send(session.sender, m.Begin(term=self._term, session=session.name, header=header))]

    def _send_chunk(self, session: Session, id: SampleId, index: int) -> list[Action]:
        header = self._samples.get(id)
        last = header is None or index + 1 == header.chunks
        session.sending = None if last else (id, index + 1)
        if header is None:
            return []
        if last:
            session.received.add(id)
        chunk = m.Chunk(term=self._term, session=session.name, id=id, index=index)
        ending = self._endings() if last else []
        return [SendChunk(session.sender, chunk), *ending]

    def _offers(self) -> list[Action]:
        session = self.session
        if session is None or not session.open:
            return []
        fresh: list[tuple[SampleId, int]] = []
        while self._queue and len(session.offered) < OFFERED_SAMPLES:
            _, id = heapq.heappop(self._queue)
            if id in self._samples:
                session.offered.add(id)
                fresh.append((id, self._samples[id].decoded_bytes))
        if not fresh:
            return []
        session.end_sent = False
        offer = m.Offer(term=self._term, session=session.name, samples=fresh)
        return [Send(session.sender, offer)]

    def _endings(self) -> list[Action]:
        session = self.session
        if session is None or not session.open or not self.generation_done:
            return []
        end = Send(session.sender, m.EndOfSamples(term=self._term, session=session.name))
        if self.all_terminal:
            return [
                end,
                Send(session.sender, m.AllTerminal(term=self._term, session=session.name)),
            ]
        pending = self._queue or session.offered or session.granted or session.sending
        if pending or session.end_sent:
            return []
        session.end_sent = True
        return [end]

    # bookkeeping

    def _end_session(self, session: Session) -> None:
        self._requeue(session.leased | session.offered)
        self.session = None

    def _enqueue_new(self, header: SampleHeader) -> None:
        self._sequence[header.id] = next(self._counter)
        self._samples[header.id] = header
        heapq.heappush(self._queue, (self._sequence[header.id], header.id))

    def _requeue(self, ids: set[SampleId]) -> None:
        for id in ids:
            if id in self._samples:
                heapq.heappush(self._queue, (self._sequence[id], id))

    def _give_back(self, session: Session, ids: set[SampleId]) -> None:
        ids &= session.leased
        session.leased -= ids
        session.received -= ids
        session.granted = deque(id for id in session.granted if id not in ids)
        if session.sending and session.sending[0] in ids:
            session.sending = None
        self._requeue(ids)

    def _forget(self, ids: list[SampleId]) -> None:
        """These are terminal. The queue drops them when they come up."""
        for id in ids:
            self._samples.pop(id, None)
            self._nacks.pop(id, None)
            self._sequence.pop(id, None)
            if self.session is not None:
                self.session.leased.discard(id)
                self.session.received.discard(id)
                self.session.offered.discard(id)


def _rollback_refusal(number: int, forgotten: IdSet) -> m.Refused:
    first = next(iter(forgotten))
    reason = (
        f"this producer has commit {number} of a checkpoint that contains {len(forgotten)} samples "
        f"more than the one loaded (first: {first}); resume from that checkpoint"
    )
    return m.Refused(code="rollback", reason=reason)
