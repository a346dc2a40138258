"""A spool whose segments are archived before they go, and whose later epochs come out of that."""

from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from draftfeed_producer.archive.archiver import Archiver
from draftfeed_producer.archive.index import Archive, ArchiveStatistics
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_producer.spool.control import Regenerated
from draftfeed_producer.spool.segments import Places, Record, Segment, is_whole
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader

_VOID = -2
"""A place that `Archive.place_of` never gives."""


class BeingSealed(Exception):
    """The sample can be had in a moment: its segment is on its way into the archive."""


class _Left(NamedTuple):
    """A sample of a segment that is no longer the spool's and not the archive's yet."""

    segment: Segment
    record: Record


class ArchivedSpool(Spool):
    """A sample of a later epoch is that of an earlier one under another id, wherever its bytes
    lie: in the archive, or still in a segment of the spool, which is then kept for both."""

    def __init__(
        self, config: SpoolConfig, descriptor: Descriptor, shards: Shards, archive: Archive
    ) -> None:
        """archive: open, and the caller's to close. Raises what `Spool` does."""
        self.archive = archive
        self._shelved: dict[SampleId, int] = {}
        """To be served out of the archive, and not terminal yet; from which place in it. Or _VOID:
        with the header of a record that was another's, too, and is void by now. Those are to be
        refused: what was made instead may have more rows, or fewer."""
        self._leaving: dict[int, dict[SampleId, _Left]] = {}
        """By number of the segment, by line in epoch 0. `_samples.changed` is held while it
        changes."""
        super().__init__(config, descriptor, shards)
        self._archiver = Archiver(archive, self._serve_again, self._reserved)
        if config.retain == "archive":
            self._free()  # what the last process had released, and not sealed yet

    def lines(self) -> IdSet:
        """Of the prompt file, as ids of epoch 0: those of which a sample exists already, of
        whatever epoch."""
        with self._samples.changed:  # the archive's later: what leaves here meanwhile is there
            lines = IdSet(record.header.id for record in self._samples.records()).in_epoch(0)
            lines.update(line for found in self._leaving.values() for line in found)
        lines.update(self.archive.lines)
        return lines

    def replayable(self) -> IdSet:
        """Of every epoch, whether it has begun or not."""
        lines = self.lines() - self.archive.lost
        return IdSet.union(lines.in_epoch(epoch) for epoch in self.shards.each_epoch)

    def shelve(self, id: SampleId) -> SampleHeader | None:
        """Serve this sample from what exists of its line. None when there is nothing, or it cannot
        be read: then it is to be generated. Raises BeingSealed."""
        with self._samples.changed:
            if (shared := self._shared(id)) is not None:
                return shared
            if self._left(id) is not None and not self._archiver.stuck:
                raise BeingSealed
        header = self.archive.header(id)
        if header is not None:  # its place after that: it may be another copy's by then
            self._shelved[id] = self.archive.place_of(id)
        return header

    def _shared(self, id: SampleId) -> SampleHeader | None:
        """The header of the line's sample of another epoch that is here, under this id, which has
        it from now on, too."""
        source = self._source(id)
        return None if source is None else self._samples.share(source, id).header

    def _source(self, id: SampleId) -> SampleId | None:
        """Of another epoch: the last one, which was made again if the others were damaged."""
        epochs = (id.in_epoch(epoch) for epoch in reversed(self.shards.each_epoch))
        return next((one for one in epochs if one != id and one in self._samples), None)

    def finished(self, id: SampleId) -> bool:
        """Or shelved."""
        return super().finished(id) or self._shelved.get(id, _VOID) != _VOID

    def read_chunk(self, id: SampleId, index: int) -> bytes | memoryview:
        """Empty when what there was of it has gone, for it was damaged: whoever gets that refuses
        it, and it is made again. Raises KeyError when it is terminal."""
        if self._is_here(id):
            return super().read_chunk(id, index)
        with self._samples.changed:  # or it would be deleted meanwhile
            if (left := self._brought_back(id)) is not None:
                return left.segment.read_chunk(left.record, index)
        if self._stays(id):
            with suppress(KeyError):
                chunk = self.archive.read_chunk(id, index)
                if self._stays(id):  # else it was read from another copy, which is of another
                    return chunk
        if super().finished(id):
            raise KeyError(id)
        return b""

    def places(self, id: SampleId, index: int, count: int) -> Places | None:
        if self._is_here(id):
            return super().places(id, index, count)
        places = self.archive.places(id, index, count) if self._stays(id) else None
        return places if self._stays(id) else None  # as in `read_chunk`

    def _is_here(self, id: SampleId) -> bool:
        with self._samples.changed:
            return id in self._samples or self._taken_back(id)

    def _taken_back(self, id: SampleId) -> bool:
        """By a rollback: what it is to be read from was not asked for yet."""
        return id not in self._shelved and self._shared(id) is not None

    def _stays(self, id: SampleId) -> bool:
        """Whether the archive still has of the line what was shelved under this id."""
        place = self.archive.place_of(id)
        return self._shelved.get(id, place) == place

    def _left(self, id: SampleId) -> _Left | None:
        """What there is of the line in a segment that is leaving."""
        line = id.in_epoch(0)
        return next((found[line] for found in self._leaving.values() if line in found), None)

    def _brought_back(self, id: SampleId) -> _Left | None:
        """By a rollback, out of a segment that is leaving. None when it is read from elsewhere:
        nobody is to get half of one sample and half of another of its line."""
        elsewhere = id in self._shelved or id in self.archive
        return None if elsewhere else self._left(id)

    def read_ahead(self, id: SampleId) -> None:
        if id not in self._samples:
            self.archive.read_ahead(id)

    def header_of(self, id: SampleId) -> SampleHeader | None:
        with self._samples.changed:
            here = super().header_of(id)
            if here is None and (source := self._source(id)) is not None:
                here = msgspec.structs.replace(self._samples.record(source).header, id=id)
            left = self._left(id)  # looked at before the archive, into which it goes
        header = here or self.archive.header(id)
        if header is None and left is not None:
            header = msgspec.structs.replace(left.record.header, id=id)
        return header

    def whole(self, id: SampleId) -> bool:
        if id in self._samples:
            return super().whole(id)
        with self._samples.changed:
            if (left := self._brought_back(id)) is not None:
                read = partial(left.segment.read_chunk, left.record)
                return is_whole(left.record.header.chunks, read)
        return self._stays(id) and self.archive.whole(id)

    def void(self, id: SampleId, reason: str) -> None:
        if id in self._samples:
            record = self._samples.record(id)
            self._store(Regenerated(IdSet([id]).to_wire()))
            self._void(record.own or id, record.place, reason)
            for one in self._samples.sharing(id):  # who is not terminal is refused in his turn
                self._samples.forget(one)
                if one != id and not self.finished(one):
                    self._shelved[one] = _VOID
            self._free()
            return
        # Nothing of it is written into the archive, which others read. A start after this serves
        # the damaged one again, has it refused again, and comes to the same end.
        self._store(Regenerated(IdSet([id]).to_wire()))
        if self._stays(id):
            self.archive.spoil(id)
        self._shelved.pop(id, None)

    def commit(self, number: int, trained: IdSet, term: int, rollback: bool = False) -> None:
        super().commit(number, trained, term, rollback)
        for id in [id for id in self._shelved if id in trained]:
            del self._shelved[id]

    def tombstone(self, id: SampleId, state: str, reason: str) -> None:
        super().tombstone(id, state, reason)
        self._shelved.pop(id, None)

    def archive_rest(self) -> int:
        """When all is over: what the last checkpoints still kept here is archived too, and stays.
        Returns how many segments are left to the next start: after `interrupt`, or of a root that
        hangs."""
        if self._config.retain != "archive":
            return 0
        for segment in self._samples.all_segments():
            link = self._samples.closed(segment)
            self._archiver.take(segment, link=link, done=lambda: None)
        return self._archiver.finish()

    def wait_for_space(self, timeout_seconds: float) -> bool:
        """Segments that wait for a root that is too slow are given up before generation stops."""
        if super().wait_for_space(timeout_seconds):
            return True
        while timeout_seconds and self._archiver.give_way():
            if self._has_room():
                return True
        return False

    def interrupt(self) -> None:
        self._archiver.interrupt()

    def archive_statistics(self) -> ArchiveStatistics:
        return self.archive.statistics(self._archiver.alarm, self._archiver.missed)

    def close(self) -> None:
        self._archiver.close()
        super().close()

    def _present(self) -> IdSet:
        ids, lines = super()._present(), self.lines()
        lines.update(ids.in_epoch(0))
        for epoch in self.shards.each_epoch:
            ids.update(lines.in_epoch(epoch))
        return ids

    def _dispose(self, segments: list[Segment]) -> None:
        if self._config.retain != "archive":
            super()._dispose(segments)
            return
        for segment in segments:
            found = {one.header.id.in_epoch(0): _Left(segment, one) for one in segment.left}
            self._leaving[segment.number] = found
            done = partial(self._sealed, segment)
            self._archiver.take(segment, link=self._samples.closed(segment), done=done)

    def _free(self) -> None:
        if self._config.retain != "archive":
            super()._free()
            return
        with self._samples.changed:  # nobody is to look between the two
            super()._free()

    def _sealed(self, segment: Segment) -> None:
        """Or given up."""
        with self._samples.changed:
            del self._leaving[segment.number]
        self._samples.discard([segment])

    def _reserved(self) -> int:
        return self._space.reserved(self._samples.used_bytes, self._samples.spare_bytes)

    def _serve_again(self, record: Record) -> bool:
        """Not what killed the trainer, nor what is void."""
        line = record.header.id.in_epoch(0)
        tombstones = list(self._state.tombstones.values())
        ended = (one.id.in_epoch(0) for one in tombstones if one.state == "quarantined")
        return line not in ended and record.place not in self._state.voids
