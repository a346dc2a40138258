"""The spool: the producer's durable log of encoded samples, and the record of what became of them.

DIR/LOCK            held while a producer owns the spool
DIR/spool.json      stream and prompt file that it belongs to
DIR/00000001.seg    samples, appended; deleted whole when every one of them is committed
DIR/control.log     commits, tombstones, terms
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from draftfeed_producer.errors import SpoolBusy, SpoolError, SpoolFull, SpoolMismatch
from draftfeed_producer.spool.control import Commit, ControlLog, Term, Tombstone
from draftfeed_producer.spool.segments import Record, Segment, sync_directory
from draftfeed_proto import codecs
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.limits import MAX_CHUNK_BYTES
from draftfeed_proto.sample import (
    DEFAULT_CHUNK_BYTES,
    Sample,
    SampleHeader,
    encode_chunks,
    header_of,
)

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the directory as a whole; entries carry a version of their own."""
FSYNC_INTERVAL_SECONDS = 1.0


class SpoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dir: Path
    """Where the spool lives; made when missing."""
    quota_bytes: int = 64 << 30
    """Generation pauses when the segments reach this size, and goes on when commits free some.
    What the engine has begun by then is still stored: leave room for one batch more."""
    segment_bytes: int = 256 << 20
    """A segment is closed at this size, or at an eighth of the quota. Space comes back a segment
    at a time."""
    fsync: Literal["always", "interval", "never"] = "interval"
    """When a record is forced to disk before it is offered. Killing the process loses nothing
    under any of them; losing power loses what `interval` (1 s) or `never` left to the kernel."""
    keep_checkpoints: int = 2
    """Samples are deleted when the oldest of this many last checkpoints contains them."""
    codec: str = "zstd"
    """raw or zstd."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Decoded bytes of one chunk, 1-8 MiB."""
    audit: bool = False
    """Store a digest of every sample's tensors, taken before encoding; consumers compare it."""

    def __post_init__(self) -> None:
        for field in ("quota_bytes", "segment_bytes", "keep_checkpoints", "chunk_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, it must be at least 1")
        if self.chunk_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}, the limit is {MAX_CHUNK_BYTES}")
        if self.codec not in codecs.names():
            raise ValueError(f"codec is {self.codec!r}, known are {', '.join(codecs.names())}")


class SpoolStatistics(NamedTuple):
    bytes: int
    quota_bytes: int
    samples: int
    committed: int
    tombstones: int
    logical_bytes: int
    """Decoded bytes of all samples appended since this process began."""
    encoded_bytes: int


class Owner(msgspec.Struct, frozen=True):
    """Contents of spool.json."""

    format: int
    descriptor: Descriptor
    dataset: str


