"""Ports of loopback that are ours for a while, though nobody listens there yet."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


class Port:
    """Bound and not listened at: whoever connects is refused, nobody else is given it, and a server
    that sets SO_REUSEADDR, as those of draftfeed do, may listen at it, again and again."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


@contextmanager
def held_port() -> Iterator[int]:
    held = Port()
    try:
        yield held.number
    finally:
        held.close()
