"""The consumer's half of the protocol, without any I/O: messages in, actions out."""

import logging
from collections import deque
from typing import NamedTuple

from draftfeed_consumer.buffer import Buffer
from draftfeed_consumer.ledger import Ledger
from draftfeed_proto import messages as m
from draftfeed_proto.errors import MalformedChunk, MalformedMessage, ProtoError
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Assembler, Sample

logger = logging.getLogger(__name__)

CREDIT_WINDOW_BYTES = 32 << 20
"""Encoded bytes that may be on their way; must exceed the largest chunk."""
CREDIT_STEP_BYTES = CREDIT_WINDOW_BYTES // 4
"""Credit is renewed in steps, not with every chunk."""


class Reply(NamedTuple):
    message: m.FromMember


class Received(NamedTuple):
    sample: Sample


class Ended(NamedTuple):
    """Everything this producer had for us was received."""


class Acknowledged(NamedTuple):
    number: int


class CheckpointWanted(NamedTuple):
    """The producer is short of disk space."""


class Finished(NamedTuple):
    """Every prompt of the producer is terminal: it needs nothing more from us and exits."""


class Closing(NamedTuple):
    reason: str


Action = Reply | Received | Ended | Acknowledged | CheckpointWanted | Finished | Closing


class Reception:
    """One session, from Granted to its end. A half-received sample dies with it."""

    def __init__(self, granted: m.Granted, buffer: Buffer, ledger: Ledger) -> None:
        self._granted, self._buffer, self._ledger = granted, buffer, ledger
        self.term, self.session = granted.term, granted.session
        self._offers: deque[tuple[SampleId, int]] = deque()
        self._due: dict[SampleId, int] = {}
        """Granted and not yet complete, with the bytes reserved for each."""
        self._assembler: Assembler | None = None
        self._received_bytes = 0
        self._credit_bytes = 0
        self._end_seen = False

    def open(self) -> list[Action]:
        trained, held = self._ledger.opening()
        opening = m.Open(term=self.term, session=self.session, trained=trained, held=held)
        return [Reply(opening), *self._renew_credit()]

    def received(self, message: m.FromProducer, frame: memoryview | None) -> list[Action]:
        """Raises MalformedMessage when the producer breaks the protocol."""
        if isinstance(message, m.Refused):
            raise MalformedMessage(f"the producer refused: {message.reason}")
        if not isinstance(message, m.InSession):
            raise MalformedMessage(f"{type(message).__name__} in a session")
        if (message.term, message.session) != (self.term, self.session):
            return []
        match message:
            case m.Offer():
                self._offers.extend(message.samples)
                self._end_seen = False
                return self.grant()
            case m.Begin():
                return self._begin(message)
            case m.Chunk():
                return self._chunk(message, frame)
            case m.Committed():
                return [Acknowledged(message.number)]
            case m.EndOfSamples():
                self._end_seen = True
                return self._ended()
            case m.CheckpointWanted():
                return [CheckpointWanted()]
            case m.AllTerminal():
                return [Finished()]
            case m.Closing():
                return [Closing(message.reason)]
        return []

    def grant(self) -> list[Action]:
        """Ask for the samples at the head of the queue that there is room for."""
        granted: list[SampleId] = []
        while self._offers and self._buffer.reserve(self._offers[0][1]):
            id, size_bytes = self._offers.popleft()
            self._due[id] = size_bytes
            granted.append(id)
        if not granted:
            return []
        return [Reply(m.Grant(term=self.term, session=self.session, ids=granted))]

    def close(self) -> None:
        """The session is over: nothing that was due will come."""
        for size_bytes in self._due.values():
            self._buffer.cancel(size_bytes)
        self._due.clear()

    def _begin(self, message: m.Begin) -> list[Action]:
        header = message.header
        header.check_stream(self._granted.descriptor)
        if self._assembler is not None:
            raise MalformedMessage(f"{header.id} begins inside {self._assembler.header.id}")
        if self._due.get(header.id) != header.decoded_bytes:
            raise MalformedMessage(f"sample {header.id} was not granted with this size")
        self._assembler = Assembler(header, self._granted.descriptor.dtype)
        return []

    def _chunk(self, message: m.Chunk, frame: memoryview | None) -> list[Action]:
        if frame is None:
            raise MalformedMessage("a chunk without its frame")
        self._received_bytes += len(frame)
        assembler = self._assembler
        if assembler is None or assembler.header.id != message.id:
            return self._renew_credit()  # the rest of a sample already refused
        if message.index != assembler.chunks:
            raise MalformedMessage(f"chunk {message.index} where {assembler.chunks} was due")
        try:
            assembler.add(frame)
            complete = self._complete(assembler) if assembler.done else []
        except ProtoError as error:
            return [*self._refuse(message.id, str(error)), *self._renew_credit()]
        return [*complete, *self._renew_credit()]

    def _complete(self, assembler: Assembler) -> list[Action]:
        sample = assembler.sample()
        self._check_vocabulary(sample)
        self._assembler = None
        size_bytes = self._due.pop(sample.id)
        if self._ledger.hold(sample.id):
            return [Received(sample), *self._ended()]
        logger.warning("sample %s came again and is dropped", sample.id)
        self._buffer.cancel(size_bytes)
        return self._ended()

    def _check_vocabulary(self, sample: Sample) -> None:
        highest, size = int(sample.input_ids.max()), self._granted.descriptor.vocab_size
        if highest >= size:
            raise MalformedChunk(f"token {highest} in a vocabulary of {size}")

    def _refuse(self, id: SampleId, reason: str) -> list[Action]:
        """Damaged: drop what came, keep its place, ask for it again."""
        logger.warning("sample %s arrived damaged (%s); asking again", id, reason)
        self._assembler = None
        self._buffer.cancel(self._due.pop(id))
        self._end_seen = False
        return [Reply(m.Nack(term=self.term, session=self.session, id=id, reason=reason[:500]))]

    def _renew_credit(self) -> list[Action]:
        due = self._received_bytes + CREDIT_WINDOW_BYTES
        if due - self._credit_bytes < CREDIT_STEP_BYTES:
            return []
        self._credit_bytes = due
        credit = m.Credit(term=self.term, session=self.session, total_bytes=due)
        return [Reply(credit)]

    def _ended(self) -> list[Action]:
        return [Ended()] if self._end_seen and not self._due and not self._offers else []
