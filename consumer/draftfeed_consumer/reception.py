"""One session with one producer, without any I/O: what was offered, is due, arrives in chunks."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from draftfeed_consumer.ledger import Ledger
from draftfeed_proto import messages as m
from draftfeed_proto.chunk import Placed
from draftfeed_proto.errors import ChunkError, LimitExceeded, MalformedChunk, MalformedMessage
from draftfeed_proto.ids import SampleId
from draftfeed_proto.limits import MAX_ARRAY_ITEMS
from draftfeed_proto.sample import Assembler, Sample
from draftfeed_proto.workers import Workers

logger = logging.getLogger(__name__)

CREDIT_WINDOW_BYTES = 32 << 20
"""Encoded bytes that may be on their way; must exceed the largest chunk."""
CREDIT_STEP_BYTES = CREDIT_WINDOW_BYTES // 2
"""Credit is renewed in steps, not with every chunk."""
REASON_CHARS = 500
MAX_OFFERS = MAX_ARRAY_ITEMS
"""Not granted; our producers make 64 at a time."""


Payload = Sequence[memoryview] | Sequence[Placed]
"""What chunks come with: their frames, or where to read them."""


class Room(Protocol):
    """The part of the buffer that decides what may be asked for."""

    def reserve(self, size_bytes: int) -> bool:
        """Raises BufferTooSmall for what could not even fit into an empty buffer."""
        ...

    def cancel(self, size_bytes: int) -> None: ...

    def empty(self, shape: tuple[int, ...], dtype: type[Any]) -> np.ndarray:
        """Memory for states, as numpy.empty gives it."""
        ...


class Reply(NamedTuple):
    message: m.FromMember


class Received(NamedTuple):
    sample: Sample


class Reception:
    """From Granted to the end of the session. A half-received sample dies with it."""

    def __init__(self, granted: m.Granted, room: Room, ledger: Ledger, workers: Workers) -> None:
        """workers: decode what arrives; a few chunks may then be undecoded when `received` has
        returned, never one of a sample that it gave."""
        self.granted = granted
        self.term, self.session = granted.term, granted.session
        self.offers: deque[tuple[SampleId, int]] = deque()
        """(id, decoded bytes), in the producer's order."""
        self._room, self._ledger, self._workers = room, ledger, workers
        self._due: dict[SampleId, int] = {}
        """Granted and not yet complete, with the bytes reserved for each."""
        self._given_up: set[SampleId] = set()
        """Were due and given back; they may be on their way all the same."""
        self._assembler: Assembler | None = None
        self._received_bytes = 0
        self._credit_bytes = 0
        self._refused = 0
        """How many Nacks were said."""
        self._end_seen = False

    @property
    def ended(self) -> bool:
        """Everything this producer had for us was received."""
        return self._end_seen and not self._due and not self.offers

    @property
    def due(self) -> list[SampleId]:
        return list(self._due)

    @property
    def due_bytes(self) -> int:
        """Decoded. Other threads may ask."""
        return sum(list(self._due.values()))

    def received(self, message: m.FromProducer, frames: Payload | None) -> list[Reply | Received]:
        """Of this session. Raises ProtoError when the producer breaks the protocol."""
        match message:
            case m.Offer():
                self._offered(message.samples)
            case m.Begin():
                self._begin(message)
            case m.Chunk() | m.ChunksAt():
                return self._chunks(message, frames)
            case m.EndOfSamples():
                # One that was on its way when we refused a sample says nothing of that.
                self._end_seen = message.refused == self._refused
        return []

    def grant(self) -> SampleId:
        """Room for the first offer is reserved: the sample is due."""
        id, size_bytes = self.offers.popleft()
        self._due[id] = size_bytes
        self._given_up.discard(id)
        return id

    def renew_credit(self) -> list[Reply]:
        due = self._received_bytes + CREDIT_WINDOW_BYTES
        if due - self._credit_bytes < CREDIT_STEP_BYTES:
            return []
        self._credit_bytes = due
        credit = m.Credit(term=self.term, session=self.session, total_bytes=due)
        return [Reply(credit)]

    def give_up(self) -> list[SampleId]:
        """Nothing more is wanted: forgets the offers and what is due, and says what was due."""
        due = self.due
        self._given_up.update(due)
        self.close()
        return due

    def close(self) -> None:
        """The session is over: nothing that was due will come."""
        self._drop_half()
        for size_bytes in self._due.values():
            self._room.cancel(size_bytes)
        self._due.clear()
        self.offers.clear()

    def _drop_half(self) -> None:
        """What came of a sample, if any. Its room is free only when nothing is decoded into it."""
        if self._assembler is not None:
            self._assembler.close()
            self._assembler = None

    def _offered(self, samples: list[tuple[SampleId, int]]) -> None:
        if len(self.offers) + len(samples) > MAX_OFFERS:
            raise MalformedMessage(f"more than {MAX_OFFERS} samples are offered at once")
        known = {*self._due, *(id for id, _ in self.offers)}
        for id, _ in samples:
            if id.partition not in self.granted.shards:
                raise MalformedMessage(f"sample {id} is offered by who does not own its shard")
            if id in known:  # room would be reserved twice, and given back once
                raise MalformedMessage(f"sample {id} is offered twice")
            known.add(id)
        self.offers.extend(samples)
        self._end_seen = False

    def _begin(self, message: m.Begin) -> None:
        header = message.header
        header.check_stream(self.granted.descriptor)
        if self._assembler is not None:
            raise MalformedMessage(f"{header.id} begins inside {self._assembler.header.id}")
        if header.id in self._given_up and header.id not in self._due:
            return  # its chunks are passed over
        if self._due.get(header.id) != header.decoded_bytes:
            raise MalformedMessage(f"sample {header.id} was not granted with this size")
        dtype = self.granted.descriptor.dtype
        self._assembler = Assembler(header, dtype, self._workers, self._room.empty)

    def _chunks(
        self, message: m.Chunk | m.ChunksAt, frames: Payload | None
    ) -> list[Reply | Received]:
        if not frames:
            raise MalformedMessage("a chunk without its frame")
        self._received_bytes += max(map(len, frames))
        assembler = self._assembler
        if assembler is None or assembler.header.id != message.id:
            return [*self.renew_credit()]  # the rest of a sample already refused
        if message.index != assembler.chunks:
            raise MalformedMessage(f"chunk {message.index} where {assembler.chunks} was due")
        try:
            for frame in frames:
                if assembler.done:
                    raise MalformedMessage(f"a chunk behind the last one of {message.id}")
                assembler.add(frame)
            complete = self._complete(assembler) if assembler.done else []
        except (ChunkError, LimitExceeded) as error:
            return [*self._refuse(message.id, str(error)), *self.renew_credit()]
        return [*complete, *self.renew_credit()]

    def _complete(self, assembler: Assembler) -> list[Reply | Received]:
        sample = assembler.sample()
        self._check_vocabulary(sample)
        self._assembler = None
        size_bytes = self._due.pop(sample.id)
        if self._ledger.hold(sample.id):
            return [Received(sample)]
        logger.warning("sample %s came again and is dropped", sample.id)
        self._room.cancel(size_bytes)
        return []

    def _check_vocabulary(self, sample: Sample) -> None:
        highest, size = int(sample.input_ids.max()), self.granted.descriptor.vocab_size
        if highest >= size:
            raise MalformedChunk(f"token {highest} in a vocabulary of {size}")

    def _refuse(self, id: SampleId, reason: str) -> list[Reply | Received]:
        """Damaged: drop what came, keep its place, ask for it again."""
        logger.warning("sample %s is refused (%s); asking again", id, reason)
        self._drop_half()
        self._room.cancel(self._due.pop(id))
        self._refused += 1
        self._end_seen = False
        words = reason[:REASON_CHARS]
        return [Reply(m.Nack(term=self.term, session=self.session, id=id, reason=words))]
