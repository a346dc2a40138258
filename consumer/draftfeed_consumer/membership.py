"""One member of a group and all its producers, without any I/O, clock or thread.

Events go in as method calls, actions come out in order.
"""

import logging
from collections.abc import Iterable, Sequence

from draftfeed_consumer.actions import (
    Acknowledged,
    Action,
    CheckpointWanted,
    Closing,
    Deliver,
    Ended,
    EndWithdrawn,
    Fail,
    Finished,
    Identity,
    Leave,
    Say,
)
from draftfeed_consumer.attachment import Attachment, Options
from draftfeed_consumer.errors import BufferTooSmall, StreamRefused
from draftfeed_consumer.ledger import Ledger, LedgerState
from draftfeed_consumer.peer import Peer
from draftfeed_consumer.reception import REASON_CHARS, Payload, Received, Reply, Room
from draftfeed_proto import messages as m
from draftfeed_proto.errors import ProtoError, UnknownCodec
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.workers import INLINE, Workers

logger = logging.getLogger(__name__)


class Membership(Attachment):
    """Attaches to every producer in one term, takes samples of all of them through one queue, and
    tells all of them what is durable.

    No sample is asked for before every producer that must be there has granted the term: until
    then another process may be training from one of them.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Identity,
        room: Room,
        ledger: Ledger,
        options: Options = Options(),  # noqa: B008 - frozen
        workers: Workers = INLINE,
    ) -> None:
        """workers: decode what arrives; not owned."""
        super().__init__(addresses, identity, room, ledger, options, workers)
        self.draining = False
        self._checkpoint_samples = 0
        self._loaded = False
        self._ended = False
        self._commit: LedgerState | None = None
        self._acknowledged = 0
        self._at_work: list[SampleId] = []
        self._verdicts: dict[SampleId, tuple[str, str]] = {}
        """(state, reason). Said again in every session: there is no answer to them."""

    def received(
        self, address: str, message: m.FromProducer, frames: Payload | None = None
    ) -> list[Action]:
        peer = self._peers[address]
        match message:
            case m.Refused():
                return self._refused(peer, message)
            case m.Granted() if peer.state == "fenced" and message.term == self.term:
                return [*self._granted(peer, message), *self._opens()]
            case m.InSession() if peer.owns(message):
                try:
                    return self._in_session(peer, message, frames)
                except UnknownCodec as error:  # asked for again, it would come the same way
                    words = f"{error}; upgrade draftfeed here"
                    return [Fail(StreamRefused(peer.address, "codec", words))]
                except ProtoError as error:
                    return [self._drop(peer, str(error))]
        return []

    def open(self, checkpoint_samples: int = 0) -> list[Action]:
        """The checkpoint is loaded, or there is none: samples may come.

        checkpoint_samples: of the whole group between two checkpoints; 0 = not known.
        """
        self._loaded = True
        self._checkpoint_samples = checkpoint_samples
        loaded_term, _ = self._ledger.began
        if not self._begun and loaded_term >= self.term:
            # The producers have forgotten a term that the checkpoint remembers.
            return self._raise_to(loaded_term + 1)
        return self._opens()

    def _opens(self) -> list[Action]:
        if not (self._loaded and self._complete):
            return []
        ready = [peer for peer in self._peers.values() if peer.state == "granted"]
        opened = [action for peer in ready for action in self._open_at(peer)]
        return [*opened, *self._end()] if ready else []

    def _open_at(self, peer: Peer) -> list[Action]:
        reception = peer.session
        opening = self._ledger.opening(reception.granted.shards)
        peer.granted_bytes = max(peer.granted_bytes, min(p.granted_bytes for p in self._peers_fed))
        peer.state = "open"
        message = m.Open(
            term=reception.term,
            session=reception.session,
            trained=opening.trained,
            held=opening.held,
            ledger_term=opening.term,
            ledger_number=opening.number,
            rollback="" if peer.opened else self._options.attach.rollback,
            checkpoint_samples=self._checkpoint_samples,
        )
        credit = [Say(peer.address, reply.message) for reply in reception.renew_credit()]
        verdicts = [say for id in self._verdicts for say in self._say_verdict(peer, id)]
        rest = [*verdicts, *self._say_commit(peer), *self._say_at_work(peer)]
        return [Say(peer.address, message), *credit, *rest]

    @property
    def _peers_fed(self) -> list[Peer]:
        """A producer that comes late starts level with these, or it would have the queue for
        itself until it has caught up."""
        return self._open or list(self._peers.values())

    # open

    def _in_session(self, peer: Peer, message: m.InSession, frames: Payload | None) -> list[Action]:
        match message:
            case m.Opened():
                peer.opened = True
            case m.Committed():
                peer.acknowledged = max(peer.acknowledged, message.number)
                return self._acknowledge()
            case m.CheckpointWanted():
                return [CheckpointWanted()]
            case m.AllTerminal():
                return self._all_terminal(peer, message)
            case m.Closing():
                peer.lose()
                return [Closing(peer.address, message.reason)]
            case m.Offer() | m.Begin() | m.Chunk() | m.ChunksAt() | m.EndOfSamples():
                return self._delivered(peer, message, frames)
        return []

    def _delivered(
        self,
        peer: Peer,
        message: m.Offer | m.Begin | m.Chunk | m.ChunksAt | m.EndOfSamples,
        frames: Payload | None,
    ) -> list[Action]:
        withdrawn: list[Action] = []
        if isinstance(message, m.Offer):
            withdrawn = [EndWithdrawn()] if self._ended and not self.draining else []
            self._ended = False
            if self.draining:
                return []
        answers = peer.session.received(message, frames)
        samples = [answer.sample for answer in answers if isinstance(answer, Received)]
        peer.logical_bytes += sum(sample.hidden_states.nbytes for sample in samples)
        actions: list[Action] = [
            Say(peer.address, a.message) if isinstance(a, Reply) else Deliver(a.sample)
            for a in answers
        ]
        return [*withdrawn, *actions, *self.grant(), *self._end()]

    def grant(self) -> list[Action]:
        """Ask for samples while there is room, of the producer that gave least so far."""
        granted: dict[str, list[SampleId]] = {}
        try:
            while (peer := self._next_offer()) is not None:
                size_bytes = peer.session.offers[0][1]
                if not self._room.reserve(size_bytes):
                    break
                granted.setdefault(peer.address, []).append(peer.session.grant())
                peer.granted_bytes += size_bytes
        except BufferTooSmall as error:
            return [Fail(error)]
        return [
            Say(address, self._peers[address].say(m.Grant, ids=ids))
            for address, ids in granted.items()
        ]

    def _next_offer(self) -> Peer | None:
        if self.draining:
            return None
        offering = [peer for peer in self._open if peer.session.offers]
        return min(offering, key=lambda peer: peer.granted_bytes, default=None)

    def _end(self) -> list[Action]:
        if self._ended or not all(peer.ended for peer in self._needed):
            return []
        self._ended = True
        return [Ended()]

    def _all_terminal(self, peer: Peer, message: m.InSession) -> list[Action]:
        bye = Say(peer.address, peer.say(m.Bye))
        peer.lose()
        peer.state = "done"
        over: list[Action] = [bye, Leave(peer.address), *self._acknowledge(), *self._end()]
        if all(other.state == "done" for other in self._needed):
            over.append(Finished())
        return over

    # what the trainer did

    def commit(self, state: LedgerState) -> list[Action]:
        """A durable checkpoint contains this. Said until every producer has acknowledged it."""
        self._commit = state
        if not self._identity.leader:
            return []
        said = [action for peer in self._open for action in self._say_commit(peer)]
        return [*said, *self._acknowledge()]

    def _say_commit(self, peer: Peer) -> list[Action]:
        state = self._commit
        if state is None or not self._identity.leader or peer.commit_said >= state.number:
            return []
        peer.commit_said = state.number
        part = IdSet.from_wire(state.trained).within(peer.session.granted.shards)
        return [Say(peer.address, peer.say(m.Commit, number=state.number, trained=part.to_wire()))]

    def _acknowledge(self) -> list[Action]:
        if self._commit is None:
            return []
        number = self._commit.number
        missing = [p for p in self._needed if p.state != "done" and p.acknowledged < number]
        if missing or self._acknowledged >= number:
            return []
        self._acknowledged = number
        return [Acknowledged(number)]

    def at_work(self, ids: Iterable[SampleId]) -> list[Action]:
        """What the trainer has taken and not yet trained."""
        self._at_work = sorted(ids)
        return [action for peer in self._open for action in self._say_at_work(peer)]

    def _say_at_work(self, peer: Peer) -> list[Action]:
        mine = [id for id in self._at_work if peer.owner_of(id)]
        if mine == peer.at_work_said:
            return []
        peer.at_work_said = mine
        return [Say(peer.address, peer.say(m.AtWork, ids=mine))]

    def reject(self, id: SampleId, reason: str, state: str = "rejected") -> list[Action]:
        """It will not be trained. state: or "tail", when it did not fill an optimizer step."""
        self._ledger.refuse(id)
        self._verdicts[id] = (state, reason[:REASON_CHARS])
        return [action for peer in self._open for action in self._say_verdict(peer, id)]

    def _say_verdict(self, peer: Peer, id: SampleId) -> list[Action]:
        if not peer.owner_of(id):
            return []
        state, reason = self._verdicts[id]
        return [Say(peer.address, peer.say(m.Reject, id=id, reason=reason, state=state))]

    def release(self, ids: Iterable[SampleId]) -> list[Action]:
        """Give back what the trainer has not seen."""
        ids = list(ids)
        for id in ids:
            self._ledger.drop(id)
        shares = [(peer, [id for id in ids if peer.owner_of(id)]) for peer in self._open]
        return [Say(peer.address, peer.say(m.Release, ids=mine)) for peer, mine in shares if mine]

    def drain(self, unseen: Iterable[SampleId] = ()) -> list[Action]:
        """Ask for no more; give back `unseen` and what is on its way. Commits are still said."""
        self.draining = True
        due = [id for peer in self._open for id in peer.session.give_up()]
        return self.release([*unseen, *due])

    def leave(self, failed: bool = False) -> list[Say]:
        """Say goodbye to everybody. failed: the trainer did, and what it was at work on may be
        why."""
        here = [peer for peer in self._peers.values() if peer.state in ("granted", "open")]
        goodbyes = [Say(peer.address, peer.say(m.Bye, failed=failed)) for peer in here]
        for peer in here:
            peer.lose()
        return goodbyes
