"""The directories of an archive: whose they are, and which of them has room."""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from draftfeed_producer.archive.config import ArchiveConfig
from draftfeed_producer.archive.sealed import SEGMENT
from draftfeed_producer.errors import ArchiveError
from draftfeed_producer.spool.files import free_bytes, make_directory, same_drive, sync_directory
from draftfeed_producer.spool.ranges import format_ranges
from draftfeed_proto import ranges
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, Shards, WireRanges
from draftfeed_proto.sample import SampleHeader

FORMAT = 2
NAME = "archive.json"


class Contents(msgspec.Struct, frozen=True):
    """archive.json, which never changes."""

    format: int
    descriptor: Descriptor
    prompts: Shards
    """All shards of the prompt file. Its epochs are the first one alone: in an archive they do not
    count."""
    lines: WireRanges = []
    """Prompts of that file, in that epoch; none: not known."""

    def strange(self, stream_id: str, headers: Iterable[SampleHeader]) -> str:
        """Why samples are none of this archive's; empty when they are. A copy that went into the
        wrong root must not pass for lines of this prompt file."""
        if stream_id != self.descriptor.stream_id():
            return f"is of another stream ({stream_id[:8]})"
        for id in (header.id for header in headers):
            shards = self.prompts.ranges
            if id.dataset != self.prompts.dataset or not ranges.contains(shards, id.shard):
                return f"is of another prompt file ({id})"
        return ""


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Room(NamedTuple):
    """Of one root."""

    bytes: int
    limit: str
    """Why not more."""


class Roots:
    """Where the next segment goes."""

    def __init__(self, config: ArchiveConfig, contents: Contents) -> None:
        """Raises ArchiveError."""
        self._config = config
        for root in config.roots:
            _claim(root, contents)
        _check_apart(config.roots)

    def choose(
        self, size_bytes: int, used_bytes: int, spool: Path, reserved_bytes: int
    ) -> tuple[list[Path], str]:
        """(the roots that have room, that with most first; why there is none)

        size_bytes: of the segment. used_bytes: of all that is archived. reserved_bytes: must stay
        free on the drive of the spool, whose directory is given.
        """
        quota = self._config.quota_bytes
        if quota and used_bytes + size_bytes > quota:
            return [], f"it holds {used_bytes} bytes, [archive] quota_bytes is {quota}"
        rooms = {
            root: self._room(root, free, spool, reserved_bytes)
            for root in self._config.roots
            if (free := _free(root)) >= 0
        }
        if not rooms:
            return [], "no root can be reached"
        best_first = sorted(rooms, key=lambda root: -rooms[root].bytes)
        roots = [root for root in best_first if rooms[root].bytes >= size_bytes]
        return roots, "" if roots else rooms[best_first[0]].limit

    def _room(self, root: Path, free_bytes: int, spool: Path, reserved_bytes: int) -> _Room:
        floor, limit = self._config.min_free_bytes, "[archive] min_free_bytes is"
        if reserved_bytes > floor and same_drive(root, spool):
            floor, limit = reserved_bytes, "the spool beside it may need, by [spool] quota_bytes,"
        return _Room(free_bytes - floor, f"{root} has {free_bytes} bytes left, {limit} {floor}")


def describe_archive(descriptor: Descriptor, prompts: Shards, lines: IdSet) -> Contents:
    first = prompts.one_epoch(prompts.epoch)
    return Contents(FORMAT, descriptor, first, lines.within(first).to_wire())


def read_contents(root: Path) -> Contents:
    """Raises ArchiveError when the directory is no archive, or one of another format."""
    path = root / NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArchiveError(root, f"is no archive: {NAME}: {error.strerror}") from None
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            raise ArchiveError(root, f"has format {found}, this draftfeed reads {FORMAT}")
        return msgspec.json.decode(data, type=Contents)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArchiveError(path, f"cannot be read: {error}") from None


def same_contents(roots: tuple[Path, ...]) -> Contents:
    """What all of these roots are of. Raises ArchiveError when they are not of one stream."""
    first = read_contents(roots[0])
    for root in roots[1:]:
        _compare(root, read_contents(root), first)
    return first


def _claim(root: Path, contents: Contents) -> None:
    """Make the directory this stream's, or find that it is."""
    if (root / NAME).exists():
        _compare(root, read_contents(root), contents)
        return
    try:
        make_directory(root)
        if next(root.glob(f"*{SEGMENT}"), None) is not None:
            raise ArchiveError(root, f"has segments and no {NAME}: it was lost, or never copied")
        # Under a name of its own: another process may do the same now, with the same words.
        part = root / f"{NAME}-{secrets.token_hex(4)}.part"
        with part.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(contents)))
            file.flush()
            os.fsync(file.fileno())
        part.replace(root / NAME)
        sync_directory(root)
    except OSError as error:
        raise ArchiveError(root, f"cannot be used as an archive: {error.strerror}") from None


def _check_apart(roots: tuple[Path, ...]) -> None:
    """A directory under two names would count twice, and look like a copy of itself."""
    known: dict[tuple[int, int], Path] = {}
    for root in roots:
        status = root.stat()
        other = known.setdefault((status.st_dev, status.st_ino), root)
        if other != root:
            raise ArchiveError(root, f"is the same directory as {other}: name it once")


def _compare(root: Path, found: Contents, wanted: Contents) -> None:
    here, there = wanted.descriptor, found.descriptor
    fields = [
        (name, getattr(there, name), getattr(here, name)) for name in Descriptor.__struct_fields__
    ]
    fields.append(("prompt file", found.prompts.dataset, wanted.prompts.dataset))
    shards = (format_ranges(found.prompts.ranges), format_ranges(wanted.prompts.ranges))
    fields.append(("shards of the prompt file", *shards))
    for name, theirs, ours in fields:
        if theirs != ours:
            raise ArchiveError(
                root, f"was made with {name} {theirs!r}, this is {ours!r}; choose another root"
            )


def _free(root: Path) -> int:
    """-1 when it cannot be asked, or its drive is no longer mounted there: nothing goes there."""
    try:
        return free_bytes(root) if (root / NAME).exists() else -1
    except OSError:
        return -1
