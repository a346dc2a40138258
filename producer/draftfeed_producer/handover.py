"""Members on this host are handed the files that chunks lie in, and read those themselves.

An abstract socket is there for who shares our kernel and network namespace, and for nobody else.
Its name can be read in /proc: what lets a member in is the name of its session, which it was told
over the connection that keys may protect. Descriptors are for reading only.
"""

import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from draftfeed_producer.sparing import Sparing
from draftfeed_proto.limits import FILE_NUMBER_BYTES, MAX_LOCAL_FILES, MAX_NAME_CHARS

logger = logging.getLogger(__name__)

WAITING = 16
"""Connections that have not said yet whose they are; when there are more the oldest go."""
SILENT_SECONDS = 1.0


class Handover:
    """Belongs to the server's thread."""

    def __init__(self, *, on: bool = True) -> None:
        self.name = ""
        """What `Granted` says; empty: there is no such socket."""
        self._strangers: deque[tuple[socket.socket, float]] = deque()
        """And until when they may be silent."""
        self._members: dict[str, _Member] = {}
        """By session."""
        self._lost = False
        """One of them has gone since the last look."""
        self._unopened = Sparing(logger)
        name = f"draftfeed-{secrets.token_hex(16)}"
        self._listener = _listener(name) if on else None
        if self._listener is not None:
            self.name = name

    def __contains__(self, session: str) -> bool:
        return session in self._members

    def register(self, poller: zmq.Poller) -> None:
        if self._listener is not None:
            poller.register(self._listener, zmq.POLLIN)

    def to_look(self, ready: Mapping[Any, int]) -> bool:
        """Whether a poller that we are registered at found somebody, or what was true at the last
        look need not be any more."""
        knocks = self._listener is not None and self._listener.fileno() in ready
        return knocks or self._lost or bool(self._strangers)

    def look(self, sessions: Iterable[str]) -> None:
        """Let in who names one of these, and forget the members of all others."""
        sessions = set(sessions)
        self._lost = False
        for name in self._members.keys() - sessions:
            self._members.pop(name).close()
        if self._listener is not None:
            with suppress(OSError):  # nobody else waits, or they have gone
                for _ in range(WAITING):  # who keeps connecting must not keep us
                    due = time.monotonic() + SILENT_SECONDS
                    self._strangers.append((self._listener.accept()[0], due))
                    if len(self._strangers) > WAITING:
                        self._strangers.popleft()[0].close()
        for _ in range(len(self._strangers)):
            self._greet(*self._strangers.popleft(), sessions)

    def _greet(self, link: socket.socket, due: float, sessions: set[str]) -> None:
        link.setblocking(False)
        try:
            said = link.recv(MAX_NAME_CHARS).decode("utf-8", "replace")
        except BlockingIOError:
            if time.monotonic() < due:
                self._strangers.append((link, due))
                return
            said = ""
        except OSError:
            said = ""
        if said in sessions and said not in self._members:
            self._members[said] = _Member(link)
        else:
            link.close()

    def number(self, session: str, path: Path) -> int | None:
        """Under which a member has this file; it is handed over when it has not. None when it
        cannot be: the bytes are to be sent."""
        member = self._members.get(session)
        if member is None:
            return None
        try:
            return member.number(path)
        except BlockingIOError:
            return None
        except _Unopened as error:
            self._unopened.warn(f"{path} is sent, and not handed over: {error}")
            return None
        except OSError as error:
            logger.warning("a member on this host takes no more files: %s", error.strerror)
            self._members.pop(session).close()
            self._lost = True
            return None

    def close(self) -> None:
        for member in self._members.values():
            member.close()
        for one in (*(link for link, _ in self._strangers), self._listener):
            if one is not None:
                one.close()
        self._members.clear()
        self._strangers.clear()
        self._listener = None


class _Unopened(Exception):
    """A file cannot be opened here, which says nothing about the member."""


class _Member:
    """The files of one session, in the order of their numbers: so both ends forget the same."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._numbers: dict[Path, int] = {}
        self._next = 0

    def number(self, path: Path) -> int:
        """Raises OSError; BlockingIOError when it has not taken what it was handed before, and
        _Unopened."""
        with suppress(BlockingIOError):
            self._link.recv(1)  # it says nothing more: there is something when it has closed
            raise ConnectionResetError(0, "it has closed the socket")
        if path not in self._numbers:
            self._hand_over(path)
        if len(self._numbers) > MAX_LOCAL_FILES:
            del self._numbers[next(iter(self._numbers))]
        return self._numbers[path]

    def _hand_over(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _Unopened(error.strerror) from error
        try:
            socket.send_fds(self._link, [self._next.to_bytes(FILE_NUMBER_BYTES, "little")], [fd])
        finally:
            os.close(fd)
        self._numbers[path] = self._next
        self._next += 1

    def close(self) -> None:
        self._link.close()


def _listener(name: str) -> socket.socket | None:
    """None where there are no abstract sockets, or a sandbox forbids them."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        logger.info("members on this host are sent bytes: %s", error.strerror)
        return None
    try:
        listener.setblocking(False)
        listener.bind(f"\0{name}")
        listener.listen(WAITING)
    except OSError as error:
        listener.close()
        logger.info("members on this host are sent bytes: %s", error.strerror)
        return None
    return listener
