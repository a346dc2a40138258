"""One sealed segment: the file, and the index beside it that makes it count."""

import errno
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from draftfeed_producer.errors import ArchiveDamaged, ArchiveGone, SpoolError
from draftfeed_producer.spool import entries
from draftfeed_producer.spool.entries import Kind
from draftfeed_producer.spool.files import sync_directory
from draftfeed_producer.spool.segments import Record, SegmentHeader, scan_records
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK_BYTES, SYNC_BYTES = 4 << 20, 64 << 20
SEGMENT, INDEX = ".seg", ".idx"
PART, INDEX_PART = ".part", ".idx-part"
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)


class Head(msgspec.Struct, frozen=True):
    """The first entry of an index."""

    stream_id: str
    digest: str
    """xxh3-128 of the segment file, which is its name too."""
    bytes: int
    samples: int


class _Line(msgspec.Struct, frozen=True):
    """An entry of an index: one sample, and (offset, bytes) of each of its frames."""

    header: SampleHeader
    chunks: tuple[tuple[int, int], ...]


class Sealed(NamedTuple):
    head: Head
    records: list[Record]
    """In the order in which they lie there."""
    places: list[int]
    """Of each in the index: the byte at which `read_line` finds it."""


class Rescued(NamedTuple):
    """What can be had of a pair that is not whole."""

    stream_id: str
    records: list[Record]
    """Found in the segment. One that was void, or killed the trainer, may be among them."""
    lost: list[SampleHeader]
    """Of samples that only the index, or what is left of it, still names."""
    bytes: int


class Interrupted(Exception):
    """Sealing, or reading the indexes, was told to stop; of a segment that was being sealed nothing
    is in the archive."""


def verified(
    segment: Path, counts: Callable[[Record], bool], stopped: Callable[[], bool]
) -> list[Record]:
    """Of a segment of a spool, whose every byte is read: those that are whole and to be served
    again.

    counts: whether a record is to be; what is damaged is not, whatever it says.
    stopped: asked for between samples.
    Raises OSError, SpoolError for what a newer version wrote, and Interrupted.
    """
    fd = os.open(segment, os.O_RDONLY | os.O_CLOEXEC)
    records = []
    try:
        for found in scan_records(fd, int(segment.stem), verify=True, sealed=True):
            if stopped():
                raise Interrupted
            if isinstance(found, Record) and counts(found):
                records.append(found)
    finally:
        os.close(fd)
    return records


def seal(
    segment: Path,
    root: Path,
    stream_id: str,
    records: list[Record],
    stopped: Callable[[], bool],
    *,
    link: bool,
) -> Head:
    """Put a segment of a spool into an archive, durably.

    records: what `verified` found in it.
    link: the segment will never change and lies on the same file system, so no copy is needed;
        where it cannot be linked it is copied.
    stopped: asked for between blocks.
    Raises OSError, and Interrupted; what was begun is then no part of the archive.
    """
    part = _part(segment, root)
    part.unlink(missing_ok=True)  # of a process that was killed
    try:
        digest, size = _copy(segment, part, stopped, link=link)
        head = Head(stream_id, digest, size, len(records))
        index = root / (digest + INDEX)
        if not index.exists():  # else it was sealed before, and the spool's was not deleted yet
            write_index(part.with_suffix(INDEX_PART), head, records)
            os.replace(part, root / (digest + SEGMENT))
            os.replace(part.with_suffix(INDEX_PART), index)
            sync_directory(root)
    finally:
        part.unlink(missing_ok=True)
        part.with_suffix(INDEX_PART).unlink(missing_ok=True)
    return head


def _part(segment: Path, root: Path) -> Path:
    """One for each spool, which one process has at a time: what is left of it is used again."""
    spool = segment.parent.stat()
    return root / f"{socket.gethostname()}-{spool.st_dev:x}-{spool.st_ino:x}{PART}"


def read_index(path: Path, number: int = 0) -> Sealed:
    """number: what its records are to give as their segment.

    Raises ArchiveDamaged when it is not what was written, or the segment beside it is missing or
    of another size; SpoolError when it is of a newer version.
    """
    try:
        return _read_index(path, number)
    except (OSError, StopIteration) as error:
        reason = getattr(error, "strerror", None) or "it ends early"
        raise ArchiveDamaged(path, reason) from None


