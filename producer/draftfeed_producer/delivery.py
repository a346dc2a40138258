"""Who gets which sample: the producer's half of the protocol, without any I/O.

Events go in as method calls, actions come out in order. An action that stores something must be
durable before the next action is carried out. Times are monotonic seconds.
"""

import logging
from collections.abc import Callable
from typing import Any
from zlib import crc32

from draftfeed_producer import answers
from draftfeed_producer.authority import Authority
from draftfeed_producer.distribution import Distribution, Place, Wait, nowhere
from draftfeed_producer.fencing import Fencing
from draftfeed_producer.session import (
    Action,
    Member,
    Regenerate,
    Send,
    Session,
    StoreSuspects,
    StoreTerm,
    StoreTombstone,
    Verify,
    Void,
    random_name,
)
from draftfeed_producer.spool import Spool
from draftfeed_producer.spool.control import Term
from draftfeed_producer.stock import Stock
from draftfeed_producer.stored import Stored
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.errors import DescriptorMismatch, IncompatibleVersion, MalformedMessage
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

MAX_NACKS = 5
"""A sample refused this often as damaged is quarantined instead of being sent for ever."""
TERMINAL_STATES = ("rejected", "quarantined", "tail")
QUARANTINED_BEFORE = "it was quarantined in another epoch"
"""It would do again what it did."""


