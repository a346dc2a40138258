"""A member that takes all samples and looks at none: what a producer can send, and what is left of
that when a consumer verifies and decodes."""

import time
from typing import NamedTuple

import zmq

from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId

TIMEOUT_SECONDS = 600.0
CREDIT_BYTES = 1 << 60
BUFFER_BYTES = 1 << 30


class Taken(NamedTuple):
    """From the first grant to the last byte."""

    seconds: float
    encoded_bytes: int
    samples: int


def receive(address: str, commit_samples: int = 0) -> Taken:
    """Everything that a producer has, until all is terminal; nothing is verified or decoded.

    commit_samples: whether and when what came is committed, 0: at the end.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        return _Receiver(socket, commit_samples).run()


class _Receiver:
    def __init__(self, socket: "zmq.Socket[bytes]", commit_samples: int) -> None:
        self._socket, self._every = socket, commit_samples
        self._session = ""
        self._trained = IdSet()
        self._began = self._last = 0.0
        self._bytes = self._samples = self._number = self._left = 0
        self._current: SampleId | None = None

    def run(self) -> Taken:
        life = "1"
        self._send(m.Fence(group="bench", member="0", incarnation=life, process=life, term=1))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self._socket.closed:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not self._socket.poll(int(1000 * left_seconds)):
                raise SystemExit(f"the producer sent not everything in {TIMEOUT_SECONDS:.0f} s")
            frames = self._socket.recv_multipart(copy=False)
            if self._over(m.decode_from_producer(frames[0].buffer), frames[1:]):
                break
        return Taken(self._last - self._began, self._bytes, self._samples)

    def _send(self, message: m.Message) -> None:
        self._socket.send(m.encode(message))

    def _over(self, message: m.FromProducer, payload: "list[zmq.Frame]") -> bool:
        session = {"term": 1, "session": self._session}
        match message:
            case m.Granted():
                self._session = message.session
                session["session"] = self._session
                self._send(m.Open(**session, trained=[], checkpoint_samples=self._every))
                self._send(m.Credit(**session, total_bytes=CREDIT_BYTES))
            case m.Offer():
                self._began = self._began or time.monotonic()
                self._send(m.Grant(**session, ids=[id for id, _ in message.samples]))
            case m.Begin():
                self._current, self._left = message.header.id, message.header.chunks
            case m.Chunk():
                self._bytes += len(payload[0])
                self._count_chunk()
            case m.EndOfSamples():
                self._commit()
            case m.AllTerminal():
                self._send(m.Bye(**session))
                return True
            case m.Refused() | m.Closing():
                raise SystemExit(f"the producer refused: {message.reason}")
        return False

    def _count_chunk(self) -> None:
        self._left -= 1
        if self._left:
            return
        assert self._current is not None
        self._trained.add(self._current)
        self._samples += 1
        self._last = time.monotonic()
        if self._every and self._samples % self._every == 0:
            self._commit()

    def _commit(self) -> None:
        self._number += 1
        trained = self._trained.to_wire()
        self._send(m.Commit(term=1, session=self._session, number=self._number, trained=trained))


def decode(address: str) -> Taken:
    """The same by the consumer's own stream: verified, decoded, given to a trainer and let go."""
    producer = ClientConfig(addresses=(address,))
    buffer = BufferConfig(capacity_bytes=BUFFER_BYTES, window_samples=1)
    stream = HiddenStateStream(StreamConfig(producer=producer, buffer=buffer))
    samples = 0
    try:
        assert stream.descriptor
        began = last = time.monotonic()
        for samples, item in enumerate(stream, start=1):
            stream.trained([item["id"]], samples)
            last = time.monotonic()
        encoded_bytes = stream.statistics().client.encoded_bytes
        stream.committed(stream.state_dict())
        if not stream.wait_committed(TIMEOUT_SECONDS):
            raise SystemExit("the producer did not store the commit")
    finally:
        stream.close()
    return Taken(last - began, encoded_bytes, samples)
