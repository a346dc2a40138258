"""Handing samples out: offers, chunks as credit allows, and the end. No I/O."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from draftfeed_producer.fencing import Fencing
from draftfeed_producer.session import Action, Member, Send, SendChunk, Session
from draftfeed_producer.stock import Stock
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId

OFFERED_SAMPLES = 64
"""Offers the members of a group may have open together, a few each at least."""
LEAST_OFFERED_SAMPLES = 4

MAX_UNCOMMITTED_SAMPLES = 1 << 15
"""Trained, and in no checkpoint: a crash loses them, their headers are kept here, and a member
that attaches again names each. Its message would have room for about four times as many."""


class Handed(NamedTuple):
    """Where chunks of a sample lie, for a member that reads them itself."""

    file: int
    """Its number in the member's session."""
    places: tuple[tuple[int, int], ...]
    """(offset, bytes) of some chunks that follow each other."""


Place = Callable[[Session, SampleId, int], Handed | None]
"""Where a chunk of this index lies, and those behind it; None: it is to be sent."""


def nowhere(session: Session, id: SampleId, index: int) -> None:
    """For members of other hosts."""


Wait = Literal["no_credit", "link_full"]
"""What samples wait for. no_credit: members have no room and ask for none. link_full: they have
asked, and all that they may be sent is under way; who does not read looks the same from here."""


