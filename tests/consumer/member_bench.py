"""A membership on a bench: the test is its producers, its trainer and its buffer."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from draftfeed_consumer.actions import Action, Attach, Deliver, Fail, Identity, Say
from draftfeed_consumer.attachment import Options
from draftfeed_consumer.ledger import Ledger
from draftfeed_consumer.membership import Membership
from draftfeed_proto import messages as m
from draftfeed_proto.chunk import Frame
from draftfeed_proto.codecs import by_name
from draftfeed_proto.ids import SampleId, Shards
from draftfeed_proto.sample import Sample, decoded_bytes, encode_chunks, header_of
from draftfeed_proto.workers import INLINE, Workers
from samples import DATASET, DESCRIPTOR, HIDDEN, LAYERS, sample

A, B = "tcp://a:5550", "tcp://b:5550"
ROWS = 2
SIZE = decoded_bytes(ROWS, LAYERS, HIDDEN)
SHARDS = {A: Shards(DATASET, 0, (0, 1)), B: Shards(DATASET, 0, (1, 2))}
"""Of 16 samples each: A has 0 to 15, B has 16 to 31."""

_M = TypeVar("_M", bound=m.Message)


class TinyRoom:
    """Room for so many samples."""

    def __init__(self, samples: int) -> None:
        self.left_bytes = samples * SIZE

    def reserve(self, size_bytes: int) -> bool:
        fits = size_bytes <= self.left_bytes
        self.left_bytes -= size_bytes if fits else 0
        return fits

    def cancel(self, size_bytes: int) -> None:
        self.left_bytes += size_bytes

    def empty(self, shape: tuple[int, ...], dtype: type[Any]) -> np.ndarray:
        return np.empty(shape, dtype)


def ids(*ordinals: int) -> list[SampleId]:
    return [sample(ordinal, rows=1).id for ordinal in ordinals]


class Bench:
    def __init__(
        self, *addresses: str, leader: bool = True, room: int = 100, **options: object
    ) -> None:
        self.addresses = addresses or (A, B)
        self.room, self.ledger = TinyRoom(room), Ledger()
        identity = Identity(group="g", incarnation="mine", process="p", members=2, leader=leader)
        workers = options.pop("workers", INLINE)
        assert isinstance(workers, Workers)
        attach = {key: options.pop(key) for key in ("without", "rollback") if key in options}
        self.member = Membership(
            self.addresses,
            identity,
            self.room,
            self.ledger,
            Options(attach=Attach(**attach), **options),  # type: ignore[arg-type]
            workers,
        )
        self.actions: list[Action] = []
        self._sessions: dict[str, tuple[int, str]] = {}

    def twin(self) -> "Bench":
        return copy.deepcopy(self)

    def do(self, actions: Sequence[Action]) -> Sequence[Action]:
        self.actions += actions
        return actions

    def kinds(self) -> list[type]:
        return [type(action) for action in self.actions]

    def said(self, address: str, kind: type[_M]) -> list[_M]:
        says = [a for a in self.actions if isinstance(a, Say) and a.address == address]
        return [say.message for say in says if isinstance(say.message, kind)]

    def only(self, kind: type[Action]) -> Action:
        (found,) = [action for action in self.actions if isinstance(action, kind)]
        return found

    @property
    def failure(self) -> Exception:
        action = self.only(Fail)
        assert isinstance(action, Fail)
        return action.error

    @property
    def delivered(self) -> list[int]:
        return [a.sample.id.ordinal for a in self.actions if isinstance(a, Deliver)]

    def link(self, *addresses: str) -> None:
        for address in addresses or self.addresses:
            self.do(self.member.linked(address))

    def cut(self, address: str) -> None:
        self.do(self.member.unlinked(address))

    def tell(self, address: str, kind: type[m.InSession], **fields: object) -> Sequence[Action]:
        term, session = self._sessions[address]
        message = kind(term=term, session=session, **fields)  # type: ignore[arg-type]
        return self.do(self.member.received(address, message))  # type: ignore[arg-type]

    def refuse(self, address: str, code: str, term: int = 0) -> Sequence[Action]:
        return self.do(
            self.member.received(address, m.Refused(code=code, reason=f"{code}!", term=term))
        )

    def grant(self, address: str, **changes: object) -> Sequence[Action]:
        """Answer the last Fence."""
        term = self.said(address, m.Fence)[-1].term
        self._sessions[address] = (term, f"session {len(self.actions)}")
        fields = {
            "term": term,
            "session": self._sessions[address][1],
            "descriptor": DESCRIPTOR,
            "stream_id": DESCRIPTOR.stream_id(),
            "shards": SHARDS[address],
            "committed": [],
            "commit_number": 0,
            **changes,
        }
        return self.do(self.member.received(address, m.Granted(**fields)))  # type: ignore[arg-type]

    def begin(self) -> None:
        """Attached everywhere and open."""
        self.link()
        for address in sorted(self.addresses):
            self.grant(address)
        self.do(self.member.open())
        for address in self.addresses:
            self.tell(address, m.Opened)

    def offer(self, address: str, *ordinals: int) -> None:
        self.tell(address, m.Offer, samples=[(id, SIZE) for id in ids(*ordinals)])

    def send(self, address: str, *ordinals: int) -> None:
        for ordinal in ordinals:
            made = sample(ordinal, ROWS)
            frames = frames_of(made)
            self.start(address, made, frames)
            for index in range(len(frames)):
                self.chunk(address, made.id, index, frames[index])

    def start(self, address: str, made: Sample, frames: Sequence[Frame]) -> None:
        total = sum(map(len, frames))
        header = header_of(made, chunks=len(frames), encoded_bytes=total, audit=True)
        self.tell(address, m.Begin, header=header)

    def chunk(self, address: str, id: SampleId, index: int, frame: Frame) -> None:
        term, session = self._sessions[address]
        chunk = m.Chunk(term=term, session=session, id=id, index=index)
        self.do(self.member.received(address, chunk, [memoryview(frame)]))

    def train(self, *ordinals: int) -> dict[str, object]:
        """Trained, and in a durable checkpoint: its state."""
        for id in ids(*ordinals):
            self.ledger.take(id)
        self.ledger.train(ids(*ordinals))
        return self.ledger.state("s")


def frames_of(made: Sample) -> list[bytes]:
    return list(encode_chunks(made, by_name("raw")))
