"""What can be between a training node and the target's files, and who may pretend to have them."""

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import zmq

from draftfeed_proto import messages as m

Corrupt = Callable[[bytes, int], bytes]
"""(what comes down, how many bytes came before it) to what goes on"""


class Valve:
    """A cable that lets so many bytes down, and the rest when it is opened."""

    def __init__(
        self, address: str, limit_bytes: int | None = None, corrupt: Corrupt | None = None
    ) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._limit, self._corrupt = limit_bytes, corrupt
        self._opened = threading.Event()
        if limit_bytes is None:
            self._opened.set()
        self._cut = False
        self.down_bytes = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        """What it holds back is lost."""
        self._cut = True
        self._opened.set()
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self._ends += [near, far]
            for source, sink, down in ((near, far, False), (far, near, True)):
                threading.Thread(
                    target=self._forward, args=(source, sink, down), daemon=True
                ).start()

    def _forward(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(self._passed(data) if down else data)
        with suppress(OSError):  # a reset ends it, too
            sink.shutdown(socket.SHUT_RDWR)

    def _passed(self, data: bytes) -> bytes:
        with self._lock:
            before = self.down_bytes
            self.down_bytes += len(data)
        if self._limit is not None and before + len(data) > self._limit:
            self._opened.wait()
        if self._cut:
            raise ConnectionResetError
        return self._corrupt(data, before) if self._corrupt else data


@contextmanager
def through_valve(
    address: str, limit_bytes: int | None = None, corrupt: Corrupt | None = None
) -> Iterator[Valve]:
    valve = Valve(address, limit_bytes, corrupt)
    try:
        yield valve
    finally:
        valve.close()


Answer = list[bytes] | None
"""Frames, or nothing at all."""


class Liar:
    """A ROUTER that says whatever it is told to."""

    def __init__(self, listing: Callable[[], Answer], piece: Callable[[m.FetchAsset], Answer]):
        self._listing, self._piece = listing, piece
        self.asked = 0
        """Pieces."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if not self._socket.poll(20):
                continue
            sender, data = self._socket.recv_multipart()
            message = m.decode_from_member(data)
            if isinstance(message, m.FetchAsset):
                self.asked += 1
                answer = self._piece(message)
            else:
                answer = self._listing()
            if answer is not None:
                self._socket.send_multipart([sender, *answer])


def listed(contents: dict[str, bytes]) -> list[m.AssetFile]:
    return [
        m.AssetFile(name=name, bytes=len(data), digest=hashlib.sha256(data).hexdigest())
        for name, data in contents.items()
    ]


def lists(files: Sequence[m.AssetFile], stream_id: str = "s") -> Callable[[], Answer]:
    return lambda: [m.encode(m.Assets(stream_id=stream_id, files=list(files)))]


def serves(contents: dict[str, bytes]) -> Callable[[m.FetchAsset], Answer]:
    def piece(request: m.FetchAsset) -> Answer:
        data = contents[request.name][request.offset : request.offset + request.bytes]
        return [m.encode(m.AssetPiece(name=request.name, offset=request.offset)), data]

    return piece


@contextmanager
def lying(
    listing: Callable[[], Answer], piece: Callable[[m.FetchAsset], Answer] = lambda _: None
) -> Iterator[Liar]:
    liar = Liar(listing, piece)
    try:
        yield liar
    finally:
        liar.close()