class Spool:
    """Appended to by one thread, read and committed to by another."""

    def __init__(self, config: SpoolConfig, descriptor: Descriptor, dataset: str) -> None:
        """Raises SpoolBusy when another producer owns it, SpoolMismatch when it was made for
        another stream or prompt file, SpoolError when the directory cannot be used."""
        self._config = config
        self._descriptor = descriptor
        self._codec = codecs.by_name(config.codec)
        self._segments: dict[int, Segment] = {}
        with ExitStack() as stack:
            stack.callback(os.close, _lock(config.dir))
            _check_owner(config.dir, Owner(FORMAT, descriptor, dataset))
            self._control = ControlLog(config.dir / "control.log", config.keep_checkpoints)
            stack.callback(self._control.close)
            stack.callback(self._close_segments)
            self._records: dict[SampleId, Record] = {}
            self._load_segments()
            self._number = max(self._segments, default=0)
            """Of the segment that is appended to."""
            self._resources = stack.pop_all()
        self._committed = self._control.committed
        self._segment_bytes = min(config.segment_bytes, config.quota_bytes // 8)
        self._space = threading.Condition()
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
            raise SpoolFull(self._config.dir, error) from error
        self._dirty = segment
        if self._config.fsync == "always" or not self._appendable(segment):
            self._sync()
        with self._space:
            self._records[sample.id] = record
            self._logical_bytes += record.header.decoded_bytes
            self._encoded_bytes += record.header.encoded_bytes
        return record

    def finished(self, id: SampleId) -> bool:
        """Whether the prompt has a record, a commit or a tombstone here."""
        with self._space:
            return id in self._records or id in self._committed or id in self._control.tombstones

    def wait_for_space(self, timeout_seconds: float) -> bool:
        """Whether there is room under the quota now, or within the time."""
        with self._space:
            return self._space.wait_for(
                lambda: self._bytes() < self._config.quota_bytes, timeout_seconds
            )

    # used by the server's thread

    def deliverable(self) -> Iterator[Record]:
        """Records that are neither committed nor rejected, oldest first."""
        with self._space:
            records = list(self._records.values())
        for record in records:
            id = record.header.id
            if id not in self._committed and id not in self._control.tombstones:
                yield record

    def read_chunk(self, id: SampleId, index: int) -> bytes:
        record = self._records[id]
        return self._segments[record.segment].read_chunk(record, index)

    def commit(self, number: int, trained: IdSet) -> None:
        """Make a checkpoint's trained set durable, then free what no checkpoint needs again."""
        self._control.append(Commit(number, trained.to_wire()))
        self._committed = trained.copy()
        self._free()

    def tombstone(self, id: SampleId, state: str, reason: str) -> None:
        """Record that a prompt ended untrained: `rejected` or `quarantined`."""
        self._control.append(Tombstone(id, state, reason))
        self._free()

    def grant(self, term: Term) -> None:
        self._control.append(term)

    @property
    def term(self) -> Term | None:
        return self._control.term

    @property
    def committed(self) -> IdSet:
        return self._committed

    @property
    def commit_number(self) -> int:
        return self._control.commits[-1].number if self._control.commits else 0

    @property
    def tombstones(self) -> dict[SampleId, Tombstone]:
        return self._control.tombstones

    @property
    def fill(self) -> float:
        """Bytes of the segments, as a share of the quota."""
        return self._bytes() / self._config.quota_bytes

    @property
    def checkpoint_bytes(self) -> float:
        """What a checkpoint should cover to be worth asking for: so many fit into the quota."""
        return self._config.quota_bytes / (self._config.keep_checkpoints + 2)

    def statistics(self) -> SpoolStatistics:
        with self._space:
            return SpoolStatistics(
                self._bytes(),
                self._config.quota_bytes,
                len(self._records),
                len(self._committed),
                len(self._control.tombstones),
                self._logical_bytes,
                self._encoded_bytes,
            )

    def close(self) -> None:
        self._sync()
        self._resources.close()

    def _close_segments(self) -> None:
        for segment in self._segments.values():
            segment.close()

    def _bytes(self) -> int:
        return sum(segment.end for segment in list(self._segments.values()))

    def _load_segments(self) -> None:
        paths = sorted(self._config.dir.glob("*.seg"))
        for path in paths:
            number = int(path.stem)
            segment, records = Segment.open(path, number, last=path == paths[-1])
            self._segments[number] = segment
            self._records.update((record.header.id, record) for record in records)

    def _writable_segment(self) -> Segment:
        with self._space:
            current = self._segments.get(self._number)
        if current is not None and self._appendable(current):
            return current
        self._number += 1
        path = self._config.dir / f"{self._number:08d}.seg"
        segment = Segment.create(path, self._number, self._descriptor.stream_id())
        with self._space:
            self._segments[self._number] = segment
        return segment

    def sync_when_due(self) -> None:
        """Once a second under fsync = "interval". Called by the server's thread, which goes on
        when the engine has nothing to store."""
        due = time.monotonic() - self._synced_at >= FSYNC_INTERVAL_SECONDS
        if self._config.fsync == "interval" and due:
            self._sync()

    def _sync(self) -> None:
        if self._config.fsync == "never":
            return
        self._synced_at = time.monotonic()
        with self._space:  # a segment is closed under this lock
            segment, self._dirty = self._dirty, None
            if segment is not None and segment.number in self._segments:
                segment.sync()

    def _free(self) -> None:
        gone = self._control.freeable
        with self._space:
            done = [
                segment
                for segment in self._segments.values()
                if not self._appendable(segment) and all(self._over(id, gone) for id in segment.ids)
            ]
            for segment in done:
                del self._segments[segment.number]
                for id in segment.ids:
                    self._records.pop(id, None)
                segment.unlink()
            self._space.notify_all()

    def _appendable(self, segment: Segment) -> bool:
        return segment.number == self._number and segment.end < self._segment_bytes

    def _over(self, id: SampleId, gone: IdSet) -> bool:
        return id in gone or id in self._control.tombstones


def _lock(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SpoolError(f"{directory}: cannot be used as a spool: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SpoolBusy(directory) from None
    return fd


def _check_owner(directory: Path, owner: Owner) -> None:
    path = directory / "spool.json"
    if not path.exists():
        _write_owner(path, owner)
        return
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Owner)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpoolError(f"{path}: cannot be read ({error}); choose another [spool] dir") from None
    if found.format != owner.format:
        raise SpoolMismatch(directory, "format", found.format, owner.format)
    if found.dataset != owner.dataset:
        raise SpoolMismatch(directory, "prompt file", found.dataset, owner.dataset)
    for field in Descriptor.__struct_fields__:
        there, here = getattr(found.descriptor, field), getattr(owner.descriptor, field)
        if there != here:
            raise SpoolMismatch(directory, field, there, here)


def _write_owner(path: Path, owner: Owner) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(owner)))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)
