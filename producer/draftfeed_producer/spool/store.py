"""The spool as its producer uses it."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from draftfeed_producer.errors import SpoolDamaged, SpoolFull
from draftfeed_producer.spool import control
from draftfeed_producer.spool.config import SpoolConfig
from draftfeed_producer.spool.control import Commit, Suspects, Term, Tombstone, Void
from draftfeed_producer.spool.control_log import ControlLog
from draftfeed_producer.spool.directory import (
    CONTROL_LOG,
    FORMAT,
    Owner,
    claim,
    lock,
    segment_paths,
)
from draftfeed_producer.spool.ranges import format_ranges, parse_ranges
from draftfeed_producer.spool.segments import Damage, Record, Segment, frame_fault
from draftfeed_producer.spool.space import Space
from draftfeed_proto import codecs
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import Sample, SampleHeader, encode_chunks, header_of

logger = logging.getLogger(__name__)

FSYNC_INTERVAL_SECONDS = 1.0
AHEAD_BYTES = 32 << 20
"""Of disk blocks, taken ahead of the end of a segment."""


class SpoolStatistics(NamedTuple):
    bytes: int
    quota_bytes: int
    samples: int
    committed: int
    tombstones: int
    logical_bytes: int
    """Decoded bytes of all samples appended since this process began."""
    encoded_bytes: int
    alarm: str = ""
    """Why admission is paused; empty when it is not."""
    regenerated: int = 0


class Spool:
    """Appended to by one thread, read and committed to by another."""

    def __init__(self, config: SpoolConfig, descriptor: Descriptor, shards: Shards) -> None:
        """shards: all of the prompt file. Which of them are its own the spool remembers.

        Raises SpoolBusy when another producer owns it, SpoolMismatch when it was made for another
        stream, prompt file or choice of shards, ShardError when those do not exist, SpoolDamaged
        when its control log is, SpoolError when the directory cannot be used.
        """
        self._config = config
        self._descriptor = descriptor
        self._codec = codecs.by_name(config.codec)
        chosen = format_ranges(parse_ranges(config.shards)) if config.shards else ""
        owner = Owner(FORMAT, descriptor, shards, chosen)
        self._segments: dict[int, Segment] = {}
        self._records: dict[SampleId, Record] = {}
        with ExitStack() as stack:
            stack.callback(os.close, lock(config.dir, create=True))
            claim(config.dir, owner)
            self._control = ControlLog(config.dir / CONTROL_LOG, config.keep_checkpoints)
            stack.callback(self._control.close)
            self._state = self._control.state
            self._own(owner)
            self._committed = self._state.committed
            stack.callback(self._close_segments)
            self._load_segments()
            self._number = max(self._segments, default=0)
            """Of the segment that is appended to."""
            self._resources = stack.pop_all()
        self._segment_bytes = min(config.segment_bytes, config.quota_bytes // 8)
        self._limits = Space(config)
        self._space = threading.Condition()
        self._busy: Segment | None = None
        """Being written to right now."""
        self._dirty: Segment | None = None
        """Written to since the last sync; one that is full is synced before another begins."""
        self._synced_at = time.monotonic()
        self._logical_bytes = 0
        self._encoded_bytes = 0

    # written by the engine's thread

    def append(self, sample: Sample) -> Record:
        """Encode and store one sample; durable as the fsync policy says when it returns.

        Raises SpoolFull when the disk is; nothing of the sample is left then.
        """

        def header(chunks: int, encoded_bytes: int) -> SampleHeader:
            return header_of(
                sample, chunks=chunks, encoded_bytes=encoded_bytes, audit=self._config.audit
            )

        frames = encode_chunks(sample, self._codec, self._config.chunk_bytes)
        try:
            segment = self._writable_segment()
            record = segment.append(frames, header)
        except OSError as error:
            self._limits.refused(error, sample.hidden_states.nbytes)
            raise SpoolFull(self._config.dir, error) from error
        finally:
            self._busy = None
        self._limits.accepted()
        self._dirty = segment
        full = not self._appendable(segment)
        if self._config.fsync == "always" or full:
            self._sync()
        with self._space:
            if full:
                segment.seal()
            self._records[sample.id] = record
            self._logical_bytes += record.header.decoded_bytes
            self._encoded_bytes += record.header.encoded_bytes
        return record

    def finished(self, id: SampleId) -> bool:
        """Whether the prompt has a record, a commit or a tombstone here."""
        with self._space:
            return self._is_finished(id)

    def wait_for_space(self, timeout_seconds: float) -> bool:
        """Whether there is room now, or within the time: under the quota, above the free-space
        floor, and on the disk when that was full. `alarm` says what is missing."""
        with self._space:
            if self._has_room():
                return True
        self._free()  # what was committed earlier may lie in a segment that was not full
        with self._space:
            return self._space.wait_for(self._has_room, timeout_seconds)

    # used by the server's thread

    def deliverable(self) -> Iterator[Record]:
        """Records that are neither committed nor rejected, oldest first."""
        with self._space:
            records = list(self._records.values())
        for record in records:
            id = record.header.id
            if id not in self._committed and id not in self._state.tombstones:
                yield record

    def read_chunk(self, id: SampleId, index: int) -> bytes:
        """Raises KeyError when the sample is not here."""
        record = self._records[id]
        return self._segments[record.segment].read_chunk(record, index)

    def whole(self, id: SampleId) -> bool:
        """Whether the sample is here and every chunk of it is what was written. Reads them all."""
        record = self._records.get(id)
        if record is None:
            return False
        chunks = range(record.header.chunks)
        return not any(frame_fault(self.read_chunk(id, index)) for index in chunks)

    def grant(self, term: Term) -> None:
        """This and the other records of the control log are on the disk when the call returns.
        They raise SpoolFull when they cannot be written; nothing is changed then."""
        self._store(term)

    def commit(self, number: int, trained: IdSet, term: int, rollback: bool = False) -> None:
        """Make a checkpoint's trained set durable, then free what no checkpoint needs again.

        trained: everything that the checkpoint contains. With `rollback` it may have less than the
        last one: the commits before it are forgotten, so that nothing is freed on their word, and
        what is not in it is unfinished again unless its record is still here.
        """
        lost = self._committed - trained if rollback else IdSet()
        with self._space:
            here = IdSet(id for id in [*self._records, *self._state.tombstones] if id in lost)
        gone = (lost - here).to_wire()
        self._store(Commit(number, trained.to_wire(), term, rollback, gone))
        self._committed = trained.copy()
        self._free()

    def tombstone(self, id: SampleId, state: str, reason: str) -> None:
        """Record that a prompt ended untrained: `rejected`, `quarantined` or `tail`."""
        self._store(Tombstone(id, state, reason))
        self._free()

    def suspect(self, counts: dict[SampleId, int]) -> None:
        """Replace `suspects`: in how many terms in a row a lost member was at work on a sample."""
        self._store(Suspects(list(counts.items())))

    def void(self, id: SampleId, reason: str) -> None:
        """The sample's record is damaged: forget it, so that the sample is unfinished again.
        Raises KeyError when it has none."""
        record = self._records[id]
        self._store(Void(id, *record.place, reason))
        with self._space:
            del self._records[id]
            self._segments[record.segment].ids.discard(id)
        self._free()

    def settle_lost(self, prompts: IdSet) -> IdSet:
        """The trainer's ledger has been committed here, so what is unfinished in shards whose
        spool is lost (`lost`) will be generated again. Returns those ids, which count as
        regenerated from now on, and `lost` is empty.

        prompts: every id of the prompt file that can be used.
        """
        with self._space:
            mine = prompts.within(self.lost)
            done = IdSet([*self._records, *self._state.tombstones])
        again = mine - self._committed - done
        if self.lost.ranges:
            self._store(control.Owned(self.shards, _none(self.shards), again.to_wire()))
        return again

    def sync_when_due(self) -> None:
        """Once a second under fsync = "interval". Called by the server's thread, which goes on
        when the engine has nothing to store."""
        due = time.monotonic() - self._synced_at >= FSYNC_INTERVAL_SECONDS
        if self._config.fsync == "interval" and due:
            self._sync()

    # what it knows

    @property
    def shards(self) -> Shards:
        """Those whose prompts this spool answers for."""
        assert self._state.owned is not None
        return self._state.owned.shards

    @property
    def lost(self) -> Shards:
        """Those of them that were taken over from a spool that is gone. Nothing of them may be
        generated before the trainer has said what it has: see `settle_lost`."""
        assert self._state.owned is not None
        return self._state.owned.lost

    @property
    def term(self) -> Term | None:
        return self._state.term

    @property
    def committed(self) -> IdSet:
        return self._committed

    @property
    def commit_number(self) -> int:
        return self._state.commits[-1].number if self._state.commits else 0

    @property
    def commit_term(self) -> int:
        return self._state.commits[-1].term if self._state.commits else 0

    @property
    def suspects(self) -> dict[SampleId, int]:
        return self._state.suspects

    @property
    def regenerated(self) -> IdSet:
        """Made again, or to be, because what was there first is damaged or lost."""
        return self._state.regenerated

    @property
    def tombstones(self) -> dict[SampleId, Tombstone]:
        return self._state.tombstones

    @property
    def alarm(self) -> str:
        """Why admission is paused (quota, free-space floor, full disk); empty when it is not."""
        with self._space:
            return self._limits.alarm(self._bytes(), self._spare())

    @property
    def fill(self) -> float:
        """Bytes of the segments, as a share of what quota and disk let them grow to."""
        return self._bytes() / self._capacity()

    @property
    def checkpoint_bytes(self) -> float:
        """What a checkpoint should cover to be worth asking for: so many fit into the spool."""
        return self._capacity() / (self._config.keep_checkpoints + 2)

    def statistics(self) -> SpoolStatistics:
        alarm = self.alarm
        with self._space:
            return SpoolStatistics(
                self._bytes(),
                self._config.quota_bytes,
                len(self._records),
                len(self._committed),
                len(self._state.tombstones),
                self._logical_bytes,
                self._encoded_bytes,
                alarm,
                len(self._state.regenerated),
            )

    def close(self) -> None:
        self._sync()
        if current := self._segments.get(self._number):
            current.seal()
        self._resources.close()

    # opening

    def _own(self, owner: Owner) -> None:
        if self._state.owned is not None:
            return
        if segment_paths(self._config.dir):
            path = self._config.dir / CONTROL_LOG
            raise SpoolDamaged(path, "is lost or empty, and there are samples beside it")
        chosen = owner.chosen()
        self._store(control.Owned(chosen, _none(chosen)))

    def _load_segments(self) -> None:
        paths = segment_paths(self._config.dir)
        damages: list[Damage] = []
        for number, path in paths:
            segment, records, bad = Segment.open(path, number, last=path == paths[-1][1])
            self._segments[number] = segment
            live = [record for record in records if record.place not in self._state.voids]
            segment.ids = {record.header.id for record in live}
            self._records.update((record.header.id, record) for record in live)
            damages += bad
        for damage in damages:
            self._note(damage)

    def _note(self, damage: Damage) -> None:
        """Damage that nobody could know of is written down, so that it is reported for good."""
        name = damage.id or "a sample"
        where = f"segment {damage.segment}, bytes {damage.start} to {damage.stop}"
        logger.warning("%s is damaged (%s: %s)", name, where, damage.reason)
        if damage.id and damage.place not in self._state.voids and not self._is_finished(damage.id):
            self._store(Void(damage.id, *damage.place, damage.reason))

    def _close_segments(self) -> None:
        for segment in self._segments.values():
            segment.close()

    # space

    def _bytes(self) -> int:
        return sum(segment.end for segment in list(self._segments.values()))

    def _spare(self) -> int:
        current = self._segments.get(self._number)
        return current.spare_bytes if current is not None else 0

    def _capacity(self) -> int:
        with self._space:
            return self._limits.capacity(self._bytes(), self._spare())

    def _has_room(self) -> bool:
        return self._limits.has_room(self._bytes(), self._spare())

    def _writable_segment(self) -> Segment:
        with self._space:
            current = self._segments.get(self._number)
            if current is not None and self._appendable(current):
                self._busy = current
        if self._busy is None:
            self._busy = self._next_segment()
        if self._limits.left(0) > AHEAD_BYTES:
            self._busy.reserve(min(AHEAD_BYTES, self._segment_bytes))
        return self._busy

    def _next_segment(self) -> Segment:
        self._number += 1
        path = self._config.dir / f"{self._number:08d}.seg"
        segment = Segment.create(path, self._number, self._descriptor.stream_id())
        with self._space:
            self._segments[self._number] = segment
            self._busy = segment
        return segment

    def _free(self) -> None:
        gone = self._state.freeable
        with self._space:
            short = not self._has_room()
            for segment in list(self._segments.values()):
                # One that is not full is given up only when nothing else makes room.
                closed = short or not self._appendable(segment)
                if segment is not self._busy and closed and self._is_over(segment, gone):
                    self._delete(segment)
            self._space.notify_all()

    def _delete(self, segment: Segment) -> None:
        del self._segments[segment.number]
        for id in segment.ids:
            if id in self._records and self._records[id].segment == segment.number:
                del self._records[id]
        segment.unlink()

    def _appendable(self, segment: Segment) -> bool:
        return segment.number == self._number and segment.end < self._segment_bytes

    def _is_over(self, segment: Segment, gone: IdSet) -> bool:
        return all(id in gone or id in self._state.tombstones for id in segment.ids)

    def _is_finished(self, id: SampleId) -> bool:
        return id in self._records or id in self._committed or id in self._state.tombstones

    # durability

    def _store(self, record: control.Record) -> None:
        try:
            self._control.append(record)
        except OSError as error:
            raise SpoolFull(self._config.dir, error) from error

    def _sync(self) -> None:
        if self._config.fsync == "never":
            return
        self._synced_at = time.monotonic()
        with self._space:  # a segment is closed under this lock
            segment, self._dirty = self._dirty, None
            if segment is not None and segment.number in self._segments:
                segment.sync()


def _none(shards: Shards) -> Shards:
    return Shards(shards.dataset, shards.epoch, ())
