"""What the files of an archive give, in the order in which they count: for those who serve it and
those who look at it."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from draftfeed_producer.archive.roots import Contents
from draftfeed_producer.archive.sealed import INDEX, SEGMENT, Interrupted, read_index, rescue
from draftfeed_producer.errors import ArchiveError, SpoolError
from draftfeed_producer.spool.segments import Record
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
DIGEST_DIGITS = 32


class Found(NamedTuple):
    """Of one segment."""

    path: Path
    """Its index, or the segment itself where that has none."""
    bytes: int
    """Of the segment; 0: nothing in it is served."""
    records: list[Record]
    places: list[int]
    """Of each record in the index; empty when the records are from the segment."""
    lost: list[SampleHeader]
    """What is known to have been there, and cannot be had."""
    fault: str
    """Why it is not a sealed pair; empty when it is one."""


def find(
    roots: tuple[Path, ...], contents: Contents, stopped: Callable[[], bool] = bool
) -> Iterator[Found]:
    """Every segment of every root. Whole pairs first: what is found in a segment whose index is
    damaged or missing is second best.

    stopped: asked for between indexes. Raises ArchiveError when a root cannot be read, and
    Interrupted.
    """
    indexes, broken = _listed(roots)
    due = time.monotonic() + LINE_SECONDS
    for number, path in enumerate(indexes):
        if stopped():
            raise Interrupted
        try:
            yield pair(path, contents)
        except SpoolError as error:
            broken.append((path, _reason(error)))
        if time.monotonic() >= due:
            due = time.monotonic() + LINE_SECONDS
            logger.info("archive: %d of %d segments are indexed", number + 1, len(indexes))
    for path, reason in broken:
        if stopped():
            raise Interrupted
        yield _rescued(path, reason, contents)


def pair(path: Path, contents: Contents) -> Found:
    """Of an index and its segment. Raises ArchiveDamaged, and SpoolError when it is of a newer
    version."""
    sealed = read_index(path)
    headers = [record.header for record in sealed.records]
    if strange := contents.strange(sealed.head.stream_id, headers):
        return _refused(path, strange)
    return Found(path, sealed.head.bytes, sealed.records, sealed.places, [], "")


def names_in(root: Path) -> list[str]:
    """Sorted. Raises ArchiveError."""
    try:
        return sorted(os.listdir(root))
    except OSError as error:
        raise ArchiveError(root, f"cannot be read: {error.strerror}") from None


def _listed(roots: tuple[Path, ...]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """(indexes, segments without one and that they have none)"""
    indexes, alone = [], []
    for root in roots:
        names = names_in(root)
        known = set(names)
        for path in (root / name for name in names):
            index = path.with_suffix(INDEX)
            if path.suffix == INDEX:
                indexes.append(path)
            elif path.suffix == SEGMENT and index.name not in known:
                if index.exists():  # it was sealed while the names were read, which is no snapshot
                    indexes.append(index)
                else:
                    alone.append((path, f"its index, {index.name}, is missing"))
    return indexes, alone


def _rescued(path: Path, reason: str, contents: Contents) -> Found:
    """What the segment itself says. The lines of what is lost exist all the same: they are to be
    generated again, or to be named as lost."""
    if not _is_digest(path.stem):
        return _refused(path, "is no name of a segment")
    found = rescue(path)
    stream_id = found.stream_id or contents.descriptor.stream_id()
    headers = [record.header for record in found.records]
    if strange := contents.strange(stream_id, [*headers, *found.lost]):
        return _refused(path, strange)
    size = found.bytes if found.records else 0
    return Found(path, size, found.records, [], found.lost, reason)


def _is_digest(name: str) -> bool:
    return len(name) == DIGEST_DIGITS and set(name) <= set("0123456789abcdef")


def _refused(path: Path, reason: str) -> Found:
    return Found(path, 0, [], [], [], reason)


def _reason(error: SpoolError) -> str:
    return error.reason if isinstance(error, ArchiveError) else str(error)
