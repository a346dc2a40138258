"""Other projects' ways, as far as they are installed: speculators' files, gRPC, Mooncake."""

import fcntl
import json
import os
import queue
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transport_orders import Order
from transport_peers import AHEAD, Lines, bytes_of, dial, pieces_of, read_exactly
from transport_states import StateSet

GRPC_METHOD = "/draftfeed.benchmark/Take"
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
MOONCAKE_HOST = "127.0.0.1"
PLACE = struct.Struct("<QQ")


class Announced:
    """Words to each consumer about samples that it may fetch, a few ahead of it."""

    def __init__(self, order: Order) -> None:
        self._lines = Lines(order)
        self.address = self._lines.address

    def await_consumers(self) -> None:
        self._links = self._lines.await_all()
        self._ahead = [0] * len(self._links)

    def await_room(self, link: int) -> None:
        while self._ahead[link] >= AHEAD:
            self._await_fetched(link)

    def tell(self, link: int, words: bytes) -> None:
        self._links[link].sendall(words)
        self._ahead[link] += 1

    def finish(self) -> None:
        for link in range(len(self._links)):
            while self._ahead[link]:
                self._await_fetched(link)

    def _await_fetched(self, link: int) -> None:
        self._ahead[link] -= len(read_exactly(self._links[link], 1))


class FilesSource:
    """Writes as vLLM's connector for speculators does: under a lock that the reader waits for."""

    def __init__(self, order: Order, states: StateSet) -> None:
        import torch
        from safetensors.torch import save_file

        self._save = save_file
        self._samples = [
            {
                "hidden_states": torch.from_numpy(sample),
                "token_ids": torch.zeros(len(sample), dtype=torch.int64),
            }
            for sample in states.samples
        ]
        self._directory = order.shared / f"hidden_states-{order.number}"
        self._directory.mkdir()
        self._count = 0
        self._announced = Announced(order)
        self.address = json.dumps([self._announced.address, str(self._directory)])
        self.await_consumers, self.finish = (
            self._announced.await_consumers,
            self._announced.finish,
        )

    def send(self, link: int, index: int) -> None:
        self._announced.await_room(link)
        path = self._directory / f"hs_{self._count}.safetensors"
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._save(self._samples[index], path)
        finally:
            os.close(lock)
        self._announced.tell(link, self._count.to_bytes(8, "little"))
        self._count += 1


class FilesSink:
    def __init__(self, order: Order, states: StateSet) -> None:
        from hs_connectors import FileTransfer

        self._links: list[tuple[socket.socket, Path, Any]] = []
        for address in order.addresses:
            line, directory = json.loads(address)
            transfer = FileTransfer(Path(directory))
            self._links.append((dial(line, order.number), Path(directory), transfer))

    def receive(self, producer: int, size: int) -> Iterator[memoryview]:
        link, directory, transfer = self._links[producer]
        count = int.from_bytes(read_exactly(link, 8), "little")
        path = str(directory / f"hs_{count}.safetensors")
        sample = transfer.get_generated({"hidden_states_path": path})
        yield sample["hidden_states"].numpy().reshape(-1).view("u1").data
        transfer.delete(path)
        link.sendall(b"\0")


class GrpcSource:
    """A server whose stream of answers is the samples."""

    def __init__(self, order: Order, states: StateSet) -> None:
        import grpc

        self._pieces = [[bytes(piece) for piece in pieces_of(one)] for one in bytes_of(states)]
        self._queues: list[queue.Queue[bytes]] = [
            queue.Queue(maxsize=8) for _ in range(order.consumers)
        ]
        workers = ThreadPoolExecutor(order.consumers)
        self._server = grpc.server(workers, options=GRPC_OPTIONS)
        service, _, method = GRPC_METHOD[1:].partition("/")
        handler = grpc.unary_stream_rpc_method_handler(self._take)
        handlers = grpc.method_handlers_generic_handler(service, {method: handler})
        self._server.add_generic_rpc_handlers((handlers,))
        port = self._server.add_insecure_port(f"{order.host}:0")
        self._server.start()
        self.address = f"{order.host}:{port}"

    def await_consumers(self) -> None:
        """Each asks for its stream."""

    def send(self, link: int, index: int) -> None:
        for piece in self._pieces[index]:
            self._queues[link].put(piece)

    def finish(self) -> None:
        """The server delivers."""

    def _take(self, request: bytes, context: Any) -> Iterator[bytes]:
        while True:
            yield self._queues[request[0]].get()


class GrpcSink:
    def __init__(self, order: Order, states: StateSet) -> None:
        import grpc

        self._channels = [grpc.insecure_channel(a, options=GRPC_OPTIONS) for a in order.addresses]
        self._streams = [
            channel.unary_stream(GRPC_METHOD)(bytes([order.number])) for channel in self._channels
        ]

    def receive(self, producer: int, size: int) -> Iterator[memoryview]:
        while size:
            piece = next(self._streams[producer])
            yield memoryview(piece)
            size -= len(piece)


class MooncakeSource:
    """States stay where they are, registered; consumers read them there."""

    def __init__(self, order: Order, states: StateSet) -> None:
        self._states = states
        engine = mooncake_engine()
        for sample in states.samples:
            register(engine, sample.ctypes.data, sample.nbytes)
        self._engine = engine
        self._announced = Announced(order)
        session = f"{MOONCAKE_HOST}:{engine.get_rpc_port()}"
        self.address = json.dumps([self._announced.address, session])
        self.await_consumers, self.finish = (
            self._announced.await_consumers,
            self._announced.finish,
        )

    def send(self, link: int, index: int) -> None:
        self._announced.await_room(link)
        sample = self._states.samples[index]
        self._announced.tell(link, PLACE.pack(sample.ctypes.data, sample.nbytes))


class MooncakeSink:
    def __init__(self, order: Order, states: StateSet) -> None:
        import numpy as np

        self._engine = mooncake_engine()
        self._buffer = np.zeros(states.largest_bytes, np.uint8)
        register(self._engine, self._buffer.ctypes.data, self._buffer.nbytes)
        self._links = []
        for address in order.addresses:
            line, session = json.loads(address)
            self._links.append((dial(line, order.number), session))

    def receive(self, producer: int, size: int) -> Iterator[memoryview]:
        link, session = self._links[producer]
        place, length = PLACE.unpack(read_exactly(link, PLACE.size))
        failed = self._engine.transfer_sync_read(session, self._buffer.ctypes.data, place, length)
        if failed:
            raise SystemExit(f"transfer_sync_read: {failed}")
        yield from pieces_of(self._buffer.data[:length])
        link.sendall(b"\0")


def mooncake_engine() -> Any:
    """Raises ImportError."""
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

    engine = TransferEngine()
    if failed := engine.initialize(MOONCAKE_HOST, "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit(f"initialize: {failed}")
    return engine


def register(engine: Any, address: int, size: int) -> None:
    if failed := engine.register_memory(address, size):
        raise SystemExit(f"register_memory: {failed}")


OTHERS = {
    "files": (FilesSource, FilesSink),
    "grpc": (GrpcSource, GrpcSink),
    "mooncake": (MooncakeSource, MooncakeSink),
}
