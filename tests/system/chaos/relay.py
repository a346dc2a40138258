"""A cable between trainers and one producer: it can flip bytes of payloads, and be slow.

Only payloads, because TCP's own checksum guards the rest on a real link as well as anything
would: a flipped sample id in a message is another message, and draftfeed does not claim to
notice it (CURVE does).
"""

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

GREETING_BYTES = 64
PIECE_BYTES = 1 << 16
SLOW_PIECE_BYTES = 1024
MORE, LONG = 1, 2


class Payloads:
    """Finds payload frames in the ZMTP stream of a producer: the second frames of messages."""

    def __init__(self) -> None:
        self._left = GREETING_BYTES
        self._header = bytearray()
        self._more = self.inside = False

    def spans(self, data: bytes | bytearray) -> list[tuple[int, int]]:
        """(start, stop) of each stretch of payload in these next bytes of the stream."""
        found: list[tuple[int, int]] = []
        at = 0
        while at < len(data):
            if not self._left:
                self._take_header(data[at])
                at += 1
                continue
            stop = min(at + self._left, len(data))
            if self.inside:
                found.append((at, stop))
            self._left -= stop - at
            self.inside = self.inside and self._left > 0
            at = stop
        return found

    def _take_header(self, byte: int) -> None:
        self._header.append(byte)
        flags = self._header[0]
        if len(self._header) < (9 if flags & LONG else 2):
            return
        self._left = int.from_bytes(self._header[1:], "big")
        self.inside = self._more and self._left > 0
        self._more = bool(flags & MORE)
        self._header.clear()


class Connection:
    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.payloads = Payloads()
        self.bytes_per_second = 0.0
        """0 = as fast as it goes."""
        self.open = True


class Relay:
    """Accepts until closed. Its sockets may belong to another network namespace."""

    def __init__(
        self, listener: socket.socket, connect: Callable[[], socket.socket], seed: int
    ) -> None:
        self._listener, self._connect = listener, connect
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._flips = 0
        self.flipped = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def flip(self, count: int) -> None:
        """Of the next payloads, flip one byte each in about `count`. 0: stop."""
        with self._lock:
            self._flips = count

    def slow(self, bytes_per_second: float) -> None:
        """The connections there are now; later ones are fast."""
        with self._lock:
            for connection in self._connections:
                connection.bytes_per_second = bytes_per_second

    def mid_payload(self) -> bool:
        """Whether a payload is half through, on a slow connection."""
        with self._lock:
            links = list(self._connections)
        return any(c.open and c.bytes_per_second and c.payloads.inside for c in links)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                _end(connection)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = self._connect()
            except OSError:
                near.close()  # nobody listens behind it
                continue
            self._carry(Connection(near, far))

    def _carry(self, connection: Connection) -> None:
        with self._lock:
            self._connections = [c for c in self._connections if c.open] + [connection]
        for forward in (self._down, self._up):
            threading.Thread(target=forward, args=(connection,), daemon=True).start()

    def _up(self, connection: Connection) -> None:
        with suppress(OSError):
            while data := connection.near.recv(PIECE_BYTES):
                connection.far.sendall(data)
        _end(connection)

    def _down(self, connection: Connection) -> None:
        with suppress(OSError):
            while data := bytearray(connection.far.recv(_piece(connection))):
                self._damage(data, connection.payloads.spans(data))
                if rate := connection.bytes_per_second:
                    time.sleep(len(data) / rate)
                connection.near.sendall(data)
        _end(connection)

    def _damage(self, data: bytearray, spans: list[tuple[int, int]]) -> None:
        with self._lock:
            for start, stop in spans:
                if self._flips and self._random.random() < 0.5:
                    data[self._random.randrange(start, stop)] ^= 1 << self._random.randrange(8)
                    self._flips -= 1
                    self.flipped += 1


def _piece(connection: Connection) -> int:
    return SLOW_PIECE_BYTES if connection.bytes_per_second else PIECE_BYTES


def _end(connection: Connection) -> None:
    connection.open = False
    for end in (connection.near, connection.far):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
