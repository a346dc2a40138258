"""Who may take samples: the term of the group, and the members that attached in it. No I/O."""

from collections.abc import Callable

from draftfeed_producer.session import Member, Session
from draftfeed_producer.spool.control import Term
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId
from draftfeed_proto.limits import MAX_TERM_STEP


class Fencing:
    """Grants only a higher term, or the same to the same incarnation; ignores everyone else.

    Times are monotonic seconds, given by the caller.
    """

    def __init__(self, term: Term | None, session_timeout_seconds: float, now: float) -> None:
        """A term from before a restart counts as held by somebody who was cut off just now."""
        self.term = term
        self.resumed = term is not None
        """Members of this term may hold samples of an earlier process, that we do not know of."""
        self.members: dict[str, Member] = {}
        self.attached: dict[bytes, Member] = {}
        """Those that have a session, by the sender of its messages."""
        self._timeout_seconds = session_timeout_seconds
        self._began_at = now

    @property
    def number(self) -> int:
        return self.term.term if self.term else 0

    def refusal(self, fence: m.Fence, now: float) -> m.Refused | None:
        """Why this fence cannot be granted now; None when it can."""
        term = self.term
        if fence.term > self.number + MAX_TERM_STEP:
            words = f"term {fence.term} after {self.number} is more than a group can have begun"
            return self._refused("malformed", words)
        if term is None:
            return None if fence.leader else self._refused("held", "the leader comes first")
        if fence.group != term.group:
            words = f"this spool belongs to group {term.group!r}, not {fence.group!r}"
            return self._refused("group", words)
        own = fence.incarnation == term.incarnation
        if fence.term < term.term or (fence.term == term.term and not own):
            return self._refused("fenced", f"term {term.term} was granted, not {fence.term}")
        if fence.term == term.term:
            return self._rank_refusal(fence, term)
        if not fence.leader:
            return self._refused("held", f"the leader has not begun term {fence.term} yet")
        holder = "" if own or fence.takeover else self._holder(now)
        return self._refused("held", holder) if holder else None

    def begin(self, term: Term, now: float) -> None:
        # The first in a spool: there may have been another spool before, and this very group
        # have taken samples of it.
        self.resumed = self.term is None
        self.term = term
        self.members = {}
        self.attached = {}
        self._began_at = now

    def attach(self, fence: m.Fence, session: Session) -> Member:
        """A member as it is known in this term, or a new one, with a session."""
        member = self.members.get(fence.member)
        if member is None:
            member = Member(fence.member, fence.process, fence.leader)
            self.members[fence.member] = member
        assert member.session is None
        member.left = False
        member.session = session
        self.attached[session.sender] = member
        return member

    def detach(self, member: Member, now: float) -> Session:
        """Its session is over; its leases are not."""
        session = member.session
        assert session is not None
        del self.attached[session.sender]
        member.session, member.gone_since = None, now
        member.last_session = (session.sender, session.name)
        return session

    def late_bye(self, sender: bytes, message: m.InSession) -> tuple[Member, m.Bye] | None:
        """Who said goodbye and was found gone before that was read."""
        if not isinstance(message, m.Bye) or message.term != self.number:
            return None
        for member in self.members.values():
            if member.session is None and member.last_session == (sender, message.session):
                return member, message
        return None

    def owned(self, sender: bytes, message: m.InSession) -> tuple[Member, Session] | None:
        """Whose message it is, if it belongs to a session that is not over."""
        member = self.attached.get(sender)
        session = member.session if member else None
        if member is None or session is None:
            return None
        own = (message.term, message.session) == (self.number, session.name)
        return (member, session) if own else None

    @property
    def live(self) -> list[Session]:
        """Sessions in which offers may be made."""
        return [session for member in list(self.attached.values()) if (session := member.live)]

    @property
    def offered(self) -> set[SampleId]:
        return set().union(*(session.offered for session in self.live))

    @property
    def leased(self) -> set[SampleId]:
        return self._together(lambda member: member.leased)

    @property
    def received(self) -> set[SampleId]:
        return self._together(lambda member: member.received)

    @property
    def taken(self) -> set[SampleId]:
        return self._together(lambda member: member.taken)

    @property
    def at_work(self) -> set[SampleId]:
        return self._together(lambda member: member.at_work)

    @property
    def complete(self) -> bool:
        """Whether samples may be offered: the leader has said what is trained, the others what
        they have, and all are there to get their share."""
        opened = [member for member in self.members.values() if member.opened]
        if not any(member.leader for member in opened):
            return False
        assert self.term is not None
        return len(opened) >= self.term.members

    def suspects(self, before: dict[SampleId, int]) -> dict[SampleId, int]:
        """Counts when this term ends: samples that a lost member was at work on, and how many
        terms in a row that has been so."""
        if self.resumed and not self.members:
            return before  # they came and went while we were down: nothing is known
        lost = [m for m in self.members.values() if m.session is None and not m.left]
        at_work = set[SampleId]().union(*(member.at_work for member in lost))
        at_work.update(*(member.suspects for member in self.members.values()))
        return {id: before.get(id, 0) + 1 for id in sorted(at_work)}

    def _together(self, part: Callable[[Member], set[SampleId]]) -> set[SampleId]:
        # A list: other threads ask, and members come.
        return set[SampleId]().union(*map(part, list(self.members.values())))

    def _rank_refusal(self, fence: m.Fence, term: Term) -> m.Refused | None:
        if fence.members != term.members:
            words = f"the group has {term.members} members, this one says {fence.members}"
            return self._refused("restarted", words)
        known = self.members.get(fence.member)
        if known is not None and known.process != fence.process:
            words = f"member {fence.member!r} was started again alone, and what it had trained is "
            return self._refused("restarted", words + "lost; start the whole group again")
        if known is None and len(self.members) >= term.members:
            words = f"all {term.members} members of the group have come, and none is called "
            return self._refused("restarted", f"{words}{fence.member!r}")
        return None

    def _holder(self, now: float) -> str:
        """Who still has a right to the stream, in words."""
        assert self.term is not None
        attached = [member.name for member in self.members.values() if member.session]
        if attached:
            names = ", ".join(sorted(attached))
            who = f"member {names} of group {self.term.group!r} is attached"
            return f"{who}; wait until it leaves, or take its place with --takeover"
        if self.members and all(member.left for member in self.members.values()):
            return ""
        since = max((m.gone_since for m in self.members.values()), default=self._began_at)
        left_seconds = max(since, self._began_at) + self._timeout_seconds - now
        if left_seconds <= 0:
            return ""
        return (
            f"group {self.term.group!r} may still come back; the stream is free in "
            f"{left_seconds:.0f} s, or at once with --takeover"
        )

    def _refused(self, code: str, reason: str) -> m.Refused:
        return m.Refused(code=code, reason=reason, term=self.number)
