"""Framing of the spool's files: a sequence of entries, each a 32-byte header and a payload.

    offset  bytes  field
         0      4  magic "DFE1"
         4      1  kind
         5      1  version of the kind's payload
         6      2  zero
         8      8  payload bytes
        16      8  xxh3-64 of the payload; zero for a chunk, whose frame carries its own
        24      8  xxh3-64 of the 24 bytes before
All little-endian. An entry is there when both checksums hold; what follows the last such entry of a
file is a torn tail.
"""

import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import xxhash

from draftfeed_producer.errors import SpoolError
from draftfeed_proto.chunk import Apart

MAGIC = b"DFE1"
VERSION = 1
_FIELDS = struct.Struct("<4sBBHQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
MAX_PAYLOAD_BYTES = 16 << 20
_SEARCH_BYTES = 1 << 20


class Kind(IntEnum):
    SEGMENT = 1
    """First entry of a segment file: which stream it belongs to."""
    CHUNK = 2
    """A chunk frame, byte for byte as it is sent."""
    SAMPLE = 3
    """Closes a record: the chunks before it, up to the previous one, are this sample."""
    CONTROL = 4
    """Control log: a commit, a tombstone or a term."""
    INDEX = 5
    """First entry of an archived segment's index: which segment it is of."""
    INDEXED = 6
    """Index: a sample, and where its chunks lie in the segment."""


class Entry(NamedTuple):
    kind: Kind
    payload_offset: int
    payload_bytes: int
    checksum: int

    @property
    def start(self) -> int:
        return self.payload_offset - HEADER_BYTES

    @property
    def end(self) -> int:
        return self.payload_offset + self.payload_bytes


def header(kind: Kind, payload: bytes | memoryview) -> bytes:
    checksum = 0 if kind is Kind.CHUNK else xxhash.xxh3_64_intdigest(payload)
    return _header(kind, len(payload), checksum)


def _header(kind: Kind, payload_bytes: int, checksum: int) -> bytes:
    fields = _FIELDS.pack(MAGIC, kind, VERSION, 0, payload_bytes, checksum)
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def scan(fd: int, start: int = 0, size: int | None = None) -> Iterator[Entry]:
    """Entries of a file whose headers hold, in order, until the first that does not.

    Payloads are not read: `read` checks the one of an entry that is not a chunk. `size` is where
    to stop: the file may be growing.
    Raises SpoolError for an entry that was written whole, by a newer version.
    """
    size = os.fstat(fd).st_size if size is None else size
    while (entry := _parse(os.pread(fd, HEADER_BYTES, start), start)) and entry.end <= size:
        yield entry
        start = entry.end


def find(fd: int, start: int, size: int | None = None) -> int | None:
    """Offset of the next entry whose header holds, at or after start: what lies before it is
    damage in the middle of a file, not a torn tail."""
    size = os.fstat(fd).st_size if size is None else size
    while start < size:
        block = os.pread(fd, min(_SEARCH_BYTES, size - start), start)
        if not block:
            return None  # the file was cut meanwhile
        at = block.find(MAGIC)
        while at >= 0:
            if _parse(os.pread(fd, HEADER_BYTES, start + at), start + at):
                return start + at
            at = block.find(MAGIC, at + 1)
        start += max(1, len(block) - len(MAGIC) + 1)
    return None


def read(fd: int, entry: Entry) -> bytes | None:
    """Payload of an entry, or None when it is not what was written."""
    payload = os.pread(fd, entry.payload_bytes, entry.payload_offset)
    if len(payload) != entry.payload_bytes:
        return None
    if entry.kind is not Kind.CHUNK and xxhash.xxh3_64_intdigest(payload) != entry.checksum:
        return None
    return payload


def decode(payload: bytes, kind: Any) -> Any:
    """A MessagePack payload whose checksum held. Raises SpoolError when it is of a newer format."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise SpoolError(f"the spool holds what this draftfeed cannot read: {error}") from None


def write(fd: int, offset: int, kind: Kind, payload: bytes | memoryview | Apart) -> int:
    """Write one entry at offset; returns the offset behind it. Raises OSError."""
    if not isinstance(payload, Apart):
        return write_all(fd, payload, write_all(fd, header(kind, payload), offset))
    assert kind is Kind.CHUNK
    head, body = payload.parts
    offset = write_all(fd, _header(kind, len(payload), 0) + head, offset)
    return write_all(fd, body, offset)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Returns the offset behind it. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]
    return offset


def _parse(data: bytes, offset: int) -> Entry | None:
    if len(data) < HEADER_BYTES:
        return None
    magic, kind, version, zero, payload_bytes, checksum = _FIELDS.unpack_from(data)
    (own_checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    if magic != MAGIC or own_checksum != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
        return None
    if kind not in Kind._value2member_map_ or version != VERSION or zero:
        raise SpoolError(
            f"entry of kind {kind}, version {version} is of a newer draftfeed; use that"
        )
    if payload_bytes > MAX_PAYLOAD_BYTES:
        return None
    return Entry(Kind(kind), offset + HEADER_BYTES, payload_bytes, checksum)
