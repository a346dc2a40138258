"""Small real things for the system tests: a producer without a model, on a port of its own."""

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from draftfeed_consumer.actions import Attach
from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.listener import Listener, ServerConfig
from draftfeed_producer.server import Server
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.ids import IdSet, SampleId, Shards
from samples import DATASET, DESCRIPTOR, sample

PROMPTS = 1000
"""Lines of the prompt file that there is none of; 16 a shard."""


class Producer:
    """Spool, delivery and server; the test plays the engine."""

    def __init__(
        self,
        directory: Path,
        bind: str = "tcp://127.0.0.1:*",
        *,
        session_timeout_seconds: float = 0.3,
        target: Path | None = None,
        descriptor: Descriptor = DESCRIPTOR,
        key: Path | None = None,
        clients: Sequence[Path] = (),
        **spool: object,
    ) -> None:
        self._config = SpoolConfig(dir=directory, audit=True, **spool)  # type: ignore[arg-type]
        self._timeout_seconds, self._target = session_timeout_seconds, target
        self._descriptor = descriptor
        self._key, self._clients = key, tuple(clients)
        self._start(bind)

    def _start(self, bind: str) -> None:
        shards = Shards(DATASET, 0, (0, -(-PROMPTS // 16)))
        self.spool = Spool(self._config, self._descriptor, shards)
        listener = Listener(ServerConfig(bind=bind, key=self._key, clients=self._clients))
        self.address, self.access = listener.address, listener.access
        delivery = Delivery.of(
            self.spool,
            self._descriptor,
            IdSet(SampleId(DATASET, 0, n // 16, n) for n in range(PROMPTS)),
            session_timeout_seconds=self._timeout_seconds,
            local=listener.handover.name,
            now=time.monotonic(),
        )
        self.server = Server(listener, self.spool, delivery, self._target)
        self.server.start()

    def generate(self, ordinals: Iterable[int], rows: int = 40) -> None:
        for ordinal in ordinals:
            self.server.stored(self.spool.append(sample(ordinal, rows)).header)

    def restart(self) -> None:
        self.close("restart")
        self._start(self.address)

    def close(self, reason: str = "test over") -> None:
        self.server.close(reason)
        self.spool.close()


class Relay:
    """A cable: forwards TCP to a producer until it is cut."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._whole = True
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Existing connections end, new ones are dropped at once."""
        self._whole = False
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._whole = True

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._whole:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


@contextmanager
def relaying(address: str) -> Iterator[Relay]:
    relay = Relay(address)
    try:
        yield relay
    finally:
        relay.close()


@contextmanager
def producing(directory: Path, **options: object) -> Iterator[Producer]:
    producer = Producer(directory, **options)  # type: ignore[arg-type]
    try:
        yield producer
    finally:
        producer.close()


@contextmanager
def consuming(
    *addresses: str,
    expect: Expectation = Expectation(),  # noqa: B008 - frozen
    buffer: BufferConfig = BufferConfig(window_samples=4, stall_seconds=0.2),  # noqa: B008
    lost_after_seconds: float = 20.0,
    attach: Attach = Attach(),  # noqa: B008
    group: str = "default",
    same_host: bool = False,
) -> Iterator[HiddenStateStream]:
    """As on another machine, where every payload goes over TCP, unless same_host."""
    client = ClientConfig(
        addresses=addresses,
        lost_after_seconds=lost_after_seconds,
        group=group,
        same_host=same_host,
    )
    config = StreamConfig(producer=client, expect=expect, buffer=buffer)
    stream = HiddenStateStream(config, attach=attach)
    try:
        yield stream
    finally:
        stream.close()
