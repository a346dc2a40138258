"""An archive as a tool looks at it, while others may write to it and serve it."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftfeed_producer.archive.roots import Contents, same_contents
from draftfeed_producer.archive.sealed import INDEX, INDEX_PART, PART, SEGMENT, read_index, rescue
from draftfeed_producer.errors import ArchiveError, SpoolError
from draftfeed_producer.spool.control import Control
from draftfeed_producer.spool.control_log import KEEP_ALL
from draftfeed_producer.spool.directory import FORMAT, Owner
from draftfeed_producer.spool.reader import Reader, SegmentFile
from draftfeed_producer.spool.segments import Damage, Record
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0


class Fault(NamedTuple):
    """A file that is not one of a sealed pair."""

    path: Path
    reason: str
    gone: tuple[tuple[SampleId, str], ...] = ()
    """(id, key) of the samples that are lost and not served from elsewhere, as far as an index
    still names them."""


class ArchiveReader(Reader):
    """Sealed segments as `Reader` shows those of a spool, numbered as they are found. `records`
    and `scan` give each line of the prompt file once: where there are copies, the one served."""

    def __init__(self, roots: tuple[Path, ...]) -> None:
        """Reads every index. Raises ArchiveError when the roots are not of one archive."""
        self.roots = roots
        self.contents: Contents = same_contents(roots)
        self.directory = roots[0]
        prompts = self.contents.prompts
        self.owner = Owner(FORMAT, self.contents.descriptor, prompts, "")
        self.control = Control(KEEP_ALL)
        self.lines = IdSet()
        """Of the prompt file, in epoch 0: those of which there is a sample."""
        self.encoded_bytes = self.decoded_bytes = 0
        """Of those samples."""
        self.copies = 0
        """Samples of lines that have another one."""
        self._files: list[SegmentFile] = []
        self._rescued: dict[int, list[Record]] = {}
        """By number of a segment whose index is damaged or missing."""
        self._served_from = np.zeros(0, np.int32)
        """By line: number of the segment + 1; 0: there is none."""
        self.faults = self._load()

    def refresh(self) -> None:
        """Nothing: what is sealed does not change."""

    @property
    def shards(self) -> Shards:
        return self.contents.prompts

    @property
    def prompt_lines(self) -> IdSet:
        """All prompts of the file, in epoch 0; empty: not known."""
        return IdSet.from_wire(self.contents.lines).in_epoch(0)

    def segments(self) -> list[SegmentFile]:
        return list(self._files)

    def scan(self, segment: SegmentFile) -> Iterator[Record | Damage]:
        """The samples that are served from there. Raises ArchiveDamaged."""
        seen: set[int] = set()
        for record in self.every_record(segment):
            line = record.header.id.ordinal
            if self._served_from[line] == segment.number + 1 and line not in seen:
                seen.add(line)
                yield record

    def every_record(self, segment: SegmentFile) -> list[Record]:
        """Copies of what is served from elsewhere, too. Raises ArchiveDamaged."""
        if segment.number in self._rescued:
            return self._rescued[segment.number]
        return read_index(segment.path.with_suffix(INDEX), segment.number).records

    def serves(self, record: Record) -> bool:
        return bool(self._served_from[record.header.id.ordinal] == record.segment + 1)

    def _path(self, record: Record) -> Path:
        return self._files[record.segment].path

    # loading

    def _load(self) -> list[Fault]:
        found = [fault for root in self.roots for fault in self._load_root(root)]
        return [fault._replace(gone=self._gone(fault)) for fault in found]

    def _load_root(self, root: Path) -> Iterator[Fault]:
        names = {path.name for path in root.iterdir()}
        due = time.monotonic() + LINE_SECONDS
        for number, name in enumerate(sorted(names)):
            path = root / name
            if name.endswith(INDEX):
                yield from self._take(path)
            elif name.endswith(SEGMENT) and path.with_suffix(INDEX).name not in names:
                yield from self._rescue(path, f"its index, {path.stem}{INDEX}, is missing")
            elif name.endswith((PART, INDEX_PART)):
                yield Fault(path, "is being made, or was when a producer was killed")
            if time.monotonic() >= due:
                due = time.monotonic() + LINE_SECONDS
                logger.info("%s: %d of %d files are looked at", root, number + 1, len(names))

    def _take(self, path: Path) -> Iterator[Fault]:
        try:
            sealed = read_index(path)
        except SpoolError as error:
            reason = error.reason if isinstance(error, ArchiveError) else str(error)
            yield from self._rescue(path, reason)
            return
        headers = [record.header for record in sealed.records]
        if strange := self.contents.strange(sealed.head.stream_id, headers):
            yield Fault(path, strange)
            return
        self._add(path, sealed.head.bytes, headers)

    def _rescue(self, path: Path, reason: str) -> Iterator[Fault]:
        """As a replay does."""
        number = len(self._files)
        found = rescue(path, number)
        headers = [record.header for record in found.records]
        stream_id = found.stream_id or self.contents.descriptor.stream_id()
        if strange := self.contents.strange(stream_id, [*headers, *found.lost]):
            yield Fault(path, strange)
            return
        if found.records:
            reason += f"; {len(found.records)} samples are found in the segment"
            self._rescued[number] = found.records
            self._add(path, found.bytes, headers)
        yield Fault(path, reason, tuple((one.id, one.key) for one in found.lost))

    def _add(self, path: Path, size: int, headers: list[SampleHeader]) -> None:
        number = len(self._files)
        self._files.append(SegmentFile(number, path.with_suffix(SEGMENT), size, last=False))
        for header in headers:
            self._count(header, number)

    def _count(self, header: SampleHeader, number: int) -> None:
        line = header.id.ordinal
        if line >= len(self._served_from):
            more = max(line + 1, 2 * len(self._served_from)) - len(self._served_from)
            self._served_from = np.concatenate([self._served_from, np.zeros(more, np.int32)])
        if self._served_from[line]:
            self.copies += 1
            return
        self._served_from[line] = number + 1
        self.lines.add(header.id.in_epoch(0))
        self.encoded_bytes += header.encoded_bytes
        self.decoded_bytes += header.decoded_bytes

    def _gone(self, fault: Fault) -> tuple[tuple[SampleId, str], ...]:
        return tuple(one for one in fault.gone if one[0].in_epoch(0) not in self.lines)