class Delivery:
    """State of every sample between the spool and a trainer's checkpoint."""

    def __init__(
        self,
        descriptor: Descriptor,
        shards: Shards,
        prompts: IdSet,
        stored: Stored,
        *,
        max_sample_bytes: int = 0,
        session_timeout_seconds: float = 10.0,
        quarantine_after_terms: int = 3,
        local: str = "",
        now: float = 0.0,
        make_name: Callable[[], str] = random_name,
    ) -> None:
        """prompts: those of the shards; max_sample_bytes: decoded, 0 = not known; local: name of
        the socket for members of this host."""
        self.descriptor, self.shards, self.prompts = descriptor, shards, prompts
        self.tombstones = dict(stored.tombstones)
        key = (stored.commit_term, stored.commit_number)
        self.authority = Authority(stored.committed, key, stored.header_of, self.tombstones)
        self.fencing = Fencing(stored.term, session_timeout_seconds, now)
        self.stock = Stock()
        self._out = Distribution(self.stock, self.fencing, crc32(repr(shards.ranges).encode()))
        self.regenerated = stored.regenerated.copy()
        self.replayable = stored.replayable
        self.skipped = IdSet()
        self.ledger_known = False
        """A leader has said what is trained."""
        self.checkpoint_samples = 0
        """Between two checkpoints, as the leader says; 0 = not known."""
        self._local = local
        self._max_sample_bytes = max_sample_bytes
        self._suspects = dict(stored.suspects)
        self._quarantine_after_terms = quarantine_after_terms
        self._make_name = make_name
        self._nacks: dict[SampleId, int] = {}
        for header in stored.samples:
            self.stock.add(header)

    @classmethod
    def of(cls, spool: Spool, descriptor: Descriptor, prompts: IdSet, **options: Any) -> "Delivery":
        """The state that a spool's contents mean. options: the constructor's."""
        return cls(descriptor, spool.shards, prompts, Stored.of(spool), **options)

    @property
    def committed(self) -> IdSet:
        return self.authority.committed

    @property
    def all_terminal(self) -> bool:
        return self._out.all_terminal

    @property
    def waits_for(self) -> Wait | None:
        return self._out.waits_for

    # events of the producer

    def stored(self, header: SampleHeader) -> list[Action]:
        """A sample that the group's checkpoint already had when it attached is not offered: the
        engine was at work on it when the group came. One whose line is quarantined ends."""
        id = header.id
        self._out.regenerating.discard(id)
        if id in self.committed or id in self.tombstones:
            return self._out.endings()
        leased = id in self.fencing.leased
        if not leased and any(self.tombstones.get(one) == "quarantined" for one in self._twins(id)):
            return self._end(id, "quarantined", QUARANTINED_BEFORE)
        self.stock.add(header)
        if leased:
            self.stock.claim([id])  # it was lost here, and a member still has it
        return self._out.offers()

    def finish(self) -> list[Action]:
        """No further samples will be stored, but those to be generated again."""
        self._out.generation_done = True
        return self._out.endings()

    def skip(self, ids: IdSet) -> list[Action]:
        """Lines of the prompt file that turned out to be no prompts."""
        self.prompts = self.prompts - ids
        self.skipped.update(ids)
        self._out.regenerating -= {id for id in self._out.regenerating if id in ids}
        return self._out.endings()

    def remake(self, id: SampleId) -> list[Action]:
        """What existed of it cannot be read."""
        self._out.regenerating.add(id)
        return [Regenerate([id])]

    def quarantine(self, id: SampleId, reason: str) -> list[Action]:
        """The engine cannot make it. A member may hold one that was lost here, and train it."""
        if id in self.stock or not self._unfinished(id):
            return []
        if id in self.fencing.leased:
            self._out.held_alone[id] = reason
            self._out.regenerating.discard(id)
            return self._out.endings()
        return self._end(id, "quarantined", reason)

    def settled(self, ids: IdSet) -> list[Action]:
        """These were in a spool that is gone, no checkpoint has them: they are made again."""
        self.regenerated.update(ids)
        return []

    def verified(self, id: SampleId, whole: bool) -> list[Action]:
        """The answer to `Verify`. A sample that is damaged where it lies is generated again."""
        if id not in self.stock:
            return self._out.endings()
        if whole:
            self.stock.give_back([id])
            return self._out.offers()
        self._out.forget({id})
        self._nacks.pop(id, None)
        self._out.regenerating.add(id)
        self.regenerated.add(id)
        reason = "the record is damaged on disk"
        return [Void(id, reason), Regenerate([id]), *self._out.offers()]

    def ping(self, sender: bytes) -> list[Action]:
        """A ROUTER learns that a peer is gone when it sends to it."""
        member = self.fencing.attached.get(sender)
        return [self._out.send(member.session, m.Ping)] if member and member.session else []

    def close(self, reason: str) -> list[Action]:
        sessions = [member.session for member in self.fencing.attached.values()]
        return [self._out.send(s, m.Closing, reason=reason) for s in sessions if s is not None]

    def short_of_space(
        self, worth_bytes: float, *, kept_bytes: int = 0, paused: bool = False
    ) -> list[Action]:
        """Ask for a checkpoint when one is worth it: see `Distribution.checkpoint_requests`."""
        asked = self._out.checkpoint_requests(
            self.authority.key, worth_bytes, kept_bytes=kept_bytes, paused=paused
        )
        return list(asked)

    def overdue_checkpoint(self) -> list[Action]:
        """See `Distribution.overdue_checkpoint`."""
        return list(self._out.overdue_checkpoint(self.authority.key))

    # events of the wire

    def received(self, sender: bytes, message: m.FromMember, now: float) -> list[Action]:
        """Raises MalformedMessage. Messages of a session that is over, or never was, change
        nothing."""
        match message:
            case m.Fence():
                return self._fence(sender, message, now)
            case m.Inquire():
                return [Send(sender, answers.account(self))]
            case m.ListAssets() | m.FetchAsset():
                return []  # of the target, not of its samples: the server answers
        owned = self.fencing.owned(sender, message)
        if owned is None and (gone := self.fencing.late_bye(sender, message)):
            return [*self._left(*gone), *self._end_given_back()]
        if owned is None:
            return answers.stale(sender, message, self.fencing.number)
        return [*self._in_session(*owned, message, now), *self._end_given_back()]

    def disconnected(self, sender: bytes, now: float) -> list[Action]:
        """The member may attach again and claim what it still has."""
        member = self.fencing.attached.get(sender)
        if member is None:
            return []
        logger.warning("member %s is gone", member.name)
        self._out.end_session(member, now)
        return self._out.offers()

    def next_chunk(self, sender: bytes, place: Place = nowhere) -> list[Action]:
        return self._out.next_chunk(sender, place)

    def sent(self, sender: bytes, credit_bytes: int) -> None:
        self._out.sent(sender, credit_bytes)

    # handshake

    def _fence(self, sender: bytes, fence: m.Fence, now: float) -> list[Action]:
        try:
            m.check_version(fence.version)
            fence.expect.check(self.descriptor)
        except IncompatibleVersion as error:
            return [Send(sender, m.Refused(code="version", reason=str(error)))]
        except DescriptorMismatch as error:
            return [Send(sender, m.Refused(code="mismatch", reason=str(error)))]
        refusal = self.fencing.refusal(fence, now)
        if refusal is not None:
            return [Send(sender, refusal)]
        begun = self._begin(fence, now) if fence.term > self.fencing.number else []
        return [*begun, *self._attach(sender, fence, now)]

    def _begin(self, fence: m.Fence, now: float) -> list[Action]:
        """A new term: nothing of the one before counts any more, and its members must hear it."""
        before, suspects = self.fencing.term, self.fencing.suspects(self._suspects)
        over, leased = list(self.fencing.attached), self.fencing.leased
        for member in list(self.fencing.attached.values()):
            self._out.end_session(member, now)
        term = Term(fence.term, fence.group, fence.incarnation, fence.members)
        self.fencing.begin(term, now)
        self.stock.give_back(sorted(leased))
        code = "session" if before and before.incarnation == term.incarnation else "fenced"
        reason = f"term {term.term} was granted to another process of group {term.group!r}"
        refused = m.Refused(code=code, reason=reason, term=term.term)
        stored = StoreTerm(
            term.term, term.group, term.incarnation, term.members, fence.takeover and bool(over)
        )
        ended = [*self._suspect(suspects), *self._end_given_back()]
        return [stored, *ended, *(Send(sender, refused) for sender in over)]

    def _suspect(self, counts: dict[SampleId, int]) -> list[Action]:
        """A sample that is at work whenever a trainer dies is probably what kills it."""
        if counts == self._suspects:
            return []
        self._suspects = counts
        ended: list[Action] = [StoreSuspects(dict(counts))]
        for id in [id for id, n in counts.items() if n >= self._quarantine_after_terms]:
            reason = f"the trainer died {counts[id]} times in a row while it was at work on it"
            ended += self._tombstone(id, "quarantined", reason)
        return ended

    def _attach(self, sender: bytes, fence: m.Fence, now: float) -> list[Action]:
        for known in (self.fencing.members.get(fence.member), self.fencing.attached.get(sender)):
            if known is not None and known.session is not None:
                self._out.end_session(known, now)
        session = Session(sender, self._make_name())
        self.fencing.attach(fence, session)
        logger.info("member %s of group %s, term %d", fence.member, fence.group, fence.term)
        granted = self._out.send(
            session,
            m.Granted,
            descriptor=self.descriptor,
            stream_id=self.descriptor.stream_id(),
            shards=self.shards,
            max_sample_bytes=self._max_sample_bytes,
            local=self._local,
            committed=self.committed.to_wire(),
            commit_term=self.authority.key[0],
            commit_number=self.authority.key[1],
        )
        return [granted]

    def _open(self, member: Member, session: Session, message: m.Open, now: float) -> list[Action]:
        if session.open:
            raise MalformedMessage("this session is open already")
        trained = IdSet.from_wire(message.trained).within(self.shards)
        actions: list[Action] = []
        if member.leader:
            known = (self.prompts, self.skipped)
            refusal = self.authority.refusal(message, trained, known)
            if refusal is not None:
                self._out.end_session(member, now)
                member.left = True  # nobody waits for it
                return [Send(session.sender, refusal)]
            actions = self._follow(message, trained)
            self.ledger_known = True
            self.checkpoint_samples = message.checkpoint_samples
        self._out.claim(member, {id for id in message.held if self._unfinished(id)})
        self._out.open(member, session)
        actions.append(self._out.send(session, m.Opened))
        return [*actions, *self._out.offers()]

    def _follow(self, opening: m.Open, trained: IdSet) -> list[Action]:
        """The leader's checkpoint becomes the last commit."""
        forgotten = self.committed - trained
        stored = self.authority.follow(opening, trained)
        if stored is None:
            return []
        self._out.forget_trained(self.committed)
        if not forgotten:
            return [stored]
        there, gone = self.authority.lost(forgotten)
        for header in there:
            self.stock.add(header)
        self._out.regenerating.update(gone)
        self.regenerated.update(gone)
        return [stored, *([Regenerate(gone)] if gone else [])]

    def _unfinished(self, id: SampleId) -> bool:
        terminal = id in self.committed or id in self.tombstones
        return id in self.prompts and not terminal

    # messages of an established session

    def _in_session(
        self, member: Member, session: Session, message: m.InSession, now: float
    ) -> list[Action]:
        match message:
            case m.Open():
                return self._open(member, session, message, now)
            case m.Grant():
                return self._granted(member, session, message.ids)
            case m.Credit():
                session.credit_bytes = max(session.credit_bytes, message.total_bytes)
            case m.Nack():
                return self._nack(member, session, message)
            case m.Reject() if message.id in member.leased and message.state in TERMINAL_STATES:
                return self._tombstone(message.id, message.state, message.reason)
            case m.AtWork():
                member.at_work = member.received & set(message.ids)
                member.taken |= member.at_work
            case m.Release():
                back = member.leased & set(message.ids)
                member.drop(back)
                self.stock.give_back(sorted(back))
                return self._out.offers()
            case m.Commit():
                return self._commit(member, session, message, now)
            case m.Bye():
                self._out.end_session(member, now)
                return self._left(member, message)
        return []

    def _granted(self, member: Member, session: Session, ids: list[SampleId]) -> list[Action]:
        for id in ids:
            if id in session.offered:
                session.offered.discard(id)
                member.leased.add(id)
                session.granted.append(id)
        return self._out.offers()

    def _nack(self, member: Member, session: Session, message: m.Nack) -> list[Action]:
        id = message.id
        session.refused += 1
        session.end_sent = False  # one that did not know of this is none
        if id not in member.leased:
            return self._out.endings()
        logger.warning("sample %s is refused (%s)", id, message.reason)
        if id in session.placed:  # the fault may be the member's own: its bytes are yet to be sent
            session.refused_places.add(id)
        else:
            self._nacks[id] = self._nacks.get(id, 0) + 1
        member.drop({id})
        if self._nacks.get(id, 0) >= MAX_NACKS:
            ended = self._tombstone(id, "quarantined", message.reason)
            return ended or self._out.endings()
        return [Verify(id)]

    def _left(self, member: Member, bye: m.Bye) -> list[Action]:
        """It has left for good. When all have, what they held was not trained, or will never be
        in a checkpoint."""
        logger.info("member %s left%s", member.name, ": its trainer failed" if bye.failed else "")
        member.left = True
        if bye.failed:
            member.suspects = set(member.at_work)
        if all(one.left for one in self.fencing.members.values()):
            leased = self.fencing.leased
            for one in self.fencing.members.values():
                one.drop(leased)
            self.stock.give_back(sorted(leased))
        return self._out.offers()

    def _commit(
        self, member: Member, session: Session, message: m.Commit, now: float
    ) -> list[Action]:
        done = self._out.send(session, m.Committed, number=message.number)
        trained = IdSet.from_wire(message.trained).within(self.shards)
        key = (message.term, message.number)
        if self.authority.said_again(key, trained):
            return [done]
        if not (member.leader and session.open):
            fault = f"a commit of member {member.name!r}, which is not an open leader"
        else:
            fault = self._commit_fault(key, trained)
        if fault:
            self._out.end_session(member, now)
            return [Send(session.sender, m.Refused(code="malformed", reason=fault))]
        stored = self.authority.advance(key, trained)
        self._out.forget_trained(self.committed)
        self._nacks = {id: count for id, count in self._nacks.items() if id in self.stock}
        return [stored, done, *self._out.endings()]

    def _commit_fault(self, key: tuple[int, int], trained: IdSet) -> str:
        """A rank that has not attached again after a restart may have trained what is here and
        not finished; who knows that is its leader alone."""
        received = self.fencing.received
        if not self.fencing.resumed or self.fencing.complete:
            return self.authority.fault(key, trained, received)
        if trained - self.committed - self.prompts:  # before each is looked for: there may be a lot
            return "commit of samples that are no lines of the prompt file"

        def here(id: SampleId) -> bool:
            return self._unfinished(id) and (id in self.stock or self.authority.exists(id))

        return self.authority.fault(key, trained, received, here)

    def _tombstone(self, id: SampleId, state: str, reason: str) -> list[Action]:
        there = id in self.stock or id in self.fencing.leased
        return self._end(id, state, reason) if there else []

    def _end(self, id: SampleId, state: str, reason: str) -> list[Action]:
        """What is quarantined ends in every epoch in which it is here and nobody has it. A member
        that has an offer reserves room for it, and waits for what it asks for."""
        ended = [id]
        if state == "quarantined":
            taken = self.fencing.leased | self.fencing.offered
            ended += [one for one in self._twins(id) if one in self.stock and one not in taken]
        self.tombstones.update(dict.fromkeys(ended, state))
        self._out.forget(set(ended))
        return [*(StoreTombstone(one, state, reason) for one in ended), *self._out.offers()]

    def _end_given_back(self) -> list[Action]:
        """What only a member had, and has no more."""
        alone = self._out.held_alone
        given_back = {id: alone.pop(id) for id in [*alone] if id not in self.fencing.leased}
        return [action for one in given_back.items() for action in self.quarantine(*one)]

    def _twins(self, id: SampleId) -> list[SampleId]:
        """The same line in the other epochs."""
        epochs = self.shards.each_epoch
        return [id.in_epoch(epoch) for epoch in epochs if epoch != id.epoch]