def _read_index(path: Path, number: int) -> Sealed:
    try:
        size = path.with_suffix(SEGMENT).stat().st_size
    except FileNotFoundError:
        raise ArchiveDamaged(path, f"its segment, {path.stem}{SEGMENT}, is missing") from None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = entries.scan(fd)
        head = _payload(fd, next(found), path, Kind.INDEX, Head)
        if (head.bytes, head.digest) != (size, path.stem):
            raise ArchiveDamaged(path, f"its segment is not the one of {head.bytes} bytes")
        records, places = [], []
        for _ in range(head.samples):
            entry = next(found)
            line = _payload(fd, entry, path, Kind.INDEXED, _Line)
            records.append(Record(line.header, number, line.chunks))
            places.append(entry.start)
    finally:
        os.close(fd)
    return Sealed(head, records, places)


def read_line(fd: int, place: int, path: Path, number: int) -> Record:
    """One entry of an open index, whose path is for messages. Raises ArchiveDamaged, and
    ArchiveGone when the system does not give it."""
    try:
        line = _payload(fd, next(entries.scan(fd, place)), path, Kind.INDEXED, _Line)
    except OSError as error:
        raise ArchiveGone(path, str(error.strerror)) from None
    except StopIteration:
        raise ArchiveDamaged(path, f"nothing can be read at byte {place}") from None
    return Record(line.header, number, line.chunks)


def rescue(path: Path, number: int = 0) -> Rescued:
    """path: of either of the two. Nothing is raised for what is damaged or gone."""
    stream_id, records, size = "", list[Record](), 0
    try:
        fd = os.open(path.with_suffix(SEGMENT), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return Rescued("", [], headers_in(path.with_suffix(INDEX)), 0)
    try:
        size = os.fstat(fd).st_size
        first = next(entries.scan(fd), None)
        if first is not None and first.kind is Kind.SEGMENT and (data := entries.read(fd, first)):
            stream_id = entries.decode(data, SegmentHeader).stream_id
        found = scan_records(fd, number, verify=False, sealed=True)
        records = [one for one in found if isinstance(one, Record)]
    except (OSError, SpoolError) as error:
        logger.error("%s: %s", path.with_suffix(SEGMENT), error)
    finally:
        os.close(fd)
    known = {record.header.id for record in records}
    lost = [one for one in headers_in(path.with_suffix(INDEX)) if one.id not in known]
    return Rescued(stream_id, records, lost, size)


def _payload(fd: int, entry: entries.Entry, path: Path, kind: Kind, of: type[T]) -> T:
    payload = entries.read(fd, entry) if entry.kind is kind else None
    if payload is None:
        raise ArchiveDamaged(path, f"what is at byte {entry.start} is not what was written")
    decoded: T = entries.decode(payload, of)
    return decoded


def headers_in(path: Path) -> list[SampleHeader]:
    """What can still be read of an index, up to where it is damaged or ends."""
    headers: list[SampleHeader] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return headers
    try:
        for entry in entries.scan(fd):
            payload = entries.read(fd, entry) if entry.kind is Kind.INDEXED else None
            if payload is not None:
                headers.append(entries.decode(payload, _Line).header)
    except (OSError, SpoolError) as error:
        logger.error("%s: %s", path, error)
    finally:
        os.close(fd)
    return headers


def digest_of(path: Path) -> str:
    """Raises OSError."""
    return _copy(path, None, bool, link=False)[0]


def _copy(
    source: Path, part: Path | None, stopped: Callable[[], bool], *, link: bool
) -> tuple[str, int]:
    """(digest, bytes). The part is on the disk when it returns, linked or copied."""
    linked = part is not None and link and _linked(source, part)
    digest, size = xxhash.xxh3_128(), 0
    with source.open("rb", buffering=0) as file:
        copy = part.open("xb", buffering=0) if part is not None and not linked else None
        try:
            while block := file.read(BLOCK_BYTES):
                if stopped():
                    raise Interrupted
                digest.update(block)
                size += len(block)
                if copy is not None:
                    entries.write_all(copy.fileno(), block, size - len(block))
                    if size % SYNC_BYTES == 0:  # in steps that a stop need not wait long for
                        os.fdatasync(copy.fileno())
            os.fdatasync((copy or file).fileno()) if part is not None else None
        finally:
            if copy is not None:
                copy.close()
    return digest.hexdigest(), size


def _linked(source: Path, part: Path) -> bool:
    try:
        os.link(source, part)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True


def write_index(path: Path, head: Head, records: list[Record]) -> None:
    """Durable when it returns, but for its name. Raises OSError."""
    parts = [msgspec.msgpack.encode(head)]
    parts += [msgspec.msgpack.encode(_Line(record.header, record.chunks)) for record in records]
    kinds = [Kind.INDEX, *[Kind.INDEXED] * len(records)]
    framed = (entries.header(kind, part) + part for kind, part in zip(kinds, parts, strict=True))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        entries.write_all(fd, b"".join(framed), 0)
        os.fsync(fd)
    finally:
        os.close(fd)
