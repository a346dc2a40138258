"""Who may connect: the producer's own key, and the keys of the consumers that it knows."""

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from draftfeed_producer.sparing import Sparing
from draftfeed_proto import keys
from draftfeed_proto.errors import KeyFileError

logger = logging.getLogger(__name__)

PUBLIC_SUFFIX = ".pub"
DOMAIN = "draftfeed"
"""ZeroMQ asks its authenticator only for sockets that have one."""
MAX_CALLERS = 4096
"""Connections whose keys are remembered: the last ones that said anything."""


class Reloaded(NamedTuple):
    clients: int
    faults: list[KeyFileError]


class Access:
    """Encrypts the socket, and lets those in whose public keys are in `clients`."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", key: Path, clients: Iterable[Path]
    ) -> None:
        """key: a secret file. clients: public files, or directories of them (`*.pub`).

        Raises KeyFileError.
        """
        self._clients = tuple(clients)
        self._own = keys.read_secret(key, zmq.curve_public)
        self._by_file, faults = _read(self._clients, {})
        if faults:
            raise faults[0]
        if not self._by_file:
            raise KeyFileError(self._clients[0], f"there is no *{PUBLIC_SUFFIX} in it")
        self._allowed = frozenset(self._by_file.values())
        self._callers: OrderedDict[bytes, bytes] = OrderedDict()
        """The key of each connection; the server's thread alone looks at it."""
        self._strangers = Sparing(logger)
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

    def reload(self) -> Reloaded:
        """Read the clients' keys again. One whose file is gone is not known any more, also when it
        was the last one; a file that is there and cannot be used leaves its client as it was."""
        self._by_file, faults = _read(self._clients, self._by_file)
        self._allowed = frozenset(self._by_file.values())
        return Reloaded(len(self._allowed), faults)

    def admits(self, sender: bytes, frame: zmq.Frame) -> bool:
        """Whether the key with which this frame's connection was made is still known: ZeroMQ asks
        when a connection is made, and never again."""
        key = str(frame.get("User-Id")).encode()  # so the authenticator has named it
        self._callers[sender] = key
        self._callers.move_to_end(sender)
        if len(self._callers) > MAX_CALLERS:
            self._callers.popitem(last=False)
        return self._knows(key)

    def shut_out(self) -> list[bytes]:
        """The senders whose keys are not known any more."""
        gone = [sender for sender, key in self._callers.items() if not self._knows(key)]
        for sender in gone:
            del self._callers[sender]
        return gone

    def _knows(self, key: bytes) -> bool:
        # Whoever has the producer's own secret may ask it where samples are (`draftfeed audit`).
        return key in self._allowed or key == self._own.public

    def callback(self, domain: str, key: bytes | str) -> bool:
        """For the authenticator, in its thread."""
        text = key.encode() if isinstance(key, str) else key
        if self._knows(text):
            return True
        shown = text.decode("ascii", "replace")
        self._strangers.warn(f"refused a client with the unknown public key {shown}")
        return False

    def close(self) -> None:
        self._authenticator.stop()


def _read(
    paths: Iterable[Path], before: dict[Path, bytes]
) -> tuple[dict[Path, bytes], list[KeyFileError]]:
    """The key of each file, and what cannot be used: of that, what was known before."""
    found: dict[Path, bytes] = {}
    faults: list[KeyFileError] = []
    for path in _files(paths, before, faults):
        try:
            found[path] = keys.read_public(path)
        except KeyFileError as error:
            if path in before and _gone(path):
                continue
            faults.append(error)
            if path in before:
                found[path] = before[path]
    return found, faults


def _files(
    paths: Iterable[Path], before: dict[Path, bytes], faults: list[KeyFileError]
) -> Iterator[Path]:
    for path in paths:
        try:
            names = sorted(os.listdir(path))
        except (NotADirectoryError, FileNotFoundError):
            yield path
        except OSError as error:  # which glob() keeps to itself
            faults.append(KeyFileError(path, f"cannot be read: {error.strerror}"))
            yield from (file for file in before if file.parent == path)
        else:
            yield from (path / name for name in names if name.endswith(PUBLIC_SUFFIX))


def _gone(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
