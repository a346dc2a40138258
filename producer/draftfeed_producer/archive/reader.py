"""An archive as a tool looks at it, while others may write to it and serve it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from draftfeed_producer.archive.loading import Found, find, names_in
from draftfeed_producer.archive.roots import Contents, same_contents
from draftfeed_producer.archive.sealed import INDEX, INDEX_PART, PART, SEGMENT, read_index
from draftfeed_producer.spool.control import Control
from draftfeed_producer.spool.control_log import KEEP_ALL
from draftfeed_producer.spool.directory import FORMAT, Owner
from draftfeed_producer.spool.reader import Reader, SegmentFile
from draftfeed_producer.spool.segments import Damage, Record
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader


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

    def path(self, record: Record) -> Path:
        """Of the segment that it lies in."""
        return self._files[record.segment].path

    # loading

    def _load(self) -> list[Fault]:
        faults = []
        for found in find(self.roots, self.contents):
            if found.bytes:
                self._add(found)
            if found.fault:
                faults.append(_fault(found))
        faults += [fault for root in self.roots for fault in _parts(root)]
        return [fault._replace(gone=self._gone(fault)) for fault in faults]

    def _add(self, found: Found) -> None:
        number = len(self._files)
        path = found.path.with_suffix(SEGMENT)
        self._files.append(SegmentFile(number, path, found.bytes, last=False))
        if found.fault:
            self._rescued[number] = [replace(record, segment=number) for record in found.records]
        for record in found.records:
            self._count(record.header, number)

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


def _fault(found: Found) -> Fault:
    rescued = f"; {len(found.records)} samples are found in the segment" if found.records else ""
    return Fault(found.path, found.fault + rescued, tuple((one.id, one.key) for one in found.lost))


def _parts(root: Path) -> Iterator[Fault]:
    for name in names_in(root):
        if name.endswith((PART, INDEX_PART)):
            yield Fault(root / name, "is being made, or was when a producer was killed")
