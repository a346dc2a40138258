"""Which samples an archive has, and their bytes."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from draftfeed_producer.archive.config import ArchiveConfig
from draftfeed_producer.archive.loading import Found, find, pair
from draftfeed_producer.archive.opened import Opened, OpenSegments
from draftfeed_producer.archive.roots import Roots, describe_archive
from draftfeed_producer.archive.sealed import INDEX, SEGMENT, Head, read_index, read_line
from draftfeed_producer.errors import ArchiveDamaged, ArchiveError, ArchiveGone
from draftfeed_producer.spool.segments import Places, Record, is_whole
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

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
        self._same: dict[int, int] = {}
        """By number of a segment: the next one that is the same file in another root."""
        self._segments = 0
        """That samples are served from."""
        self._rescued: dict[int, list[Record]] = {}
        """By number of a segment without an index: its samples. Their place is that in the list."""
        self._gone: dict[int, list[Record]] = {}
        """The same of what is not there any more; it has no chunks."""
        self._lines = IdSet()
        """In epoch 0, whenever they were made."""
        self._bytes = 0
        self.longest_rows = 0
        """Of its samples."""
        self._opened = OpenSegments()
        self._unreadable: set[int] = set()
        """Segments of which that was said."""
        self._unread = IdSet()
        """Lines whose bytes the system did not give when they were last read, in epoch 0."""
        self._unread_because: ArchiveGone | None = None
        """The last of those faults."""
        for found in find(config.roots, self.contents, stopped):
            self._take(found)

    def __contains__(self, id: SampleId) -> bool:
        return self._place(id) is not None

    @property
    def lines(self) -> IdSet:
        """Of the prompt file, as ids of epoch 0."""
        with self._lock:
            return self._lines.copy()

    @property
    def lost(self) -> IdSet:
        """Of `lines`, those that are known to have been there and cannot be had."""
        with self._lock:
            return self._lost()

    def header(self, id: SampleId) -> SampleHeader | None:
        """Of the line's sample, under this id. None when it is not there or cannot be read."""
        record = self._record(id)
        return None if record is None else replace(record.header, id=id)

    def read_chunk(self, id: SampleId, index: int) -> bytes:
        """Empty when the disk will not give it: whoever gets it refuses it.
        Raises KeyError when the line is not there."""
        found = self._find(id)
        if found is None:
            raise KeyError(id)
        record, opened = found
        if index >= len(record.chunks):
            return b""  # the copy that was being served was found damaged; this is another
        offset, size = record.chunks[index]
        try:
            return os.pread(opened.segment_fd, size, offset)
        except OSError as error:
            logger.error("%s: byte %d cannot be read: %s", id, offset, error.strerror)
            self._opened.forget(record.segment)
            path = opened.path.with_suffix(SEGMENT)
            self._note_unread(id, ArchiveGone(path, str(error.strerror)))
            return b""

    def unread(self, id: SampleId) -> ArchiveGone | None:
        """Why what was found of the line says nothing of the bytes that lie there: the system did
        not give them. None when they were read, or are known to be lost."""
        with self._lock:
            return self._unread_because if id.in_epoch(0) in self._unread else None

    def places(self, id: SampleId, index: int, count: int) -> Places | None:
        """Where `read_chunk` reads that chunk and those behind it; None when it would not give it
        either."""
        found = self._find(id)
        if found is None or index >= len(found[0].chunks):
            return None
        record, opened = found
        path = opened.path.with_suffix(SEGMENT)
        return Places(path, record.chunks[index : index + count])

    def read_ahead(self, id: SampleId) -> None:
        """Have the kernel fetch all of a sample, whose chunks will be asked for one by one: the
        drive then works while others are sent."""
        found = self._find(id)
        if found is None:
            return
        record, opened = found
        start, (last, size) = record.chunks[0][0], record.chunks[-1]
        with suppress(OSError):  # it is advice; a read will tell what is wrong
            os.posix_fadvise(opened.segment_fd, start, last + size - start, os.POSIX_FADV_WILLNEED)

    def whole(self, id: SampleId) -> bool:
        """Whether the sample is there and every chunk of it is what was written."""
        with self._lock:
            self._unread.discard(id.in_epoch(0))
        record = self._record(id)
        if record is None:
            return False
        return is_whole(record.header.chunks, partial(self.read_chunk, id))

    def spoil(self, id: SampleId) -> None:
        """What is there of the line is damaged: it is not served again by this process. Another
        copy is, where there is one."""
        with self._lock:
            if id.ordinal < len(self._places):
                self._places[id.ordinal] = self._other_copy(id.ordinal)
                if not self._places[id.ordinal]:
                    self._lines.discard(id.in_epoch(0))

    def _other_copy(self, line: int) -> int:
        """Instead of the one that is served; 0: there is none."""
        place = int(self._places[line]) - 1
        if place >= 0 and (same := self._same.get(place >> _PLACE_BITS, -1)) >= 0:
            return (same << _PLACE_BITS | place & _PLACE) + 1
        others = self._copies.get(line)
        return others.pop(0) if others else 0

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
        """A segment that was sealed just now. Raises SpoolError when it cannot be read back."""
        self._take(pair(root / (head.digest + INDEX), self.contents))

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
                self._segments,
                len(self._lines) - len(self._lost()),
                self._bytes,
                self.config.quota_bytes,
                alarm,
                missed,
            )

    def close(self) -> None:
        self._opened.close()

    # loading

    def _take(self, found: Found) -> None:
        if found.fault:
            self._tell(found)
        if found.fault and not found.records and not found.lost:
            return
        with self._lock:
            if found.fault:
                self._take_rescued(found)
            else:
                self._take_pair(found)

    def _tell(self, found: Found) -> None:
        what = f"{found.path}: {found.fault}"
        counts = len(found.records), len(found.lost)
        if any(counts):
            words = "%s; %d samples are found in the segment, %d are lost"
            logger.error(words, what, *counts)
        else:
            logger.error("%s; nothing in it is served", what)

    def _take_pair(self, found: Found) -> None:
        first = self._numbers.get(bytes.fromhex(found.path.stem))
        records = list(zip(found.records, found.places, strict=True))
        if first is None:
            number = self._numbers[bytes.fromhex(found.path.stem)] = self._number(found.path)
        elif found.path.with_suffix("") in map(self.path, self._same_file(first)):
            return  # sealed once more
        else:
            number = self._number(found.path)
            self._same[number] = self._same.get(first, -1)
            self._same[first] = number
            records = [(one, at) for one, at in records if not self._is_indexed(one)]
        self._segments += 1
        self._bytes += found.bytes
        for record, place in records:
            self._index(record.header, number, place)

    def _is_indexed(self, record: Record) -> bool:
        line = record.header.id.ordinal
        return line < len(self._places) and bool(self._places[line])

    def _take_rescued(self, found: Found) -> None:
        self._segments += bool(found.records)
        self._bytes += found.bytes
        number = self._number(found.path)
        self._rescued[number] = [replace(record, segment=number) for record in found.records]
        for place, record in enumerate(found.records):
            self._index(record.header, number, place)
        gone = self._number(found.path)
        self._gone[gone] = [Record(header, gone, ()) for header in found.lost]
        for place, header in enumerate(found.lost):
            self._index(header, gone, place)

    def _number(self, path: Path) -> int:
        """Of another segment."""
        self._digests.append(bytes.fromhex(path.stem))
        self._in_root.append(self.config.roots.index(path.parent))
        return len(self._digests) - 1

    def _same_file(self, number: int) -> Iterator[int]:
        """This one, and the same file in other roots."""
        while number >= 0:
            yield number
            number = self._same.get(number, -1)

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

    def _lost(self) -> IdSet:
        return IdSet(
            record.header.id.in_epoch(0)
            for number, records in self._gone.items()
            for place, record in enumerate(records)
            if self._places[record.header.id.ordinal] == (number << _PLACE_BITS | place) + 1
        )

    # reading

    def _place(self, id: SampleId) -> tuple[int, int] | None:
        with self._lock:
            if id.ordinal >= len(self._places) or not (place := int(self._places[id.ordinal])):
                return None
        return (place - 1) >> _PLACE_BITS, (place - 1) & _PLACE

    def _record(self, id: SampleId) -> Record | None:
        found = self._find(id)
        return found[0] if found is not None else None

    def _find(self, id: SampleId) -> tuple[Record, Opened] | None:
        """(the record, its segment) of the first copy that can be opened."""
        records = 1 + len(self._copies.get(id.ordinal, ()))
        for _ in range(records * len(self.config.roots)):
            place = self._place(id)
            if place is None or place[0] in self._gone:
                return None
            try:
                return self._read(id, *place)
            except ArchiveError as error:
                if place[0] not in self._unreadable:  # else it is said for every sample
                    self._unreadable.add(place[0])
                    logger.error("%s; its samples are not served", error)
                self._opened.forget(place[0])
                if isinstance(error, ArchiveGone):
                    self._note_unread(id, error)
                elif self._pass_over(id.ordinal):
                    continue
            self._turn(id.ordinal)
        return None

    def _note_unread(self, id: SampleId, error: ArchiveGone) -> None:
        with self._lock:
            self._unread.add(id.in_epoch(0))
            self._unread_because = error

    def _read(self, id: SampleId, number: int, at: int) -> tuple[Record, Opened]:
        paths = map(self.path, self._same_file(number))
        opened = self._opened.get(number, paths, indexed=number not in self._rescued)
        if number in self._rescued:
            return self._rescued[number][at], opened
        path = self.path(number).with_suffix(INDEX)
        record = read_line(opened.index_fd, at, path, number)
        if record.header.id.in_epoch(0) != id.in_epoch(0):  # its file was exchanged
            raise ArchiveDamaged(path, f"has {record.header.id} where {id} was")
        return record, opened

    def _pass_over(self, line: int) -> bool:
        """An index is damaged: whether there is the same file in another root, which is served from
        now on."""
        with self._lock:
            number, at = divmod(int(self._places[line]) - 1, 1 << _PLACE_BITS)
            same = self._same.get(number, -1)
            if same >= 0:
                self._places[line] = (same << _PLACE_BITS | at) + 1
        return same >= 0

    def _turn(self, line: int) -> None:
        """The next copy of it comes first. This one comes last: its drive may come back."""
        with self._lock:
            if others := self._copies.get(line):
                others.append(int(self._places[line]))
                self._places[line] = others.pop(0)
