"""Segment files: append-only records, each a sample's chunks and then its header."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from draftfeed_producer.spool import entries
from draftfeed_producer.spool.entries import Entry, Kind
from draftfeed_producer.spool.files import preallocate, sync_directory
from draftfeed_producer.spool.spares import Spares
from draftfeed_proto import chunk
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)


HeaderOf = Callable[[int, int], SampleHeader]
"""(number of frames, their total bytes) -> the header that closes the record."""


class SegmentHeader(msgspec.Struct, frozen=True):
    stream_id: str
    number: int


class Record(msgspec.Struct, frozen=True):
    """Where one sample lies."""

    header: SampleHeader
    segment: int
    chunks: tuple[tuple[int, int], ...]
    """(offset, bytes) of each frame in the segment file."""
    own: SampleId | None = None
    """Under which id it lies there, when it is shared under another."""

    @property
    def place(self) -> tuple[int, int]:
        """(segment, offset): no other record ever lies there."""
        return self.segment, self.chunks[0][0] - entries.HEADER_BYTES


class Places(NamedTuple):
    """Where frames lie, for whoever reads them himself."""

    path: Path
    frames: tuple[tuple[int, int], ...]
    """(offset, bytes)"""


class Damage(msgspec.Struct, frozen=True):
    """Bytes of a segment that are not what was written."""

    segment: int
    start: int
    stop: int
    id: SampleId | None = None
    """Of the sample they belong to, when its header can still be read."""
    key: str = ""
    reason: str = ""

    @property
    def place(self) -> tuple[int, int]:
        return self.segment, self.start


class Segment:
    """One file. Written by one thread; `read_chunk` may be called from any."""

    def __init__(self, path: Path, number: int, fd: int, end: int) -> None:
        self.path, self.number = path, number
        self._fd = fd
        self.end = end
        self._reserved = end
        self.ids: set[SampleId] = set()
        """Of the samples for which it must be kept."""
        self.left: list[Record] = []
        """Its records, when it is taken out of the spool and not deleted yet."""

    @classmethod
    def create(
        cls, path: Path, number: int, stream_id: str, spare: Path | None = None
    ) -> "Segment":
        """spare: a file to write it over. Raises OSError; no file is left then."""
        new = os.O_CREAT | os.O_EXCL if spare is None else 0
        fd = os.open(spare or path, os.O_RDWR | os.O_CLOEXEC | new, 0o644)
        segment = cls(spare or path, number, fd, 0)
        segment._reserved = os.fstat(fd).st_size
        header = msgspec.msgpack.encode(SegmentHeader(stream_id, number))
        try:
            segment.end = entries.write(fd, 0, Kind.SEGMENT, header)
            if spare is not None:
                spare.rename(path)
                segment.path = path
            sync_directory(path.parent)
        except BaseException:
            segment.unlink()
            raise
        return segment

    @classmethod
    def open(
        cls, path: Path, number: int, *, last: bool
    ) -> tuple["Segment", list[Record], list[Damage]]:
        """The segment, its whole records and what is damaged. In the last one every byte is
        verified, and what follows the last good record is cut off: it was being written when the
        producer died."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = cls(path, number, fd, os.fstat(fd).st_size)
            if last:
                segment._cut_tail()
            found = list(scan_records(fd, number, verify=last, sealed=not last))
        except BaseException:
            os.close(fd)
            raise
        records = [record for record in found if isinstance(record, Record)]
        segment.ids = {record.header.id for record in records}
        return segment, records, [damage for damage in found if isinstance(damage, Damage)]

    @property
    def spare_bytes(self) -> int:
        """Blocks that the file has beyond its end."""
        return max(0, os.fstat(self._fd).st_blocks * 512 - self.end)

    def append(
        self, frames: Iterable[bytes | memoryview | chunk.Apart], header_of: HeaderOf
    ) -> Record:
        """Write one record; the header is made when its frames are counted.

        Raises OSError and what `frames` and `header_of` raise; the segment then ends where it ended
        before.
        """
        end = self.end
        spans: list[tuple[int, int]] = []
        try:
            for frame in frames:
                spans.append((end + entries.HEADER_BYTES, len(frame)))
                end = entries.write(self._fd, end, Kind.CHUNK, frame)
            sample = header_of(len(spans), sum(size for _, size in spans))
            end = entries.write(self._fd, end, Kind.SAMPLE, msgspec.msgpack.encode(sample))
        except BaseException:
            os.ftruncate(self._fd, self.end)  # what was taken ahead goes too
            self._reserved = self.end
            raise
        self.ids.add(sample.id)  # before the end moves: a full segment without open ids is deleted
        self.end = end
        return Record(sample, self.number, tuple(spans))

    def reserve(self, ahead_bytes: int) -> None:
        """Take blocks ahead of the end, when half of what was taken before is used up."""
        if self._reserved - self.end < ahead_bytes // 2:
            preallocate(self._fd, self.end + ahead_bytes)
            self._reserved = self.end + ahead_bytes

    def read_chunk(self, record: Record, index: int) -> bytes:
        """What the disk will not give is as good as damaged: empty, so that whoever gets it refuses
        it and the sample is generated again. So is what lies behind the last chunk: another record
        than its header was taken from."""
        if index >= len(record.chunks):
            return b""
        offset, size = record.chunks[index]
        try:
            return os.pread(self._fd, size, offset)
        except OSError as error:
            logger.error("%s: byte %d cannot be read: %s", self.path, offset, error.strerror)
            return b""

    def places(self, record: Record, index: int, count: int) -> Places:
        """None of them behind the last chunk."""
        return Places(self.path, record.chunks[index : index + count])

    def seal(self) -> None:
        """Nothing is appended any more: what lies behind goes back to the disk."""
        os.ftruncate(self._fd, self.end)

    def duplicate(self) -> int:
        """A descriptor of its own, for the caller to close."""
        return os.dup(self._fd)

    def spare(self, spares: Spares, *, sync: bool) -> bool:
        """Leave the file to new segments, when nobody else has it and all of it can be read. False:
        it is still there. Raises OSError; it is closed then."""
        try:
            kept = os.fstat(self._fd).st_nlink == 1 and spares.keep(self.path, self._fd, sync=sync)
        except BaseException:
            self.close()
            raise
        if kept:
            self.close()
        return kept

    def unlink(self) -> None:
        """Its blocks are free at once: a member of this host that still has it open would keep them
        for as long as it does. An archive that has the file too keeps it as it is."""
        try:
            self.path.unlink()
            if not os.fstat(self._fd).st_nlink:
                os.ftruncate(self._fd, 0)
        finally:
            self.close()
        sync_directory(self.path.parent)

    def close(self) -> None:
        os.close(self._fd)

    def _cut_tail(self) -> None:
        whole = (
            entry
            for stretch in _stretches(self._fd, self.end)
            for entry in stretch
            if entry.kind is not Kind.CHUNK
        )
        end = max((entry.end for entry in whole), default=0)
        if end < self.end:
            logger.warning("%s: cut %d bytes behind its last sample", self.path, self.end - end)
            os.ftruncate(self._fd, end)
            self.end = end


