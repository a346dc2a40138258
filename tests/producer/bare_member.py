"""A member of a group that is nothing but a socket: it takes all it is offered, trains nothing."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import zmq

from draftfeed_consumer.credentials import Credentials
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId

PATIENCE_MS = 20_000
Kind = TypeVar("Kind", bound=m.Message)


class BareMember:
    """Attached when made. One thread uses it."""

    def __init__(self, address: str, term: int = 1, credentials: Credentials | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        if credentials is not None:
            credentials.secure(self._socket)
        self._socket.connect(address)
        self._number = 0
        self.received: list[SampleId] = []
        """Whole ones, in order."""
        self.seen: list[m.FromProducer] = []
        name = str(term)
        self._send(self._fence(name, term))
        self.granted = self.until(m.Granted)

    def take_again(self, term: int) -> m.FromProducer:
        """As another process would; the answer."""
        self._send(self._fence(str(term), term))
        self.seen.clear()
        answers = (m.Granted, m.Refused)
        self._until(lambda: any(isinstance(one, answers) for one in self.seen), "answer")
        return next(one for one in self.seen if isinstance(one, answers))

    def _fence(self, name: str, term: int) -> m.Fence:
        return m.Fence(
            group="g", member="0", incarnation=name, process=name, term=term, takeover=term > 1
        )

    def open(self, trained: Iterable[SampleId] = (), rollback: str = "") -> None:
        wire = IdSet(trained).to_wire()
        self.say(m.Open, trained=wire, rollback=rollback, ledger_term=self.granted.term)
        self.say(m.Credit, total_bytes=1 << 40)

    def say(self, kind: type[m.InSession], **fields: Any) -> None:
        self._send(kind(term=self.granted.term, session=self.granted.session, **fields))

    def receive(self, count: int) -> list[SampleId]:
        """Until so many whole samples have come since it was made."""
        self._until(lambda: len(self.received) >= count, f"{count} samples")
        return self.received

    def commit(self, trained: Iterable[SampleId]) -> None:
        """Returns when the producer has it."""
        self._number += 1
        self.say(m.Commit, number=self._number, trained=IdSet(trained).to_wire())
        self.until(m.Committed)

    def until(self, kind: type[Kind]) -> Kind:
        self.seen.clear()
        self._until(lambda: any(isinstance(one, kind) for one in self.seen), kind.__name__)
        return next(one for one in self.seen if isinstance(one, kind))

    def inquire(self) -> m.Account:
        self._send(m.Inquire())
        return self.until(m.Account)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _until(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            assert self._socket.poll(PATIENCE_MS), f"the producer sent no {what}"
            message = m.decode_from_producer(self._socket.recv_multipart()[0])
            self.seen.append(message)
            self._take(message)

    def _take(self, message: m.FromProducer) -> None:
        match message:
            case m.Offer():
                self.say(m.Grant, ids=[id for id, _ in message.samples])
            case m.Begin():
                self._left = message.header.chunks
            case m.Chunk():
                self._left -= 1
                if not self._left:
                    self.received.append(message.id)

    def _send(self, message: m.Message) -> None:
        self._socket.send(m.encode(message))
