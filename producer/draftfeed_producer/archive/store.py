"""A spool whose segments are archived before they go, and whose later epochs come out of that."""

from functools import partial

from draftfeed_producer.archive.archiver import Archiver
from draftfeed_producer.archive.index import Archive, ArchiveStatistics
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_producer.spool.control import Regenerated
from draftfeed_producer.spool.segments import Record, Segment
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader


class BeingSealed(Exception):
    """The sample can be had in a moment: its segment is on its way into the archive."""


class ArchivedSpool(Spool):
    """A sample of a later epoch is that of an earlier one under another id, wherever its bytes
    lie: in the archive, or still in a segment of the spool, which is then kept for both."""

    def __init__(
        self, config: SpoolConfig, descriptor: Descriptor, shards: Shards, archive: Archive
    ) -> None:
        """archive: open, and the caller's to close. Raises what `Spool` does."""
        self.archive = archive
        self._shelved: set[SampleId] = set()
        """To be served out of the archive, and not terminal yet."""
        self._leaving: dict[int, IdSet] = {}
        """Lines of the segments that are no longer the spool's and not the archive's yet, in
        epoch 0. `_samples.changed` is held while it changes."""
        super().__init__(config, descriptor, shards)
        self._archiver = Archiver(archive, self._serve_again)
        if config.retain == "archive":
            self._free()  # what the last process had released, and not sealed yet

    def lines(self) -> IdSet:
        """Of the prompt file, as ids of epoch 0: those of which a sample exists already, of
        whatever epoch."""
        with self._samples.changed:  # the archive's later: what leaves here meanwhile is there
            lines = IdSet(record.header.id for record in self._samples.records()).in_epoch(0)
            lines.update(IdSet.union(self._leaving.values()))
        lines.update(self.archive.lines)
        return lines

    def shelve(self, id: SampleId) -> SampleHeader | None:
        """Serve this sample from what exists of its line. None when there is nothing, or it cannot
        be read: then it is to be generated. Raises BeingSealed."""
        with self._samples.changed:
            if (shared := self._shared(id)) is not None:
                return shared
            line = id.in_epoch(0)
            if any(line in lines for lines in self._leaving.values()):
                raise BeingSealed
        header = self.archive.header(id)
        if header is not None:
            self._shelved.add(id)
        return header

    def _shared(self, id: SampleId) -> SampleHeader | None:
        """The header of the line's sample of another epoch that is here, under this id."""
        for epoch in self.shards.each_epoch:
            source = id.in_epoch(epoch)
            if source != id and source in self._samples:
                return self._samples.share(source, id).header
        return None

    def finished(self, id: SampleId) -> bool:
        """Or shelved."""
        return super().finished(id) or id in self._shelved

    def read_chunk(self, id: SampleId, index: int) -> bytes:
        if id in self._samples:
            return super().read_chunk(id, index)
        if id in self._shelved and id not in self.archive:
            return b""  # found damaged in another epoch, while this one was being served
        return self.archive.read_chunk(id, index)

    def read_ahead(self, id: SampleId) -> None:
        if id not in self._samples:
            self.archive.read_ahead(id)

    def header_of(self, id: SampleId) -> SampleHeader | None:
        with self._samples.changed:
            here = super().header_of(id) or self._shared(id)
        return here or self.archive.header(id)

    def whole(self, id: SampleId) -> bool:
        return super().whole(id) if id in self._samples else self.archive.whole(id)

    def void(self, id: SampleId, reason: str) -> None:
        if id in self._samples:
            super().void(id, reason)
            return
        if id not in self.archive and id not in self._shelved:
            raise KeyError(id)
        # Nothing of it is written into the archive, which others read. A start after this serves
        # the damaged one again, has it refused again, and comes to the same end.
        self._store(Regenerated(IdSet([id]).to_wire()))
        self._shelved.discard(id)
        self.archive.spoil(id)

    def commit(self, number: int, trained: IdSet, term: int, rollback: bool = False) -> None:
        super().commit(number, trained, term, rollback)
        self._shelved = {id for id in self._shelved if id not in trained}

    def tombstone(self, id: SampleId, state: str, reason: str) -> None:
        super().tombstone(id, state, reason)
        self._shelved.discard(id)

    def archive_rest(self) -> None:
        """When all is over: what the last checkpoints still kept here is archived too, and stays.
        Returns when that is on the disk, or after `interrupt`."""
        if self._config.retain == "archive":
            for segment in self._samples.segments():
                link = self._samples.closed(segment)
                self._archiver.take(segment, link=link, done=lambda: None)
            self._archiver.finish()

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
        ids, lines, shards = super()._present(), self.lines(), self.shards
        for epoch in shards.each_epoch:
            ids.update(lines.in_epoch(epoch))
        return ids

    def _dispose(self, segments: list[Segment]) -> None:
        if self._config.retain != "archive":
            super()._dispose(segments)
            return
        for segment in segments:
            self._leaving[segment.number] = IdSet(segment.ids).in_epoch(0)
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

    def _serve_again(self, record: Record) -> bool:
        """Not what killed the trainer, nor what is void."""
        id = record.header.id
        tombstone = self._state.tombstones.get(id)
        killer = tombstone is not None and tombstone.state == "quarantined"
        return not killer and record.place not in self._state.voids