def scan_records(fd: int, number: int, *, verify: bool, sealed: bool) -> Iterator[Record | Damage]:
    """Records of a segment in order, and what is damaged between them.

    `verify` reads every chunk and checks its checksum. `sealed`: nothing is appended any more, so
    that a record without an end is damage too, and not one that is being written.
    Raises SpoolError for what a newer version wrote.
    """
    size = os.fstat(fd).st_size
    end = 0
    for stretch in _stretches(fd, size):
        spans: list[Entry] = []
        for entry in stretch:
            spans.append(entry)
            if entry.kind is Kind.CHUNK:
                continue
            if entry.kind is Kind.SAMPLE:
                yield from _closed(fd, number, end, spans, verify=verify)
            end = entry.end
            spans = []
    if sealed and end < size:
        yield Damage(number, end, size, reason="a sample is cut short")


def _closed(
    fd: int, number: int, end: int, spans: list[Entry], *, verify: bool
) -> Iterator[Record | Damage]:
    """The record that the last of these entries closes. The one before it ended at `end`: what
    lies between cannot be read, and is its own when it is damaged, or else was another's."""
    found = _record(fd, number, spans[:-1], spans[-1], verify=verify)
    start = spans[0].start
    if end < start and isinstance(found, Damage):
        found = msgspec.structs.replace(found, start=end)
    elif end < start:
        yield Damage(number, end, start, reason="a sample cannot be read")
    yield found


def _stretches(fd: int, size: int) -> Iterator[Iterator[Entry]]:
    """The entries, one iterator for each stretch between damaged bytes."""
    start: int | None = 0
    while start is not None:
        end = start
        for entry in entries.scan(fd, start, size):
            end = entry.end
        yield entries.scan(fd, start, size)
        start = entries.find(fd, end + 1, size)


def _record(
    fd: int, number: int, spans: list[Entry], entry: Entry, *, verify: bool
) -> Record | Damage:
    start = spans[0].start if spans else entry.start
    payload = entries.read(fd, entry)
    if payload is None:
        return Damage(number, start, entry.end, reason="the header of a sample is damaged")
    header: SampleHeader = entries.decode(payload, SampleHeader)
    frames = tuple((e.payload_offset, e.payload_bytes) for e in spans)
    reason = ""
    if (len(frames), sum(size for _, size in frames)) != (header.chunks, header.encoded_bytes):
        reason = f"{len(frames)} of {header.chunks} chunks are there"
    elif verify:
        reason = next(filter(None, (frame_fault(entries.read(fd, e) or b"") for e in spans)), "")
    if reason:
        return Damage(number, start, entry.end, header.id, header.key, reason)
    return Record(header, number, frames)


def is_whole(chunks: int, read: Callable[[int], bytes | memoryview]) -> bool:
    """Whether every chunk of a sample is what was written. read: gives one by its index."""
    return not any(frame_fault(read(index)) for index in range(chunks))


def frame_fault(frame: bytes | memoryview) -> str:
    """What is wrong with a chunk frame; empty when nothing is."""
    try:
        chunk.verify(frame)
    except ProtoError as error:
        return str(error)
    return ""
