"""Which samples an archive has, and their bytes."""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from draftfeed_producer.archive.config import ArchiveConfig
from draftfeed_producer.archive.roots import Roots, describe_archive
from draftfeed_producer.archive.sealed import INDEX, SEGMENT, Head, Sealed, read_index
from draftfeed_producer.errors import ArchiveError
from draftfeed_producer.spool.segments import Record, frame_fault
from draftfeed_proto import ranges
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

OPEN_SEGMENTS, OPEN_RECORDS = 64, 8192
"""Whose index and file descriptor are held, and what those indexes may have together."""
LINE_SECONDS = 10.0
_POSITION_BITS = 24


class ArchiveStatistics(NamedTuple):
    segments: int
    samples: int
    """Prompts of which there is one that can be served."""
    bytes: int
    quota_bytes: int
    """0: what the drives hold."""
    alarm: str
    """Why nothing is archived at the moment; empty when it is not so."""
    missed: int
    """Samples that were not archived since the process began."""


class _Open(NamedTuple):
    records: list[Record]
    fd: int


class Archive:
    """The sealed segments of one stream and prompt file, in all roots. Epochs do not count in it:
    a line of the prompt file is there or not. One thread may add while another reads."""

    def __init__(
        self,
        config: ArchiveConfig,
        descriptor: Descriptor,
        prompts: Shards,
        lines: IdSet = IdSet(),  # noqa: B008 - not changed
    ) -> None:
        """Makes the roots that are missing, and reads every index.

        lines: prompts of the file, to be written down where a root is made.
        Raises ArchiveError when a root cannot be used or is of another stream or prompt file.
        """
        self.config, self.descriptor = config, descriptor
        self.contents = describe_archive(descriptor, prompts, lines)
        self.roots = Roots(config, self.contents)
        self._lock = threading.Lock()
        self._digests: list[bytes] = []
        self._in_root: list[int] = []
        self._numbers: dict[bytes, int] = {}
        """Of the segments: what names each, and its root; by number. There may be 100,000."""
        self._places = np.zeros(0, np.int64)
        """By ordinal: (segment << bits | position) + 1; 0: not there."""
        self._lines = IdSet()
        """In epoch 0, whenever they were made."""
        self._bytes = 0
        self.longest_rows = 0
        """Of its samples."""
        self._opened: OrderedDict[int, _Open] = OrderedDict()
        self._unreadable: set[int] = set()
        """Segments of which that was said."""
        self._load()

    def __contains__(self, id: SampleId) -> bool:
        return self._place(id) is not None

    @property
    def lines(self) -> IdSet:
        """Of the prompt file, as ids of epoch 0."""
        with self._lock:
            return self._lines.copy()

    def header(self, id: SampleId) -> SampleHeader | None:
        """Of the line's sample, under this id. None when it is not there or cannot be read."""
        record = self._record(id)
        return None if record is None else msgspec.structs.replace(record.header, id=id)

    def read_chunk(self, id: SampleId, index: int) -> bytes:
        """Empty when the disk will not give it: whoever gets it refuses it.
        Raises KeyError when the line is not there."""
        found = self._find(id)
        if found is None:
            raise KeyError(id)
        record, fd = found
        offset, size = record.chunks[index]
        try:
            return os.pread(fd, size, offset)
        except OSError as error:
            logger.error("%s: byte %d cannot be read: %s", id, offset, error.strerror)
            return b""

    def read_ahead(self, id: SampleId) -> None:
        """Have the kernel fetch all of a sample, whose chunks will be asked for one by one: the
        drive then works while others are sent."""
        found = self._find(id)
        if found is None:
            return
        record, fd = found
        start, (last, size) = record.chunks[0][0], record.chunks[-1]
        with suppress(OSError):  # it is advice; a read will tell what is wrong
            os.posix_fadvise(fd, start, last + size - start, os.POSIX_FADV_WILLNEED)

    def whole(self, id: SampleId) -> bool:
        """Whether the sample is there and every chunk of it is what was written."""
        record = self._record(id)
        if record is None:
            return False
        chunks = range(record.header.chunks)
        return not any(frame_fault(self.read_chunk(id, index)) for index in chunks)

    def spoil(self, id: SampleId) -> None:
        """What is there of the line is damaged: it is not served again by this process."""
        with self._lock:
            if id.ordinal < len(self._places):
                self._places[id.ordinal] = 0
            self._lines.discard(id.in_epoch(0))

    def place(self, ordinals: np.ndarray) -> np.ndarray:
        """int64[n]: (segment, position) of each as one number that sorts; -1: not there."""
        with self._lock:
            known = ordinals < len(self._places)
            places = np.zeros(len(ordinals), np.int64)
            places[known] = self._places[ordinals[known]]
        return places - 1

    def segment_of(self, places: np.ndarray) -> np.ndarray:
        """int64[n]: numbers of segments of what `place` gave."""
        return places >> _POSITION_BITS

    def add(self, root: Path, head: Head) -> None:
        """A segment that was sealed just now. Raises ArchiveError when it cannot be read back."""
        self._take(root / (head.digest + INDEX))

    def records(self) -> Iterator[Record]:
        """Every sample that is served, segment by segment. Raises ArchiveDamaged."""
        for number in range(len(self._digests)):
            yield from self.records_in(number)

    def records_in(self, number: int) -> list[Record]:
        """Those of a segment that are served from there. Raises ArchiveDamaged."""
        records = read_index(self.path(number).with_suffix(INDEX), number).records
        ordinals = np.array([record.header.id.ordinal for record in records], np.int64)
        here = self.place(ordinals) == (number << _POSITION_BITS) + np.arange(len(records))
        return [record for record, counts in zip(records, here, strict=True) if counts]

    def path_of(self, id: SampleId) -> Path:
        """Of the line's segment, without the ending. Raises KeyError."""
        place = self._place(id)
        if place is None:
            raise KeyError(id)
        return self.path(place[0])

    def path(self, number: int) -> Path:
        """Of a segment, without the ending."""
        return self.config.roots[self._in_root[number]] / self._digests[number].hex()

    def statistics(self, alarm: str = "", missed: int = 0) -> ArchiveStatistics:
        with self._lock:
            return ArchiveStatistics(
                len(self._digests),
                len(self._lines),
                self._bytes,
                self.config.quota_bytes,
                alarm,
                missed,
            )

    def close(self) -> None:
        with self._lock:
            while self._opened:
                os.close(self._opened.popitem()[1].fd)

    # loading

    def _load(self) -> None:
        indexes = [path for root in self.config.roots for path in sorted(root.glob(f"*{INDEX}"))]
        due = time.monotonic() + LINE_SECONDS
        for number, path in enumerate(indexes):
            try:
                self._take(path)
            except ArchiveError as error:
                logger.error("%s; what is in it is not served", error)
            if time.monotonic() >= due:
                due = time.monotonic() + LINE_SECONDS
                logger.info("archive: %d of %d segments are indexed", number + 1, len(indexes))

    def _take(self, path: Path) -> None:
        sealed = read_index(path)
        if sealed.head.stream_id != self.descriptor.stream_id():
            raise ArchiveError(path, f"is of another stream ({sealed.head.stream_id[:8]})")
        self._check(path, sealed)
        digest = bytes.fromhex(sealed.head.digest)
        with self._lock:
            if digest in self._numbers:
                return  # a copy of it
            number = self._numbers[digest] = len(self._digests)
            self._digests.append(digest)
            self._in_root.append(self.config.roots.index(path.parent))
            self._bytes += sealed.head.bytes
            self._index(sealed, number)

    def _check(self, path: Path, sealed: Sealed) -> None:
        """A copy that went into the wrong root must not pass for lines of this prompt file."""
        prompts = self.contents.prompts
        for record in sealed.records:
            id = record.header.id
            if id.dataset != prompts.dataset or not ranges.contains(prompts.ranges, id.shard):
                raise ArchiveError(path, f"is of another prompt file ({id})")

    def _index(self, sealed: Sealed, number: int) -> None:
        """Of two copies of a line the first stays."""
        top = max((record.header.id.ordinal for record in sealed.records), default=-1)
        if top >= len(self._places):
            # Pages that are never written to take no memory.
            larger = np.zeros(max(top + 1, 2 * len(self._places)), np.int64)
            larger[: len(self._places)] = self._places
            self._places = larger
        for position, record in enumerate(sealed.records):
            id = record.header.id
            self.longest_rows = max(self.longest_rows, record.header.rows)
            if self._places[id.ordinal] == 0:
                self._places[id.ordinal] = (number << _POSITION_BITS | position) + 1
                self._lines.add(id.in_epoch(0))

    # reading

    def _place(self, id: SampleId) -> tuple[int, int] | None:
        with self._lock:
            if id.ordinal >= len(self._places) or not (place := int(self._places[id.ordinal])):
                return None
        return (place - 1) >> _POSITION_BITS, (place - 1) & ((1 << _POSITION_BITS) - 1)

    def _record(self, id: SampleId) -> Record | None:
        found = self._find(id)
        return found[0] if found is not None else None

    def _find(self, id: SampleId) -> tuple[Record, int] | None:
        place = self._place(id)
        if place is None:
            return None
        try:
            opened = self._open(place[0])
        except ArchiveError as error:
            if place[0] not in self._unreadable:  # else it is said for every sample
                self._unreadable.add(place[0])
                logger.error("%s; its samples are not served", error)
            return None
        return opened.records[place[1]], opened.fd

    def _open(self, number: int) -> _Open:
        with self._lock:
            path = self.path(number)
            if number in self._opened:
                self._opened.move_to_end(number)
                return self._opened[number]
        records = read_index(path.with_suffix(INDEX), number).records
        try:
            opened = _Open(records, os.open(path.with_suffix(SEGMENT), os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise ArchiveError(path.with_suffix(SEGMENT), str(error.strerror)) from None
        with self._lock:
            self._opened[number] = opened
            while self._too_many_open():
                os.close(self._opened.popitem(last=False)[1].fd)
        return opened

    def _too_many_open(self) -> bool:
        records = sum(len(one.records) for one in self._opened.values())
        count = len(self._opened)
        return count > OPEN_SEGMENTS or (records > OPEN_RECORDS and count > 1)
