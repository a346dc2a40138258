"""Which samples an archive has, and their bytes."""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from draftfeed_producer.archive.config import ArchiveConfig
from draftfeed_producer.archive.roots import Roots, describe_archive
from draftfeed_producer.archive.sealed import (
    INDEX,
    SEGMENT,
    Head,
    Interrupted,
    read_index,
    read_line,
    rescue,
)
from draftfeed_producer.errors import ArchiveDamaged, ArchiveError
from draftfeed_producer.spool.segments import Place, Record, frame_fault
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

OPEN_SEGMENTS = 128
"""Whose files are held open, two each."""
LINE_SECONDS = 10.0
_PLACE_BITS = 36
_PLACE = (1 << _PLACE_BITS) - 1


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
    index_fd: int
    """-1 where there is no index, but what was found in the segment."""
    segment_fd: int

    def close(self) -> None:
        for fd in self:
            if fd >= 0:
                os.close(fd)


class Archive:
    """The sealed segments of one stream and prompt file, in all roots. Epochs do not count in it:
    a line of the prompt file is there or not. One thread may add while another reads."""

    def __init__(
        self,
        config: ArchiveConfig,
        descriptor: Descriptor,
        prompts: Shards,
        lines: IdSet = IdSet(),  # noqa: B008 - not changed
        stopped: Callable[[], bool] = bool,
    ) -> None:
        """Makes the roots that are missing, and reads every index, which may take minutes.

        lines: prompts of the file, to be written down where a root is made.
        stopped: asked for between indexes.
        Raises ArchiveError when a root cannot be used or is of another stream or prompt file, and
        Interrupted.
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
        """By ordinal: (segment << bits | byte of the index) + 1; 0: not there."""
        self._copies: dict[int, list[int]] = {}
        """By ordinal: the same of its other copies, for when the first is damaged."""
        self._rescued: dict[int, list[Record]] = {}
        """By number of a segment without an index: its samples. Their place is that in the list."""
        self._gone: dict[int, list[Record]] = {}
        """The same of what is not there any more; it has no chunks."""
        self._lines = IdSet()
        """In epoch 0, whenever they were made."""
        self._bytes = 0
        self.longest_rows = 0
        """Of its samples."""
        self._opened: OrderedDict[int, _Open] = OrderedDict()
        self._unreadable: set[int] = set()
        """Segments of which that was said."""
        self._load(stopped)

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
        if index >= len(record.chunks):
            return b""  # the copy that was being served was found damaged; this is another
        offset, size = record.chunks[index]
        try:
            return os.pread(fd, size, offset)
        except OSError as error:
            logger.error("%s: byte %d cannot be read: %s", id, offset, error.strerror)
            return b""

    def frame_place(self, id: SampleId, index: int) -> Place | None:
        """Where that chunk lies; None when `read_chunk` would not give it either."""
        if (record := self._record(id)) is None or index >= len(record.chunks):
            return None
        return Place(self.path(record.segment).with_suffix(SEGMENT), *record.chunks[index])

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
        """What is there of the line is damaged: it is not served again by this process. Another
        copy is, where there is one."""
        with self._lock:
            if id.ordinal < len(self._places):
                others = self._copies.get(id.ordinal)
                self._places[id.ordinal] = others.pop(0) if others else 0
                if not self._places[id.ordinal]:
                    self._lines.discard(id.in_epoch(0))

    def has(self, digest: str) -> bool:
        """Whether the segment of that name is there."""
        with self._lock:
            return bytes.fromhex(digest) in self._numbers

    def place_of(self, id: SampleId) -> int:
        """What `place` gives for its line."""
        with self._lock:
            return int(self._places[id.ordinal]) - 1 if id.ordinal < len(self._places) else -1

    def place(self, ordinals: np.ndarray) -> np.ndarray:
        """int64[n]: (segment, place in it) of each as one number that sorts; -1: not there."""
        with self._lock:
            known = ordinals < len(self._places)
            places = np.zeros(len(ordinals), np.int64)
            places[known] = self._places[ordinals[known]]
        return places - 1

    def segment_of(self, places: np.ndarray) -> np.ndarray:
        """int64[n]: numbers of segments of what `place` gave."""
        return places >> _PLACE_BITS

    def add(self, root: Path, head: Head) -> None:
        """A segment that was sealed just now. Raises ArchiveError when it cannot be read back."""
        self._take(root / (head.digest + INDEX))

    def records(self) -> Iterator[Record]:
        """Every sample that is served, segment by segment, and what is known of lost ones. Raises
        ArchiveDamaged."""
        for number in range(len(self._digests)):
            yield from self.records_in(number)

    def records_in(self, number: int) -> list[Record]:
        """Those of a segment that are served from there. Raises ArchiveDamaged."""
        records = self._rescued.get(number, self._gone.get(number))
        places = list(range(len(records or ())))
        if records is None:
            _, records, places = read_index(self.path(number).with_suffix(INDEX), number)
        ordinals = np.array([record.header.id.ordinal for record in records], np.int64)
        here = self.place(ordinals) == (number << _PLACE_BITS) + np.array(places, np.int64)
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
                len(self._lines) - self._lost_count(),
                self._bytes,
                self.config.quota_bytes,
                alarm,
                missed,
            )

    def close(self) -> None:
        with self._lock:
            while self._opened:
                self._opened.popitem()[1].close()

    # loading

    def _load(self, stopped: Callable[[], bool]) -> None:
        """Pairs first: what is found in a segment without an index is second best."""
        indexes = [path for root in self.config.roots for path in sorted(root.glob(f"*{INDEX}"))]
        due = time.monotonic() + LINE_SECONDS
        broken = self._without_index()
        for number, path in enumerate(indexes):
            if stopped():
                raise Interrupted
            try:
                self._take(path)
            except ArchiveDamaged as error:
                broken.append(error)
            except ArchiveError as error:
                logger.error("%s; what is in it is not served", error)
            if time.monotonic() >= due:
                due = time.monotonic() + LINE_SECONDS
                logger.info("archive: %d of %d segments are indexed", number + 1, len(indexes))
        for damage in broken:
            self._rescue(damage)

    def _without_index(self) -> list[ArchiveDamaged]:
        return [
            ArchiveDamaged(path, f"its index, {path.stem}{INDEX}, is missing")
            for root in self.config.roots
            for path in sorted(root.glob(f"*{SEGMENT}"))
            if not path.with_suffix(INDEX).exists()
        ]

    def _take(self, path: Path) -> None:
        sealed = read_index(path)
        self._check(path, sealed.head.stream_id, [one.header for one in sealed.records])
        digest = bytes.fromhex(sealed.head.digest)
        with self._lock:
            if digest in self._numbers:
                return  # the same file once more
            number = self._numbers[digest] = self._number(path)
            self._bytes += sealed.head.bytes
            for record, place in zip(sealed.records, sealed.places, strict=True):
                self._index(record.header, number, place)

    def _rescue(self, damage: ArchiveDamaged) -> None:
        """What the segment itself says. The lines of what is lost exist all the same: they are to
        be generated again, or to be named as lost."""
        path = damage.root
        found = rescue(path, len(self._digests))
        if not found.records and not found.lost:
            logger.error("%s; nothing in it can be read", damage)
            return
        try:
            stream_id = found.stream_id or self.descriptor.stream_id()
            self._check(path, stream_id, [*(one.header for one in found.records), *found.lost])
            _digest(path)
        except ArchiveError as error:
            logger.error("%s; what is in it is not served", error)
            return
        counts = (damage, len(found.records), len(found.lost))
        logger.error("%s; %d samples are found in the segment, %d are lost", *counts)
        with self._lock:
            self._bytes += found.bytes
            number = self._number(path)
            self._rescued[number] = found.records
            for place, record in enumerate(found.records):
                self._index(record.header, number, place)
            gone = self._number(path)
            self._gone[gone] = [Record(header, gone, ()) for header in found.lost]
            for place, header in enumerate(found.lost):
                self._index(header, gone, place)

    def _number(self, path: Path) -> int:
        """Of another segment."""
        self._digests.append(_digest(path))
        self._in_root.append(self.config.roots.index(path.parent))
        return len(self._digests) - 1

    def _check(self, path: Path, stream_id: str, headers: list[SampleHeader]) -> None:
        if strange := self.contents.strange(stream_id, headers):
            raise ArchiveError(path, strange)

    def _index(self, header: SampleHeader, number: int, place: int) -> None:
        """Of two copies of a line the first stays, unless it is lost and the other is not."""
        line, one = header.id.ordinal, (number << _PLACE_BITS | place) + 1
        if line >= len(self._places):
            # Pages that are never written to take no memory.
            larger = np.zeros(max(line + 1, 2 * len(self._places)), np.int64)
            larger[: len(self._places)] = self._places
            self._places = larger
        self.longest_rows = max(self.longest_rows, header.rows)
        first = int(self._places[line])
        if first == 0:
            self._places[line] = one
            self._lines.add(header.id.in_epoch(0))
        elif (first - 1) >> _PLACE_BITS in self._gone:
            self._places[line] = one
        elif number not in self._gone:
            self._copies.setdefault(line, []).append(one)

    def _lost_count(self) -> int:
        if not self._gone:
            return 0
        numbers = (self._places[self._places != 0] - 1) >> _PLACE_BITS
        return int(np.isin(numbers, list(self._gone)).sum())

    # reading

    def _place(self, id: SampleId) -> tuple[int, int] | None:
        with self._lock:
            if id.ordinal >= len(self._places) or not (place := int(self._places[id.ordinal])):
                return None
        return (place - 1) >> _PLACE_BITS, (place - 1) & _PLACE

    def _record(self, id: SampleId) -> Record | None:
        found = self._find(id)
        return found[0] if found is not None else None

    def _find(self, id: SampleId) -> tuple[Record, int] | None:
        """(the record, descriptor of its segment)"""
        place = self._place(id)
        if place is None or place[0] in self._gone:
            return None
        number, at = place
        try:
            opened = self._open(number)
            if number in self._rescued:
                return self._rescued[number][at], opened.segment_fd
            path = self.path(number).with_suffix(INDEX)
            return read_line(opened.index_fd, at, path, number), opened.segment_fd
        except ArchiveError as error:
            if number not in self._unreadable:  # else it is said for every sample
                self._unreadable.add(number)
                logger.error("%s; its samples are not served", error)
            return None

    def _open(self, number: int) -> _Open:
        with self._lock:
            path = self.path(number)
            if number in self._opened:
                self._opened.move_to_end(number)
                return self._opened[number]
        index = -1 if number in self._rescued else _opened(path.with_suffix(INDEX))
        try:
            opened = _Open(index, _opened(path.with_suffix(SEGMENT)))
        except ArchiveError:
            _Open(index, -1).close()
            raise
        with self._lock:
            self._opened[number] = opened
            if len(self._opened) > OPEN_SEGMENTS:
                self._opened.popitem(last=False)[1].close()
        return opened


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ArchiveError(path, str(error.strerror)) from None


def _digest(path: Path) -> bytes:
    """In as few bytes as its name can be given back from."""
    try:
        return bytes.fromhex(path.stem)
    except ValueError:
        raise ArchiveError(path, "is no name of a segment") from None
