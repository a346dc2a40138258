"""The file of a spool's `Control`: append-only, and rewritten when most of it is history."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from draftfeed_producer.errors import SpoolDamaged
from draftfeed_producer.spool import entries
from draftfeed_producer.spool.control import Commit, Control, Record
from draftfeed_producer.spool.directory import segment_paths
from draftfeed_producer.spool.files import sync_directory

logger = logging.getLogger(__name__)

RESERVE_BYTES = 1 << 20
"""Taken ahead of the records, beside what commits need."""
RESERVE_COMMITS = 2
"""As large as the last one. Two may have to be recorded before anything is freed."""
COMPACT_BYTES = 16 << 20
"""A smaller log is left as it is."""
KEEP_ALL = 1 << 30


class ControlLog:
    """Owner of `control.log`. Every append is durable when it returns.

    The file is longer than its contents: space is taken in advance, so that a full disk can still
    record the commit that frees it.
    """

    def __init__(
        self, path: Path, keep_commits: int, *, compact_bytes: int = COMPACT_BYTES
    ) -> None:
        """Raises SpoolDamaged when records in the middle are: a lost commit or tombstone must not
        pass for one that never was."""
        self._path = path
        self._compact_bytes = self._due_bytes = compact_bytes
        """At the latter it is found out whether it is worth to rewrite the log."""
        self._is_short = False
        self._commit_bytes = 0
        self.state = Control(keep_commits)
        _part(path).unlink(missing_ok=True)
        created = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if created:
                sync_directory(path.parent)
            self._end = _replay(self._fd, path, self.state)
            if self.state.commits:
                self._commit_bytes = len(_entry(self.state.commits[-1]))
            _zero(self._fd, self._end)
            self._reserve_ahead()
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Of its records."""
        return self._end

    def append(self, record: Record) -> None:
        """Raises OSError; the log then ends where it ended before."""
        data = _entry(record)
        try:
            if self._room() < len(data):
                self._reserve(len(data))
            entries.write_all(self._fd, data, self._end)
            os.fsync(self._fd)
        except OSError:
            os.pwrite(self._fd, bytes(min(len(data), self._room())), self._end)
            raise
        self._end += len(data)
        if isinstance(record, Commit):
            self._commit_bytes = len(data)
        self.state.apply(record)
        self._compact_when_due()
        self._reserve_ahead()

    def close(self) -> None:
        os.close(self._fd)

    def _reserve(self, size: int) -> None:
        os.posix_fallocate(self._fd, self._end, size + RESERVE_BYTES)

    def _reserve_ahead(self) -> None:
        """Done while the disk still has room: when it is full, it is too late."""
        if self._room() >= self._ahead_bytes:
            return
        try:
            self._reserve(self._ahead_bytes)
            self._is_short = False
        except OSError as error:
            if not self._is_short:  # once
                logger.warning("%s: no room can be taken ahead: %s", self._path, error.strerror)
            self._is_short = True

    @property
    def _ahead_bytes(self) -> int:
        return RESERVE_BYTES + RESERVE_COMMITS * self._commit_bytes

    def _room(self) -> int:
        return os.fstat(self._fd).st_size - self._end

    def _compact_when_due(self) -> None:
        if self._end <= self._due_bytes:
            return
        segments = {number for number, _ in segment_paths(self._path.parent)}
        live = [_entry(record) for record in self.state.records(segments)]
        live_bytes = sum(map(len, live))
        self._due_bytes = max(self._compact_bytes, 2 * live_bytes)
        if self._end > self._due_bytes:
            self._rewrite(live, live_bytes)

    def _rewrite(self, live: list[bytes], live_bytes: int) -> None:
        """The new log is whole on the disk before it takes the old one's name. Where the disk has
        no room for both, the old one is used on."""
        try:
            fd = _written(_part(self._path), live, self._ahead_bytes + RESERVE_BYTES)
        except OSError as error:
            logger.warning("%s: not compacted: %s", self._path, error.strerror)
            _part(self._path).unlink(missing_ok=True)
            self._due_bytes = 2 * self._end
            return
        _part(self._path).replace(self._path)
        old, self._fd = self._fd, fd
        os.close(old)
        logger.info("%s: %d bytes became %d", self._path, self._end, live_bytes)
        self._end = live_bytes
        sync_directory(self._path.parent)


def read_control(path: Path) -> Control:
    """What a log says now, while a producer may be writing it. Every commit in it is kept.

    Raises SpoolDamaged, and OSError when it cannot be read.
    """
    state = Control(KEEP_ALL)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _replay(fd, path, state)
    finally:
        os.close(fd)
    return state


def _replay(fd: int, path: Path, state: Control) -> int:
    """Apply every record; returns where the next one goes."""
    end = 0
    while True:
        start = end
        for entry in entries.scan(fd, start):
            payload = entries.read(fd, entry)
            if payload is None:
                break
            state.apply(entries.decode(payload, Record))
            end = entry.end
        if entries.find(fd, end + 1) is None:
            return end
        # A record that was half written when it was read may be followed by one by now.
        if end == start and not _readable(fd, end):
            raise SpoolDamaged(path, f"is damaged at byte {end}, and whole records follow")


def _readable(fd: int, at: int) -> bool:
    entry = next(entries.scan(fd, at), None)
    return entry is not None and entries.read(fd, entry) is not None


def _entry(record: Record) -> bytes:
    payload = msgspec.msgpack.encode(record)
    assert len(payload) <= entries.MAX_PAYLOAD_BYTES
    return entries.header(entries.Kind.CONTROL, payload) + payload


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


def _written(path: Path, live: Iterable[bytes], reserve_bytes: int) -> int:
    """A new file of these entries and room for more, on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        end = 0
        for entry in live:
            end = entries.write_all(fd, entry, end)
        os.posix_fallocate(fd, end, reserve_bytes)
        os.fsync(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _zero(fd: int, start: int) -> None:
    """What is beyond is a torn record or nothing. It is not cut off: its space is ours, and on a
    full disk we would not get it back."""
    size = os.fstat(fd).st_size
    while start < size:
        block = os.pread(fd, 1 << 20, start)
        if block.strip(b"\0"):
            os.pwrite(fd, bytes(len(block)), start)
        start += len(block)
