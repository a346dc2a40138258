"""`[spool]` of producer.toml."""

from pathlib import Path
from typing import Literal

import msgspec

from draftfeed_producer.spool.ranges import parse_ranges
from draftfeed_proto import codecs
from draftfeed_proto.limits import MAX_CHUNK_BYTES
from draftfeed_proto.sample import DEFAULT_CHUNK_BYTES

AUTO = "auto"


class SpoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dir: Path
    """Where the spool lives; made when missing."""
    quota_bytes: int = 64 << 30
    """Generation pauses when the segments reach this size, and goes on when commits free some.
    What the engine has begun by then is still stored: leave room for one batch more. Files of
    segments that nobody needs any more are kept within it, for new ones to be written over."""
    min_free_bytes: int = 512 << 20
    """Generation also pauses while the disk has less than this left, whoever uses it."""
    segment_bytes: int = 256 << 20
    """A segment is closed at this size, or at an eighth of the quota. Space comes back a segment
    at a time."""
    fsync: Literal["always", "interval", "never"] = "interval"
    """When a record is forced to disk. Killing the process loses nothing under any of them, for
    the kernel has every byte before a record is offered. When the machine stops (power, kernel):
    `always` loses nothing, every record is on the disk before it is offered; `interval` loses at
    most the records of the last second; `never` loses what the kernel had not written yet, about
    half a minute. What is lost is generated again, and a commit, a term or a tombstone is on the
    disk before it is answered, under all three."""
    keep_checkpoints: int = 2
    """Samples are deleted when the oldest of this many last checkpoints contains them."""
    retain: Literal["none", "archive"] = "none"
    """What becomes of a segment that no checkpoint needs: `none`, it is deleted; `archive`, it is
    sealed in [archive] roots, and later epochs are served from there."""
    codec: str = AUTO
    """auto, packed, zstd or raw. A chunk that it makes next to nothing smaller gets the next of
    them. `auto` is packed, and nothing at all while every attached consumer is on this host and
    reads the spool's files, unless they are archived: then bytes cost less than packing them."""
    encode_threads: int = 1
    """1: chunks are encoded and written by the engine's own thread, which takes about 20 ms for a
    sample of 800 tokens in five layers of 5,120. More encode ahead of the writing; they gain
    something where the codec is zstd, or runs in NumPy."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Decoded bytes of one chunk, 1-8 MiB."""
    audit: bool = False
    """Store a digest of every sample's tensors, taken before encoding; consumers compare it."""
    shards: str = ""
    """Shards of the prompt file that this producer generates, such as "0-3,8"; empty: all. Chosen
    when the spool is made; `draftfeed shards` moves shards between spools afterwards."""

    def __post_init__(self) -> None:
        fields = (
            "quota_bytes",
            "segment_bytes",
            "keep_checkpoints",
            "encode_threads",
            "chunk_bytes",
        )
        for field in fields:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, it must be at least 1")
        if self.min_free_bytes < 0:
            raise ValueError(f"min_free_bytes is {self.min_free_bytes}, it must not be negative")
        if self.chunk_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}, the limit is {MAX_CHUNK_BYTES}")
        names = [AUTO, *codecs.names()]
        if self.codec not in names:
            raise ValueError(f"codec is {self.codec!r}, known are {', '.join(names)}")
        if self.shards:
            parse_ranges(self.shards)

    @property
    def chooser(self) -> codecs.Chooser:
        return codecs.by_name(codecs.PACKED.name if self.codec == AUTO else self.codec)
