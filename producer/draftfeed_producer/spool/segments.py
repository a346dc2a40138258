"""Segment files: append-only records, each a sample's chunks and then its header."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from draftfeed_producer.spool import entries
from draftfeed_producer.spool.entries import Entry, Kind
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


class Segment:
    """One file. Written by one thread; `read_chunk` may be called from any."""

    def __init__(self, path: Path, number: int, fd: int, end: int) -> None:
        self.path, self.number = path, number
        self._fd = fd
        self.end = end
        self.ids: set[SampleId] = set()

    @classmethod
    def create(cls, path: Path, number: int, stream_id: str) -> "Segment":
        """Raises OSError; no file is left then."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        segment = cls(path, number, fd, 0)
        header = msgspec.msgpack.encode(SegmentHeader(stream_id, number))
        try:
            segment.end = entries.write(fd, 0, Kind.SEGMENT, header)
            sync_directory(path.parent)
        except BaseException:
            segment.unlink()
            raise
        return segment

    @classmethod
    def open(cls, path: Path, number: int, *, last: bool) -> tuple["Segment", list[Record]]:
        """The segment and its whole records. In the last one every byte is verified, and what
        follows the last good record is cut off: it was being written when the producer died."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = cls(path, number, fd, os.fstat(fd).st_size)
            records = list(segment._records(verify=last))
            if last:
                segment._cut_tail()
        except BaseException:
            os.close(fd)
            raise
        segment.ids = {record.header.id for record in records}
        return segment, records

    def append(self, frames: Iterable[bytes], header_of: HeaderOf) -> Record:
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
            os.ftruncate(self._fd, self.end)
            raise
        self.ids.add(sample.id)  # before the end moves: a full segment without open ids is deleted
        self.end = end
        return Record(sample, self.number, tuple(spans))

    def read_chunk(self, record: Record, index: int) -> bytes:
        offset, size = record.chunks[index]
        return os.pread(self._fd, size, offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def unlink(self) -> None:
        self.close()
        self.path.unlink()
        sync_directory(self.path.parent)

    def close(self) -> None:
        os.close(self._fd)

    def _stretches(self) -> Iterator[Iterator[Entry]]:
        """The entries, one iterator for each stretch between damaged bytes."""
        start: int | None = 0
        while start is not None:
            if start:
                logger.warning("%s: damaged bytes before %d are passed over", self.path, start)
            end = start
            for entry in entries.scan(self._fd, start):
                end = entry.end
            yield entries.scan(self._fd, start)
            start = entries.find(self._fd, end + 1)

    def _records(self, *, verify: bool) -> Iterator[Record]:
        for stretch in self._stretches():
            spans: list[Entry] = []
            for entry in stretch:
                if entry.kind is Kind.CHUNK:
                    spans.append(entry)
                elif entry.kind is Kind.SAMPLE:
                    record = self._record(spans, entry, verify=verify)
                    if record is not None:
                        yield record
                    spans = []

    def _record(self, spans: list[Entry], entry: Entry, *, verify: bool) -> Record | None:
        payload = entries.read(self._fd, entry)
        whole = payload is not None and (not verify or all(map(self._frame_holds, spans)))
        header = entries.decode(payload, SampleHeader) if payload is not None and whole else None
        if header is None or header.chunks != len(spans):
            logger.warning("%s: damaged record at %d will be made again", self.path, entry.end)
            return None
        return Record(
            header, self.number, tuple((e.payload_offset, e.payload_bytes) for e in spans)
        )

    def _frame_holds(self, entry: Entry) -> bool:
        try:
            chunk.verify(entries.read(self._fd, entry) or b"")
        except ProtoError:
            return False
        return True

    def _cut_tail(self) -> None:
        whole = (e for stretch in self._stretches() for e in stretch if e.kind is not Kind.CHUNK)
        end = max((entry.end for entry in whole), default=0)
        if end < self.end:
            logger.warning("%s: cut a torn tail of %d bytes", self.path, self.end - end)
            os.ftruncate(self._fd, end)
            self.end = end


def sync_directory(path: Path) -> None:
    """Make names created, renamed or unlinked in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
