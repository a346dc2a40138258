"""A spool as a tool looks at it, while its producer may be running: nothing is locked, written,
cut or made."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from draftfeed_producer.errors import SpoolError
from draftfeed_producer.spool.control import Control
from draftfeed_producer.spool.control_log import KEEP_ALL, read_control
from draftfeed_producer.spool.directory import CONTROL_LOG, read_owner, segment_paths
from draftfeed_producer.spool.samples import is_void
from draftfeed_producer.spool.segments import Damage, Record, scan_records
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import Shards
from draftfeed_proto.sample import Assembler, Sample


class SegmentFile(NamedTuple):
    number: int
    path: Path
    bytes: int
    last: bool
    """Samples may still be appended to it."""


class Reader:
    """What a spool holds. `control` is as it was when this was made or last refreshed."""

    def __init__(self, directory: Path) -> None:
        """Raises SpoolError when it is no spool, SpoolDamaged when its control log is."""
        self.directory = directory
        self.owner = read_owner(directory)
        self.control = Control(KEEP_ALL)
        self.refresh()

    def refresh(self) -> None:
        path = self.directory / CONTROL_LOG
        try:
            self.control = read_control(path)
        except FileNotFoundError:
            self.control = Control(KEEP_ALL)
        except OSError as error:
            raise SpoolError(f"{path}: cannot be read: {error.strerror}") from None

    @property
    def shards(self) -> Shards:
        """Those it owns."""
        owned = self.control.owned.shards if self.control.owned else self.owner.chosen()
        return msgspec.structs.replace(owned, epochs=self.owner.prompts.epochs)

    def segments(self) -> list[SegmentFile]:
        """In order. A producer may delete any of them at any time."""
        paths = segment_paths(self.directory)
        found = []
        for number, path in paths:
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                continue
            found.append(SegmentFile(number, path, size, path == paths[-1][1]))
        return found

    def scan(self, segment: SegmentFile) -> Iterator[Record | Damage]:
        """Every record that is whole in its form, void ones included, and what is damaged. Chunks
        are not read. Nothing when the producer has deleted the segment.

        Raises SpoolError for what a newer version wrote, and when it cannot be read.
        """
        with _opened(segment.path) as fd:
            if fd is None:
                return
            for found in scan_records(fd, segment.number, verify=False, sealed=not segment.last):
                if not _is_still(segment.path, fd):
                    return
                yield found

    def records(self) -> Iterator[Record]:
        """Those that count: neither damaged in their form nor void."""
        for segment in self.segments():
            for found in self.scan(segment):
                if isinstance(found, Record) and not self.is_void(found):
                    yield found

    def is_void(self, found: Record | Damage) -> bool:
        """Whether the producer knows that it is bad, and makes the sample again."""
        return is_void(found, self.control.voids)

    def frame(self, record: Record, index: int) -> bytes | None:
        """One chunk as it is stored, unchecked; the tokens are number 0. None when the producer has
        deleted the segment. Raises SpoolError when it cannot be read."""
        offset, size = record.chunks[index]
        with _opened(self.path(record)) as fd:
            frame = b"" if fd is None else os.pread(fd, size, offset)
            return None if fd is None or not _is_still(self.path(record), fd) else frame

    def sample(self, record: Record) -> Sample | None:
        """Reads, checks and decodes it; None when the producer has deleted the segment.

        Raises ProtoError when it is not what was written, SpoolError when it cannot be read.
        """
        assembler = Assembler(record.header, self.owner.descriptor.dtype)
        with _opened(self.path(record)) as fd:
            if fd is None:
                return None
            try:
                for offset, size in record.chunks:
                    assembler.add(os.pread(fd, size, offset))
                return assembler.sample()
            except ProtoError:
                if _is_still(self.path(record), fd):
                    raise
                return None

    def path(self, record: Record) -> Path:
        """Of the segment that it lies in."""
        return self.directory / f"{record.segment:08d}.seg"


def _is_still(path: Path, fd: int) -> bool:
    """Whether what was just read is of the segment: its producer takes a file's name away before
    it cuts it, or lets another segment be written over it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise SpoolError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        yield fd
    except OSError as error:  # a bad disk, or no file at all
        raise SpoolError(f"{path}: cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
