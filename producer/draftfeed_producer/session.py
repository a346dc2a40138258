"""One member's connection, and the actions that the delivery state answers an event with."""

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
    message: m.Chunk


class StoreTerm(NamedTuple):
    term: int
    group: str
    incarnation: str


class StoreCommit(NamedTuple):
    number: int
    trained: IdSet


class StoreTombstone(NamedTuple):
    id: SampleId
    state: str
    reason: str


Action = Send | SendChunk | StoreTerm | StoreCommit | StoreTombstone


class Session:
    """One connection of the member that holds the stream."""

    def __init__(self, sender: bytes, fence: m.Fence, term: int) -> None:
        self.sender = sender
        self.group, self.member, self.incarnation = fence.group, fence.member, fence.incarnation
        self.term = term
        self.name = secrets.token_hex(8)
        self.open = False
        self.end_sent = False
        self.asked_at: int | None = None
        """Commit number at which a checkpoint was last asked for."""
        self.offered: set[SampleId] = set()
        self.granted: deque[SampleId] = deque()
        self.sending: tuple[SampleId, int] | None = None
        """(sample, index of its next chunk)"""
        self.leased: set[SampleId] = set()
        """Granted, sending or sent, until committed, rejected or given back."""
        self.received: set[SampleId] = set()
        """Sent whole, or claimed as held when it attached: what it can have trained."""
        self.credit_bytes = 0
        self.sent_bytes = 0

    def owns(self, message: m.InSession) -> bool:
        return (message.term, message.session) == (self.term, self.name)
