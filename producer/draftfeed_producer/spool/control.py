"""The control log: commits, tombstones and terms, in one append-only file beside the segments."""

import os
from pathlib import Path

import msgspec

from draftfeed_producer.errors import SpoolError
from draftfeed_producer.spool import entries
from draftfeed_proto.ids import IdSet, SampleId, WireRanges

RESERVE_BYTES = 1 << 20
"""Taken ahead of the records."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """A durable checkpoint holds the effect of exactly these samples (cumulative)."""

    number: int
    trained: WireRanges


class Tombstone(msgspec.Struct, frozen=True, tag="tombstone"):
    """A prompt that ended without being trained, and why."""

    id: SampleId
    state: str
    reason: str


class Term(msgspec.Struct, frozen=True, tag="term"):
    """The group that may take samples, under this fencing number."""

    term: int
    group: str
    incarnation: str


Record = Commit | Tombstone | Term


class ControlLog:
    """Owner of `control.log`. Every append is durable when it returns.

    The file is longer than its contents: space is taken in advance, so that a full disk can still
    record the commit that frees it.
    """

    def __init__(self, path: Path, keep_commits: int) -> None:
        self._keep_commits = keep_commits
        self.commits: list[Commit] = []
        """The last few, oldest first."""
        self.tombstones: dict[SampleId, Tombstone] = {}
        self.term: Term | None = None
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._end = self._replay()
            self._reserve(1)
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Raises OSError; the log then ends where it ended before."""
        payload = msgspec.msgpack.encode(record)
        size = entries.HEADER_BYTES + len(payload)
        try:
            self._reserve(size)
            entries.write(self._fd, self._end, entries.Kind.CONTROL, payload)
            os.fsync(self._fd)
        except OSError:
            os.pwrite(self._fd, bytes(min(size, self._room())), self._end)
            raise
        self._end += size
        self._apply(record)

    @property
    def freeable(self) -> IdSet:
        """Samples in every checkpoint that may still be restored: the oldest kept commit."""
        if len(self.commits) < self._keep_commits:
            return IdSet()
        return IdSet.from_wire(self.commits[0].trained)

    @property
    def committed(self) -> IdSet:
        return IdSet.from_wire(self.commits[-1].trained) if self.commits else IdSet()

    def close(self) -> None:
        os.close(self._fd)

    def _replay(self) -> int:
        """Returns where the next record goes. Raises SpoolError when records in the middle are
        damaged: a lost commit or tombstone must not pass for one that never was."""
        end = 0
        for entry in entries.scan(self._fd):
            payload = entries.read(self._fd, entry)
            if payload is None:
                break
            self._apply(entries.decode(payload, Record))
            end = entry.end
        if entries.find(self._fd, end + 1) is not None:
            raise SpoolError(f"{self._path} is damaged at byte {end}, and whole records follow")
        os.ftruncate(self._fd, end)  # what is beyond is a torn record, or zeros
        return end

    def _reserve(self, size: int) -> None:
        """Room for a record; more of it while the disk has some."""
        if self._room() < size:
            os.posix_fallocate(self._fd, self._end, size + RESERVE_BYTES)

    def _room(self) -> int:
        return os.fstat(self._fd).st_size - self._end

    def _apply(self, record: Record) -> None:
        match record:
            case Commit():
                self.commits = [*self.commits, record][-self._keep_commits :]
            case Tombstone():
                self.tombstones[record.id] = record
            case Term():
                self.term = record
