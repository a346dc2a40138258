"""A producer's core without spool and sockets, and members that answer it by hand."""

from typing import Any, TypeVar

from draftfeed_producer.delivery import Delivery, Stored
from draftfeed_producer.session import Action, Send, SendChunk
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import LayerCounters, SampleHeader
from samples import DATASET, DESCRIPTOR, HIDDEN, LAYERS

ALICE, BOB, CAROL = b"alice", b"bob", b"carol"
SHARDS = Shards(DATASET, 0, (0, 1000))
FRAME_BYTES = 1000
TIMEOUT_SECONDS = 10.0
T = TypeVar("T")


def id_of(ordinal: int) -> SampleId:
    return SampleId(DATASET, 0, ordinal // 16, ordinal)


def ids(*ordinals: int) -> IdSet:
    return IdSet(map(id_of, ordinals))


def header(ordinal: int, chunks: int = 3) -> SampleHeader:
    return SampleHeader(
        id=id_of(ordinal),
        key=f"key-{ordinal}",
        rows=6,
        layers=LAYERS,
        hidden=HIDDEN,
        counters=(LayerCounters(0, 0, 0, 0),) * LAYERS,
        finish_reason="stop",
        response_tokens=3,
        chunks=chunks,
        encoded_bytes=chunks * FRAME_BYTES,
    )


NOTHING = Stored(
    committed=IdSet(),
    commit_term=0,
    commit_number=0,
    term=None,
    suspects={},
    tombstones={},
    regenerated=IdSet(),
    samples=[],
    header_of=lambda id: None,
)


def producer(
    samples: int = 4,
    prompts: int | None = None,
    now: float = 0.0,
    shards: Shards = SHARDS,
    **stored: Any,
) -> Delivery:
    """With the first few of its prompts generated; `stored` is what a spool had besides."""
    had = {"samples": [header(k) for k in range(samples)], **stored}
    count = samples if prompts is None else prompts
    return Delivery(
        DESCRIPTOR,
        shards,
        IdSet(map(id_of, range(count))),
        NOTHING._replace(**had),
        session_timeout_seconds=TIMEOUT_SECONDS,
        now=now,
    )


class Member:
    """One rank that does as it is told."""

    def __init__(
        self,
        delivery: Delivery,
        sender: bytes = ALICE,
        rank: int = 0,
        members: int = 1,
        **fence: Any,
    ) -> None:
        self.delivery, self.sender = delivery, sender
        fields = {"group": "run", "incarnation": "first", "process": f"process-{rank}", "term": 1}
        who = {"member": str(rank), "members": members, "leader": rank == 0}
        self.fence = m.Fence(**{**fields, **who, **fence})
        self.granted: m.Granted | None = None

    def ask(self, now: float = 0.0) -> list[Action]:
        actions = self.delivery.received(self.sender, self.fence, now)
        self.granted = next(iter(said(actions, m.Granted)), self.granted)
        return actions

    def refused(self, now: float = 0.0) -> m.Refused:
        """What it is told when it fences in vain."""
        (refusal,) = said(self.ask(now), m.Refused)
        return refusal

    def attach(
        self, trained: IdSet | None = None, now: float = 0.0, **opening: Any
    ) -> list[Action]:
        """Fence and Open."""
        before = self.granted
        self.ask(now)
        assert self.granted is not before, "refused"
        return self.say(m.Open, now, trained=(trained or IdSet()).to_wire(), **opening)

    def say(self, kind: type[m.InSession], now: float = 0.0, **fields: Any) -> list[Action]:
        assert self.granted is not None
        session = {"term": self.granted.term, "session": self.granted.session}
        message: Any = kind(**session, **fields)
        return self.delivery.received(self.sender, message, now)

    def grant(self, *ordinals: int) -> list[Action]:
        return self.say(m.Grant, ids=list(map(id_of, ordinals)))

    def receive(self, credit_bytes: int = 1 << 30) -> list[int]:
        """The ordinals of the samples that came whole with that much credit."""
        self.say(m.Credit, total_bytes=credit_bytes)
        chunks = [c for actions in iter(self.chunk, []) for c in said(actions, m.Chunk)]
        return [c.id.ordinal for c in chunks if c.index + 1 == header(c.id.ordinal).chunks]

    def take(self, *ordinals: int) -> None:
        self.grant(*ordinals)
        assert self.receive() == list(ordinals)

    def train(self, *ordinals: int) -> None:
        self.take(*ordinals)
        self.say(m.AtWork, ids=list(map(id_of, ordinals)))
        self.say(m.AtWork, ids=[])

    def commit(self, number: int, *ordinals: int, **session: Any) -> list[Action]:
        return self.say(m.Commit, number=number, trained=ids(*ordinals).to_wire(), **session)

    def leave(self) -> None:
        self.say(m.Bye)

    def lose(self, now: float = 0.0) -> list[Action]:
        """Its connection."""
        return self.delivery.disconnected(self.sender, now)

    def chunk(self) -> list[Action]:
        """The next that may be sent."""
        actions = self.delivery.next_chunk(self.sender)
        for _ in said(actions, m.Chunk):
            self.delivery.sent(self.sender, FRAME_BYTES)
        return actions


def said(actions: list[Action], kind: type[T]) -> list[T]:
    """The messages of one type."""
    sent = [action.message for action in actions if isinstance(action, Send | SendChunk)]
    return [message for message in sent if isinstance(message, kind)]


def done(actions: list[Action], kind: type[T]) -> list[T]:
    """The actions of one type."""
    return [action for action in actions if isinstance(action, kind)]


def names(actions: list[Action]) -> list[str]:
    return [
        type(a.message).__name__ if isinstance(a, Send | SendChunk) else type(a).__name__
        for a in actions
    ]


def offered(actions: list[Action]) -> list[int]:
    return [id.ordinal for offer in said(actions, m.Offer) for id, _ in offer.samples]
