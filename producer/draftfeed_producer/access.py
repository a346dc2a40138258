"""Who may connect: the producer's own key, and the keys of the consumers that it knows."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from draftfeed_proto import keys
from draftfeed_proto.errors import KeyFileError

logger = logging.getLogger(__name__)

PUBLIC_SUFFIX = ".pub"
DOMAIN = "draftfeed"
"""ZeroMQ asks its authenticator only for sockets that have one."""
WARN_SECONDS = 10.0
"""Between two lines about strangers."""


class Access:
    """Encrypts the socket, and lets those in whose public keys are in `clients`."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", key: Path, clients: Iterable[Path]
    ) -> None:
        """key: a secret file. clients: public files, or directories of them (`*.pub`).

        Raises KeyFileError.
        """
        self._key, self._clients = key, tuple(clients)
        self._own = keys.read_secret(key)
        self._allowed = self._read_clients()
        self._lock = threading.Lock()
        self._warned_at = float("-inf")
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, self)

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Before it is bound."""
        # Nobody gets in while nobody is there to ask: libzmq's default is the other way round.
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._own.public)

    def reload(self) -> int:
        """Read the clients' keys again, for connections to come; their number. Raises
        KeyFileError, and then keeps what it has."""
        self._allowed = self._read_clients()
        return len(self._allowed)

    def callback(self, domain: str, key: bytes | str) -> bool:
        """For the authenticator, in its thread."""
        text = key.encode() if isinstance(key, str) else key
        # Whoever has the producer's own secret may ask it where samples are (`draftfeed audit`).
        if text in self._allowed or text == self._own.public:
            return True
        with self._lock:
            now = time.monotonic()
            if now - self._warned_at > WARN_SECONDS:
                self._warned_at = now
                shown = text.decode("ascii", "replace")
                logger.warning("refused a client with the unknown public key %s", shown)
        return False

    def close(self) -> None:
        self._authenticator.stop()

    def _read_clients(self) -> frozenset[bytes]:
        found = frozenset(keys.read_public(path) for path in _files(self._clients))
        if not found:
            raise KeyFileError(self._clients[0], f"there is no *{PUBLIC_SUFFIX} in it")
        return found


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.glob(f"*{PUBLIC_SUFFIX}"))
        else:
            yield path