class Distribution:
    """What is in stock, to the members of the term."""

    def __init__(self, stock: Stock, fencing: Fencing, turn: int) -> None:
        """turn: which member is the first among equals, at each of many producers another one: the
        first sample of every one of them would go to the same rank."""
        self.stock, self.fencing = stock, fencing
        self._turn = turn
        self.regenerating: set[SampleId] = set()
        self.held_alone: dict[SampleId, str] = {}
        """By a member, and were lost here; why they cannot be made again."""
        self.generation_done = False

    @property
    def all_terminal(self) -> bool:
        """Generation is over and every sample is committed or otherwise terminal."""
        waiting = len(self.stock) or self.regenerating or self.held_alone
        return self.generation_done and not waiting

    @property
    def idle(self) -> bool:
        """There is nothing that a member could get now."""
        pending = any(member.pending for member in self.fencing.members.values())
        return not self.stock.waiting and not pending

    @property
    def waits_for(self) -> Wait | None:
        """Why what is here goes no further; None when nothing is, or nobody is there. Asked when
        all was sent that could be: a member renews the credit with whatever it receives, so that
        it runs out where the link is full, and offers stay open where the trainer is."""
        live = self.fencing.live
        if any(session.granted or session.sending for session in live):
            return "link_full"
        return "no_credit" if any(session.offered for session in live) else None

    def next_chunk(self, sender: bytes, place: Place = nowhere) -> list[Action]:
        """The next chunk to send to a member, if credit allows one; or where the next ones lie."""
        member = self.fencing.attached.get(sender)
        session = member.live if member else None
        if member is None or session is None:
            return []
        if session.sending is None and session.granted:
            id = session.granted.popleft()
            session.given += 1
            session.sending = (id, 0)
            return [self.send(session, m.Begin, header=self.stock[id])]
        if session.sending is None or session.sent_bytes >= session.credit_bytes:
            return []
        id, index = session.sending
        refused = id in session.refused_places
        handed = None if refused else place(session, id, index)
        chunk = self._chunk(session, id, index, handed)
        behind = index + (1 if isinstance(chunk, m.Chunk) else len(chunk.places))
        last = behind == self.stock[id].chunks
        session.sending = None if last else (id, behind)
        if last:
            member.received.add(id)
        return [SendChunk(sender, chunk), *(self.endings() if last else [])]

    def _chunk(
        self, session: Session, id: SampleId, index: int, handed: Handed | None
    ) -> m.Chunk | m.ChunksAt:
        term, name = self.fencing.number, session.name
        if handed is None:
            return m.Chunk(term=term, session=name, id=id, index=index)
        session.placed.add(id)
        places = handed.places[: self.stock[id].chunks - index]
        return m.ChunksAt(
            term=term, session=name, id=id, index=index, file=handed.file, places=places
        )

    def sent(self, sender: bytes, credit_bytes: int) -> None:
        """credit_bytes: what it takes of the member's credit."""
        member = self.fencing.attached.get(sender)
        if member is not None and member.session is not None:
            member.session.sent_bytes += credit_bytes

    def offers(self) -> list[Action]:
        """New offers to whoever has few; and the end, when there is nothing to offer."""
        live = self.fencing.live if self.fencing.complete else []
        fresh = self._deal(live)
        if fresh:
            for session in live:
                session.end_sent = False
        offers = [self.send(session, m.Offer, samples=samples) for session, samples in fresh]
        return [*offers, *self.endings()]

    def _deal(self, live: list[Session]) -> list[tuple[Session, list[tuple[SampleId, int]]]]:
        """One by one, to whoever has fewest on the way: the ranks of a run step together, and one
        that has nothing takes part for nothing."""
        members = self.fencing.term.members if self.fencing.term else 1
        share = max(LEAST_OFFERED_SAMPLES, OFFERED_SAMPLES // members)
        first = self._turn % max(len(live), 1)
        live = [*live[first:], *live[:first]]
        dealt: dict[Session, list[tuple[SampleId, int]]] = {}
        while hungry := [session for session in live if len(session.offered) < share]:
            header = self.stock.take()
            if header is None:
                break
            session = min(hungry, key=lambda one: (len(one.offered) + len(one.granted), one.given))
            session.offered.add(header.id)
            dealt.setdefault(session, []).append((header.id, header.decoded_bytes))
        return list(dealt.items())

    def endings(self) -> list[Action]:
        """Nothing is left that a member could still get in this term."""
        # When all is terminal nobody can hold anything: a rank that was told before a restart of
        # ours does not come again, and the others must not wait for it.
        known = self.fencing.complete or (self.fencing.resumed and self.all_terminal)
        if not self.generation_done or not known or self.regenerating:
            return []
        if not self.idle:
            return []
        ended: list[Action] = []
        for session in self.fencing.live:
            if not session.end_sent:
                session.end_sent = True
                ended.append(self.send(session, m.EndOfSamples, refused=session.refused))
            if self.all_terminal and not session.all_terminal_sent:
                session.all_terminal_sent = True
                ended.append(self.send(session, m.AllTerminal))
        return ended

    # space

    def checkpoint_requests(
        self, last_commit: tuple[int, int], worth_bytes: float, *, kept_bytes: int, paused: bool
    ) -> Iterator[Action]:
        """The spool fills up: once for each commit, and only when a checkpoint would cover or
        delete `worth_bytes` (encoded). Where the trainer is slower than generation the spool is
        always at its quota, and that must not mean a checkpoint after every step. A trainer that
        can get nothing more is not waited for.

        kept_bytes: of samples that the last checkpoint has, and one more would delete. paused:
        generation is.
        """
        fresh = self._not_asked_since(last_commit)
        if not fresh:
            return
        stuck = paused and self.idle
        gain_bytes = max(kept_bytes, self._covered_bytes(at_most=stuck))
        if gain_bytes < (1 if stuck else worth_bytes):
            return
        yield from self._ask(fresh, last_commit)

    def overdue_checkpoint(self, last_commit: tuple[int, int]) -> Iterator[Action]:
        """Asks for it, once for each commit, when many samples were trained since, whether or not
        the spool fills up: that of a replay holds nothing."""
        members = list(self.fencing.members.values())
        trained = sum(len(member.taken) - len(member.at_work) for member in members)
        if trained >= MAX_UNCOMMITTED_SAMPLES:
            yield from self._ask(self._not_asked_since(last_commit), last_commit)

    def _not_asked_since(self, last_commit: tuple[int, int]) -> list[Session]:
        return [session for session in self.fencing.live if session.asked_at != last_commit]

    def _ask(self, sessions: list[Session], last_commit: tuple[int, int]) -> Iterator[Action]:
        for session in sessions:
            session.asked_at = last_commit
            yield self.send(session, m.CheckpointWanted)

    def _covered_bytes(self, *, at_most: bool) -> int:
        """Encoded, of samples that a checkpoint made now would cover. `at_most`: with those that a
        step may have used before we heard that they were at work."""
        trained = (self.fencing.received if at_most else self.fencing.taken) - self.fencing.at_work
        # Without those that the group still has of a spool that was lost.
        return sum(self.stock[id].encoded_bytes for id in trained if id in self.stock)

    # bookkeeping

    def open(self, member: Member, session: Session) -> None:
        """From now on it gets its share. It starts level with those that got least, or one that
        was away would have the queue for itself until it has caught up."""
        session.given = min((other.given for other in self.fencing.live), default=0)
        session.open = member.opened = True

    def claim(self, member: Member, held: set[SampleId]) -> None:
        """What a member still has stays with it, also when we have lost it and will generate it
        again; everything else it was given goes back."""
        taken = self.fencing.leased | self.fencing.offered
        held = (held - taken) | (held & member.leased)
        self.stock.give_back(sorted(member.leased - held))
        self.stock.claim(held)
        member.leased, member.received = set(held), set(held)
        member.at_work &= held

    def send(self, session: Session, kind: type[m.InSession], **fields: Any) -> Send:
        message = kind(term=self.fencing.number, session=session.name, **fields)
        return Send(session.sender, message)

    def end_session(self, member: Member, now: float) -> None:
        """What was only offered goes back; what was granted stays leased."""
        session = self.fencing.detach(member, now)
        self.stock.give_back(sorted(session.offered))

    def forget_trained(self, trained: IdSet) -> None:
        self.forget({id for id in {*self.stock, *self.fencing.leased} if id in trained})
        self.regenerating -= {id for id in self.regenerating if id in trained}

    def forget(self, ids: set[SampleId]) -> None:
        """These are terminal, or to be made again."""
        self.stock.remove(ids)
        self.regenerating -= ids
        for id in ids:
            self.held_alone.pop(id, None)
        for member in self.fencing.members.values():
            member.drop(ids)
