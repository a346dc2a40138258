"""Ending a consumer so that nothing is trained twice: `draftfeed drain`, and what it finds.

A consumer that trains into a directory keeps `draftfeed.pid` there, locked for as long as it
runs. Its lines: process id, host, and once it has ended its exit code with a sentence.
"""

import fcntl
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from draftfeed_deploy import exits
from draftfeed_deploy.errors import DirectoryInUse, NothingToDrain

logger = logging.getLogger(__name__)

PID_FILE = "draftfeed.pid"
DRAIN_FILE = "draftfeed.drain"
"""Locked by whoever drains the consumer of that directory."""
REPORT_SECONDS = 5.0


class Claim:
    """This process trains into the directory. `close` says that it no longer does."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.code, self.words = exits.FAILED, "ended by an error; its log has it"

    def close(self) -> None:
        self._file.write(f"{self.code} {' '.join(self.words.split())}\n".encode())
        self._file.close()


@contextmanager
def claimed(directory: Path, *, takeover: bool) -> Iterator[Claim]:
    """Raises DirectoryInUse. A takeover does not wait for the consumer whose place it takes: that
    one is to be fenced, and may be alive for some time yet, here or on another machine."""
    path = directory / PID_FILE
    claim = Claim(_replaced(path) if takeover else _locked(path))
    try:
        yield claim
    except KeyboardInterrupt:
        claim.code, claim.words = exits.INTERRUPTED, "interrupted"
        raise
    except ValueError as error:
        claim.code, claim.words = exits.code_of(error) or exits.FAILED, str(error)
        raise
    finally:
        claim.close()


def _locked(path: Path) -> BinaryIO:
    while True:
        file = path.open("a+b", buffering=0)
        if not _lock(file, fcntl.LOCK_EX):
            with file:
                raise DirectoryInUse(path.parent, str(_read(file)))
        if _has_that_name(file, path):
            break
        file.close()  # replaced by a takeover after we opened it
    file.truncate(0)  # at once: a number that was left behind may be another process's by now
    file.write(_lines())
    return file


def _has_that_name(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _replaced(path: Path) -> BinaryIO:
    """The former consumer keeps the lock of a file that has no name any more."""
    part = path.with_name(f"{PID_FILE}.{socket.gethostname()}.{os.getpid()}")
    file = part.open("w+b", buffering=0)
    _lock(file, fcntl.LOCK_EX)
    file.write(_lines())
    part.replace(path)
    return file


def _lines() -> bytes:
    return f"{os.getpid()}\n{socket.gethostname()}\n".encode()


def _lock(file: BinaryIO, kind: int) -> bool:
    """False when another process has it. A file system without locks has nobody to refuse."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        words = "a second consumer in its directory would not be noticed"
        logger.warning("%s cannot be locked (%s): %s", file.name, error.strerror, words)
    return True


class Holder(NamedTuple):
    pid: int
    host: str
    outcome: str
    """Exit code and a sentence; empty while it runs, and when it was killed."""

    def __str__(self) -> str:
        return f"{self.pid} on {self.host}" if self.pid else "that is just starting"


def _read(file: BinaryIO) -> Holder:
    file.seek(0)
    lines = [*file.read().decode(errors="replace").splitlines(), "", "", ""]
    return Holder(int(lines[0]) if lines[0].isdecimal() else 0, lines[1], lines[2])


def drain(directory: Path, timeout_seconds: float) -> bool:
    """Whether the consumer that trains into `directory` ended with everything it trained in a
    checkpoint that the producer knows of. Raises NothingToDrain."""
    try:
        file = (directory / PID_FILE).open("rb", buffering=0)
    except OSError as error:
        words = f"no consumer has trained into {directory} ({error.strerror})"
        raise NothingToDrain(words) from None
    with file:
        if _lock(file, fcntl.LOCK_SH):
            raise NothingToDrain(f"no consumer is running that trains into {directory}")
        holder = _read(file)
        with _asking(directory) as first:
            ended = _ended(holder, timeout_seconds, ask=first)
        if not ended:
            logger.error("the consumer %s has not ended; it is still running", holder)
            return False
        return _judge(holder, _read(file).outcome)


def _judge(holder: Holder, outcome: str) -> bool:
    code, _, words = outcome.partition(" ")
    if code == str(exits.DONE):
        logger.info("the consumer %s: %s", holder, words)
        return True
    how = f"exit code {code}: {words}" if code else "it was killed"
    again = "what it trained after its last checkpoint will be trained again"
    logger.error("the consumer %s ended undrained (%s); %s", holder, how, again)
    return False


@contextmanager
def _asking(directory: Path) -> Iterator[bool]:
    """Whether nobody else is draining it: to a second signal a consumer ends at once."""
    try:
        file = (directory / DRAIN_FILE).open("ab", buffering=0)
    except OSError:  # a directory of another user
        yield True
        return
    with file:
        yield _lock(file, fcntl.LOCK_EX)


def _ended(holder: Holder, timeout_seconds: float, *, ask: bool) -> bool:
    """Ask the process to end, or let another `drain` have asked; whether it has within the time."""
    if holder.host != socket.gethostname():
        raise NothingToDrain(f"the consumer {holder} is not on this machine; drain it over there")
    try:
        # Stands for that very process, also when its number has been given to another.
        process = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return True
    try:
        if ask:
            signal.pidfd_send_signal(process, signal.SIGTERM)
        return _wait(process, holder, timeout_seconds)
    except PermissionError:
        raise NothingToDrain(f"the consumer {holder} belongs to another user") from None
    except ProcessLookupError:
        return True
    finally:
        os.close(process)


def _wait(process: int, holder: Holder, timeout_seconds: float) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    began = time.monotonic()
    logger.info("draining the consumer %s", holder)
    while (left := began + timeout_seconds - time.monotonic()) > 0:
        if poll.poll(1000 * min(left, REPORT_SECONDS)):
            return True
        logger.info("waiting for it for %.0f s", time.monotonic() - began)
    return False
