"""The segment files of a spool, and the records in them."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from draftfeed_producer.spool.control import Void
from draftfeed_producer.spool.directory import segment_paths
from draftfeed_producer.spool.fresh import Fresh
from draftfeed_producer.spool.segments import (
    Damage,
    HeaderOf,
    Places,
    Record,
    Segment,
    is_whole,
)
from draftfeed_producer.spool.spares import Spares
from draftfeed_proto.chunk import Apart
from draftfeed_proto.ids import SampleId

Fsync = Literal["always", "interval", "never"]

FSYNC_INTERVAL_SECONDS = 1.0
AHEAD_BYTES = 32 << 20
"""Of disk blocks, taken ahead of the end of a segment."""


class Samples:
    """One thread appends; another may do everything else meanwhile."""

    def __init__(self, directory: Path, stream_id: str, segment_bytes: int, fsync: Fsync) -> None:
        self._directory, self._stream_id = directory, stream_id
        self._spares = Spares(directory)
        self._segment_bytes, self._fsync = segment_bytes, fsync
        self._segments: dict[int, Segment] = {}
        self._records: dict[SampleId, Record] = {}
        self._number = 0
        """Of the segment that is appended to."""
        self.changed = threading.Condition()
        """Held while the above change; notified when space was freed."""
        self._leaving: dict[int, Segment] = {}
        """Taken out, and still on the disk."""
        self._busy: Segment | None = None
        """Being written to right now."""
        self._dirty: Segment | None = None
        """Written to since the last sync; one that is full is synced before another begins."""
        self._reused_from = 0
        """Number of the first segment whose file may be given to another."""
        self._synced_at = time.monotonic()
        self.fresh = Fresh()

    def load(self, voids: Mapping[tuple[int, int], Void]) -> list[Damage]:
        """Index what is on the disk, but for the records that are void; returns what is damaged.

        Raises OSError, and SpoolError for what a newer version wrote.
        """
        self._spares.clear()
        paths = segment_paths(self._directory)
        damages: list[Damage] = []
        shared = bool(paths) and paths[-1][1].stat().st_nlink > 1
        for number, path in paths:
            last = path == paths[-1][1] and not shared
            segment, records, bad = Segment.open(path, number, last=last)
            self._segments[number] = segment
            live = {r.header.id: r for r in records if not is_void(r, voids)}
            segment.ids = set(live)
            self._records.update(live)
            damages += bad
        # A number is not used again: what is void in a segment must not hide what lies in another.
        self._number = max([*self._segments, *(number for number, _ in voids)], default=0)
        self._number += shared  # an archive has that file too, and it must not change any more
        return [damage for damage in damages if not is_void(damage, voids)]

    def append(
        self,
        frames: Iterable[bytes | memoryview | Apart],
        header_of: HeaderOf,
        *,
        ahead: bool,
    ) -> Record:
        """Durable as the fsync policy says when it returns. `ahead`: the disk has room for blocks
        to be taken in advance. Raises OSError; nothing of the record is left then."""
        try:
            segment = self._writable()
            if ahead:
                segment.reserve(min(AHEAD_BYTES, self._segment_bytes))
            record = segment.append(self.fresh.passing(frames), header_of)
            self._dirty = segment
            full = not self._appendable(segment)
            if full or self._fsync == "always":
                self.sync()
            if full:
                segment.seal()
            self.fresh.written(record)
            with self.changed:
                self._records[record.header.id] = record
        finally:
            self._busy = None
        return record

    def __contains__(self, id: SampleId) -> bool:
        return id in self._records

    def __len__(self) -> int:
        return len(self._records)

    def records(self) -> list[Record]:
        """Oldest first."""
        with self.changed:
            return list(self._records.values())

    def record(self, id: SampleId) -> Record:
        """Raises KeyError when it is not here."""
        return self._records[id]

    def read_chunk(self, id: SampleId, index: int) -> bytes | memoryview:
        record = self._records[id]
        fresh = self.fresh.take(record, index)
        return self._stored_chunk(record, index) if fresh is None else fresh

    def _stored_chunk(self, record: Record, index: int) -> bytes:
        return self._segments[record.segment].read_chunk(record, index)

    def places(self, id: SampleId, index: int, count: int) -> Places:
        record = self._records[id]
        return self._segments[record.segment].places(record, index, count)

    def whole(self, id: SampleId) -> bool:
        if id not in self._records:
            return False
        record = self._records[id]
        return is_whole(record.header.chunks, partial(self._stored_chunk, record))

    def force(self, segment: int) -> None:
        """Have a segment on the disk now, whatever the policy: its places are about to be named."""
        with self.changed:
            fd = self._segments[segment].duplicate()
        _sync(fd)

    def forget(self, id: SampleId) -> None:
        """Its record is not used any more, nor its segment kept for it."""
        with self.changed:
            record = self._records.pop(id)
            self._segments[record.segment].ids.discard(id)

    def share(self, source: SampleId, id: SampleId) -> Record:
        """The record of one sample is another's, too: of the same line in a later epoch. Its
        segment is kept for both. Raises KeyError when it is not here."""
        with self.changed:
            record = self._records[source]
            header = msgspec.structs.replace(record.header, id=id)
            own = record.own or record.header.id
            self._records[id] = shared = msgspec.structs.replace(record, header=header, own=own)
            self._segments[record.segment].ids.add(id)
        return shared

    def sharing(self, id: SampleId) -> list[SampleId]:
        """All that have this one's record. Raises KeyError."""
        with self.changed:
            place = self._records[id].place
            return [one for one, record in self._records.items() if record.place == place]

    def release(self, is_over: Callable[[SampleId], bool], *, short: bool) -> list[Segment]:
        """Takes out the segments that no sample needs, for `discard`. One that is not full is given
        up only when space is `short`."""
        with self.changed:
            done = [
                segment
                for segment in self._segments.values()
                if (short or not self._appendable(segment)) and segment is not self._busy
                if all(map(is_over, segment.ids))
            ]
            for segment in done:
                self._remove(segment)
            return done

    def discard(self, segments: list[Segment], reuse_bytes: int = 0) -> None:
        """Their files go, and who waits for space is woken. As many are kept for new segments as
        leave all files together below `reuse_bytes`; 0: none, nor those that were kept before."""
        if not reuse_bytes:
            self._spares.clear()
        with ExitStack() as stack:
            for segment in segments:  # each, also when another cannot be deleted
                stack.callback(self._discard, segment, reuse_bytes)

    def _discard(self, segment: Segment, reuse_bytes: int) -> None:
        room = self.used_bytes + self._spares.bytes <= reuse_bytes
        room = room and segment.number >= self._reused_from
        try:
            if not (room and segment.spare(self._spares, sync=self._fsync != "never")):
                segment.unlink()
        finally:
            with self.changed:
                del self._leaving[segment.number]
                self.changed.notify_all()

    def retire_files(self) -> None:
        """No new segment gets a file that is here now."""
        with self.changed:  # or one would be taken meanwhile
            self._reused_from = self._number + 1
            self._spares.clear()

    def closed(self, segment: Segment) -> bool:
        """Whether nothing is ever appended to it again, by the next process either."""
        return segment.number < self._number

    def all_segments(self) -> list[Segment]:
        """Those that are not taken out."""
        with self.changed:
            return list(self._segments.values())

    @property
    def used_bytes(self) -> int:
        both = [*list(self._segments.values()), *list(self._leaving.values())]
        return sum(segment.end for segment in both)

    @property
    def segments(self) -> int:
        """That are open."""
        return len(self._segments) + len(self._leaving)

    @property
    def spare_bytes(self) -> int:
        """Blocks that are there to be written to."""
        with self.changed:
            current = self._segments.get(self._number)
            ahead = current.spare_bytes if current is not None else 0
        return ahead + self._spares.bytes

    def sync_when_due(self) -> None:
        due = time.monotonic() - self._synced_at >= FSYNC_INTERVAL_SECONDS
        if self._fsync == "interval" and due:
            self.sync()

    def sync(self) -> None:
        if self._fsync == "never":
            return
        self._synced_at = time.monotonic()
        with self.changed:
            segment, self._dirty = self._dirty, None
            if segment is None or segment.number not in self._segments:
                return
            fd = segment.duplicate()
        _sync(fd)  # which takes its time: nobody is to wait, and the segment may be closed

    def close(self) -> None:
        self.sync()
        if current := self._segments.get(self._number):
            current.seal()
        for segment in (*self._segments.values(), *self._leaving.values()):
            segment.close()
        self._spares.clear()

    def _writable(self) -> Segment:
        with self.changed:
            current = self._segments.get(self._number)
            if current is not None and self._appendable(current):
                self._busy = current
                return current
        with self.changed:
            self._number += 1
            spare = self._spares.take()
        path = self._directory / f"{self._number:08d}.seg"
        segment = Segment.create(path, self._number, self._stream_id, spare)
        with self.changed:
            self._segments[self._number] = self._busy = segment
        return segment

    def _appendable(self, segment: Segment) -> bool:
        return segment.number == self._number and segment.end < self._segment_bytes

    def _remove(self, segment: Segment) -> None:
        self._leaving[segment.number] = self._segments.pop(segment.number)
        for id in segment.ids:
            if id in self._records and self._records[id].segment == segment.number:
                segment.left.append(self._records.pop(id))


def is_void(found: Record | Damage, voids: Mapping[tuple[int, int], Void]) -> bool:
    """Whether the control log says that it is not to be used."""
    id = found.header.id if isinstance(found, Record) else found.id
    return found.place in voids and voids[found.place].id == id


def _sync(fd: int) -> None:
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
