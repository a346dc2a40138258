"""One member's place in a term, its connection, and the actions that events are answered with."""

import secrets
from collections import deque
from typing import NamedTuple

from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId


class Send(NamedTuple):
    sender: bytes
    message: m.Message


class SendChunk(NamedTuple):
    sender: bytes
    message: m.Chunk | m.ChunksAt


class StoreTerm(NamedTuple):
    term: int
    group: str
    incarnation: str
    members: int
    takeover: bool = False
    """With --takeover, from one that was attached. Not stored."""


class StoreCommit(NamedTuple):
    number: int
    trained: IdSet
    term: int
    """In which the checkpoint was made."""
    rollback: bool = False
    """It takes samples away: what was committed before it counts no more."""


class StoreTombstone(NamedTuple):
    id: SampleId
    state: str
    reason: str


class StoreSuspects(NamedTuple):
    counts: dict[SampleId, int]
    """Terms in a row that ended while a lost member was at work on the sample."""


class Verify(NamedTuple):
    """Read the record and say with `Delivery.verified` whether it is still what was written."""

    id: SampleId


class Void(NamedTuple):
    """The record is damaged: forget it for good."""

    id: SampleId
    reason: str


class Regenerate(NamedTuple):
    """Hand these to the engine once more."""

    ids: list[SampleId]


Store = StoreTerm | StoreCommit | StoreTombstone | StoreSuspects | Void
"""Must be durable before the next action is carried out."""
Action = Send | SendChunk | Store | Verify | Regenerate


def random_name() -> str:
    return secrets.token_hex(8)


class Session:
    """One connection of one member."""

    def __init__(self, sender: bytes, name: str) -> None:
        self.sender, self.name = sender, name
        self.open = False
        self.end_sent = False
        self.refused = 0
        """Nacks that were read."""
        self.all_terminal_sent = False
        self.asked_at: tuple[int, int] | None = None
        """(term, number) of the last commit when a checkpoint was asked for."""
        self.offered: set[SampleId] = set()
        self.granted: deque[SampleId] = deque()
        self.given = 0
        """Samples begun to send; beside the others' it says whose turn it is."""
        self.sending: tuple[SampleId, int] | None = None
        """(sample, index of its next chunk)"""
        self.credit_bytes = 0
        self.sent_bytes = 0
        self.placed: set[SampleId] = set()
        """Samples of which it was told where they lie."""
        self.refused_places: set[SampleId] = set()
        """Those that it could make nothing of: it is sent their bytes."""

    @property
    def pending(self) -> bool:
        """Whether something that was offered or granted has not gone out whole."""
        return bool(self.offered or self.granted or self.sending)

    def drop(self, ids: set[SampleId]) -> None:
        """These are not to be sent any more."""
        self.offered -= ids
        self.placed -= ids
        self.granted = deque(id for id in self.granted if id not in ids)
        if self.sending and self.sending[0] in ids:
            self.sending = None


class Member:
    """One rank of the group, for as long as the term lasts. Its leases survive its connection:
    a lost rank may have trained what it was given, and only a new term says that it has not."""

    def __init__(self, name: str, process: str, leader: bool) -> None:
        self.name, self.process, self.leader = name, process, leader
        self.session: Session | None = None
        self.opened = False
        self.left = False
        """It said `Bye`."""
        self.gone_since = 0.0
        self.last_session: tuple[bytes, str] | None = None
        """(sender, name) of the one that was cut off: its `Bye` may still be read after that."""
        self.leased: set[SampleId] = set()
        """Granted, sending or sent, until committed, rejected or given back."""
        self.received: set[SampleId] = set()
        """Sent whole, or claimed as held when it attached: what it can have trained."""
        self.at_work: set[SampleId] = set()
        """What its trainer has taken and not yet trained."""
        self.taken: set[SampleId] = set()
        """What has been at work by now: trained, unless it is at work still."""
        self.suspects: set[SampleId] = set()
        """What it was at work on when it failed and left."""

    @property
    def live(self) -> Session | None:
        """Its session, once offers may be made in it."""
        return self.session if self.session is not None and self.session.open else None

    @property
    def pending(self) -> bool:
        """Whether something it was to get has not gone out whole, now or when it was cut off."""
        cut_off = self.session is None and self.leased - self.received
        return bool(cut_off) or (self.session is not None and self.session.pending)

    def drop(self, ids: set[SampleId]) -> None:
        for mine in (self.leased, self.received, self.at_work, self.taken):
            mine -= ids
        if self.session is not None:
            self.session.drop(ids)
