"""The spool as its producer uses it."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

from msgspec.structs import replace

from draftfeed_producer.errors import SpoolDamaged, SpoolError, SpoolFull
from draftfeed_producer.spool import control
from draftfeed_producer.spool.config import AUTO, SpoolConfig
from draftfeed_producer.spool.control import Commit, Suspects, Term, Tombstone, Void
from draftfeed_producer.spool.control_log import ControlLog
from draftfeed_producer.spool.directory import (
    CONTROL_LOG,
    Owner,
    claim,
    lock,
    segment_paths,
)
from draftfeed_producer.spool.fresh import FRESH_BYTES
from draftfeed_producer.spool.samples import AHEAD_BYTES, Samples
from draftfeed_producer.spool.segments import Damage, Places, Record, Segment
from draftfeed_producer.spool.space import Space
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.encoder import Encoder
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import Sample, SampleHeader, header_of

logger = logging.getLogger(__name__)


class SpoolStatistics(NamedTuple):
    bytes: int
    quota_bytes: int
    samples: int
    committed: int
    ended: dict[str, int]
    """Prompts that ended untrained, by state."""
    logical_bytes: int
    """Decoded bytes of all samples appended since this process began."""
    encoded_bytes: int
    alarm: str = ""
    """Why admission is paused; empty when it is not."""
    regenerated: int = 0
    capacity_bytes: int = 0
    """To what it can grow, by its quota or the disk, whichever ends first."""


class Spool:
    """Appended to by one thread, read and committed to by another."""

    def __init__(self, config: SpoolConfig, descriptor: Descriptor, shards: Shards) -> None:
        """shards: all of the prompt file. Which of them are its own the spool remembers.

        Raises SpoolBusy when another producer owns it, SpoolMismatch when it was made for another
        stream, prompt file or choice of shards, ShardError when those do not exist, SpoolDamaged
        when its control log is, SpoolError when the directory cannot be used.
        """
        self._config = config
        self._encoder = Encoder(
            config.chooser, config.chunk_bytes, config.encode_threads, kept_bytes=FRESH_BYTES
        )
        self._as_rows = False
        self._space = Space(config)
        self._epochs = shards.epochs
        self._committed = IdSet()
        self._ended_counts: Counter[str] = Counter()
        self._kept_bytes: int | None = None
        """None: to be counted anew. It takes long, and is asked for often."""
        self._recording = threading.Lock()
        """Held while a record is written to the control log."""
        segment_bytes = min(config.segment_bytes, config.quota_bytes // 8)
        stream_id = descriptor.stream_id()
        self._samples = Samples(config.dir, stream_id, segment_bytes, config.fsync)
        with ExitStack() as stack:
            stack.callback(self._encoder.close)
            stack.callback(os.close, lock(config.dir, create=True))
            owner = Owner.of(descriptor, shards, config.shards)
            claim(config.dir, owner)
            try:
                self._load(owner, stack)
            except OSError as error:
                raise SpoolError(f"{config.dir}: cannot be used: {error.strerror}") from error
            self._resources = stack.pop_all()
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

        ahead = self._space.left(0) > AHEAD_BYTES
        try:
            with closing(self._encoder.frames(sample, as_rows=self._as_rows)) as frames:
                record = self._samples.append(frames, header, ahead=ahead)
        except OSError as error:
            self._space.refused(error, sample.hidden_states.nbytes)
            raise SpoolFull(self._config.dir, error) from error
        self._space.accepted()
        self._logical_bytes += record.header.decoded_bytes
        self._encoded_bytes += record.header.encoded_bytes
        return record

    def prefer_rows(self, local: bool) -> None:
        """Whether all that is generated now goes to members of this host. Any thread may say so."""
        auto = self._config.codec == AUTO and self._config.retain != "archive"
        self._as_rows = local and auto

    def finished(self, id: SampleId) -> bool:
        """Whether the prompt has a record, a commit or a tombstone here."""
        return id in self._samples or id in self._committed or id in self._state.tombstones

    def quarantined(self, id: SampleId) -> bool:
        """Whether its line ended so, in whichever epoch."""
        ended = (self._state.tombstones.get(id.in_epoch(one)) for one in self.shards.each_epoch)
        return any(one is not None and one.state == "quarantined" for one in ended)

    def wait_for_space(self, timeout_seconds: float) -> bool:
        """Whether there is room now, or within the time: under the quota, above the free-space
        floor, and on the disk when that was full. `alarm` says what is missing."""
        if self._has_room():
            return True
        self._free()  # what was committed earlier may lie in a segment that was not full
        with self._samples.changed:
            return self._samples.changed.wait_for(self._has_room, timeout_seconds)

    # used by the server's thread

    def deliverable(self) -> Iterator[Record]:
        """Records that are neither committed nor rejected, oldest first."""
        for record in self._samples.records():
            id = record.header.id
            if id not in self._committed and id not in self._state.tombstones:
                yield record

    def keep_fresh(self, wanted: bool) -> None:
        """Whether somebody will soon ask `read_chunk` for what is generated now. Any thread may
        say so."""
        self._samples.fresh.wanted = wanted

    def retire_files(self) -> None:
        """Somebody who must not read on may have the segments' files open: what comes is written
        to others."""
        self._samples.retire_files()

    def read_chunk(self, id: SampleId, index: int) -> bytes | memoryview:
        """Raises KeyError when the sample is not here."""
        return self._samples.read_chunk(id, index)

    def places(self, id: SampleId, index: int, count: int) -> Places | None:
        """Where the chunk lies, and those behind it, so many in all at most; None when it is to be
        had from `read_chunk` only. Raises KeyError when the sample is not here."""
        return self._samples.places(id, index, count)

    def read_ahead(self, id: SampleId) -> None:
        """The sample's chunks are asked for soon. What the spool holds was written here not long
        ago, and is mostly in memory still."""

    def header_of(self, id: SampleId) -> SampleHeader | None:
        """None when it has no record here; committed samples have one until they are freed."""
        return self._samples.record(id).header if id in self._samples else None

    def whole(self, id: SampleId) -> bool:
        """Whether the sample is here and every chunk of it is what was written. Reads them all."""
        return self._samples.whole(id)

    def grant(self, term: Term) -> None:
        """This and the other records of the control log are on the disk when the call returns.
        They raise OSError when they cannot be written, and may be tried again."""
        self._store(term)

    def commit(self, number: int, trained: IdSet, term: int, rollback: bool = False) -> None:
        """Make a checkpoint's trained set durable, then free what no checkpoint needs again.

        trained: everything that the checkpoint contains. With `rollback` it may have less than the
        last one: the commits before it are forgotten, so that nothing is freed on their word, and
        what is not in it is unfinished again unless its record is still here.
        """
        with self._samples.changed:  # nothing is freed while it is decided what was
            lost = self._committed - trained if rollback else IdSet()
            gone = lost - self._present() if lost else lost
            self._store(Commit(number, trained.to_wire(), term, rollback, gone.to_wire()))
            self._committed = trained.copy()
            self._kept_bytes = None
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
        self._void(id, self._samples.record(id).place, reason)
        self._samples.forget(id)
        self._free()

    def replayable(self) -> IdSet:
        """What need not be generated, though there is no record of it under its id."""
        return IdSet()

    def settle_lost(self, prompts: IdSet) -> IdSet:
        """The trainer's ledger has been committed here, so what is unfinished in shards whose
        spool is lost (`lost`) will be generated again. Returns those ids, which count as
        regenerated from now on, and `lost` is empty. Any thread may call it.

        prompts: every id of the prompt file that can be used.
        """
        again = prompts.within(self.lost) - self._committed - self._present()
        if self.lost.ranges:
            self._store(control.Owned(self.shards, _none(self.shards), again.to_wire()))
        return again

    def sync_when_due(self) -> None:
        """Once a second under fsync = "interval". Called by the server's thread, which goes on
        when the engine has nothing to store."""
        self._samples.sync_when_due()

    # what it knows

    @property
    def shards(self) -> Shards:
        """Those whose prompts this spool answers for."""
        assert self._state.owned is not None
        return replace(self._state.owned.shards, epochs=self._epochs)

    @property
    def lost(self) -> Shards:
        """Those of them that were taken over from a spool that is gone. Nothing of them may be
        generated before the trainer has said what it has: see `settle_lost`."""
        assert self._state.owned is not None
        return replace(self._state.owned.lost, epochs=self._epochs)

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
        return self._state.regenerated.within(self.shards)

    @property
    def tombstones(self) -> dict[SampleId, Tombstone]:
        return self._state.tombstones

    @property
    def alarm(self) -> str:
        """Why admission is paused (quota, free-space floor, full disk); empty when it is not."""
        samples = self._samples
        return self._space.alarm(samples.used_bytes, samples.spare_bytes, samples.segments)

    @property
    def fill(self) -> float:
        """Bytes of the segments, as a share of what quota and disk let them grow to."""
        return self._samples.used_bytes / self._capacity()

    @property
    def kept_bytes(self) -> int:
        """Encoded, of samples that are kept only because an older checkpoint may still be
        restored."""
        if self._kept_bytes is None:
            kept = self._committed - self._state.freeable
            headers = [record.header for record in self._samples.records()]
            self._kept_bytes = sum(one.encoded_bytes for one in headers if one.id in kept)
        return self._kept_bytes

    def shortage(self, checkpoint_samples: int) -> str:
        """Why the spool is too small for checkpoints that lie so many samples apart; empty when it
        is not, or no sample is here to judge by. A sample is deleted when the oldest of the last K
        checkpoints contains it, and one more interval is being trained."""
        samples = len(self._samples)
        if not samples:
            return ""
        intervals = self._config.keep_checkpoints + 1
        needed = intervals * checkpoint_samples * self._samples.used_bytes // samples
        if needed <= self._config.quota_bytes:
            return ""
        return (
            f"a checkpoint every {checkpoint_samples} samples needs a spool of {needed} bytes "
            f"({intervals} intervals), quota_bytes is {self._config.quota_bytes}; the trainer will "
            "be asked for more of them"
        )

    @property
    def checkpoint_bytes(self) -> float:
        """What a checkpoint should cover to be worth asking for: so many fit into the spool."""
        return self._capacity() / (self._config.keep_checkpoints + 2)

    def statistics(self) -> SpoolStatistics:
        return SpoolStatistics(
            self._samples.used_bytes,
            self._config.quota_bytes,
            len(self._samples),
            len(self._committed),
            self._ended(),
            self._logical_bytes,
            self._encoded_bytes,
            self.alarm,
            len(self.regenerated),
            self._capacity(),
        )

    def _ended(self) -> dict[str, int]:
        """Counted anew only when there are more: it is asked for twice a second."""
        tombstones = self._state.tombstones
        if len(tombstones) != self._ended_counts.total():
            self._ended_counts = Counter(one.state for one in list(tombstones.values()))
        return dict(self._ended_counts)

    def close(self) -> None:
        self._resources.close()

    # opening

    def _load(self, owner: Owner, stack: ExitStack) -> None:
        path = self._config.dir / CONTROL_LOG
        self._control = ControlLog(path, self._config.keep_checkpoints)
        stack.callback(self._control.close)
        self._state = self._control.state
        self._committed = self._state.committed
        self._own(owner)
        stack.callback(self._samples.close)
        for damage in self._samples.load(self._state.voids):
            self._note(damage)

    def _own(self, owner: Owner) -> None:
        if self._state.owned is not None:
            return
        if segment_paths(self._config.dir):
            path = self._config.dir / CONTROL_LOG
            raise SpoolDamaged(path, "is lost or empty, and there are samples beside it")
        chosen = owner.chosen()
        self._store(control.Owned(chosen, _none(chosen)))

    def _note(self, damage: Damage) -> None:
        """Damage that nobody could know of is written down, so that it is reported for good."""
        name = damage.id or "a sample"
        where = f"segment {damage.segment}, bytes {damage.start} to {damage.stop}"
        logger.warning("%s is damaged (%s: %s)", name, where, damage.reason)
        if damage.id and not self.finished(damage.id):
            self._void(damage.id, damage.place, damage.reason)

    def _void(self, id: SampleId, place: tuple[int, int], reason: str) -> None:
        # Else a power cut could take the record and leave its place to another.
        self._samples.force(place[0])
        self._store(Void(id, *place, reason))

    def _store(self, record: control.Record) -> None:
        with self._recording:
            self._control.append(record)

    def _present(self) -> IdSet:
        """Samples that have a record or a tombstone."""
        return IdSet([*(r.header.id for r in self._samples.records()), *self._state.tombstones])

    def _free(self) -> None:
        with self._samples.changed:
            gone = self._state.freeable
            done = self._samples.release(
                lambda id: id in gone or id in self._state.tombstones, short=not self._has_room()
            )
        self._kept_bytes = None if done else self._kept_bytes
        self._dispose(done)

    def _dispose(self, segments: list[Segment]) -> None:
        """No checkpoint needs anything of them."""
        others_need_it = self._space.left(self._samples.spare_bytes) < 0
        self._samples.discard(segments, 0 if others_need_it else self._config.quota_bytes)

    def _has_room(self) -> bool:
        samples = self._samples
        return self._space.has_room(samples.used_bytes, samples.spare_bytes, samples.segments)

    def _capacity(self) -> int:
        return self._space.capacity(self._samples.used_bytes, self._samples.spare_bytes)


def _none(shards: Shards) -> Shards:
    return Shards(shards.dataset, shards.epoch, ())
