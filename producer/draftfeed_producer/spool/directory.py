"""Whose a spool directory is: one process at a time, and one stream and prompt file for good."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from draftfeed_producer.errors import ShardError, SpoolBusy, SpoolError, SpoolMismatch
from draftfeed_producer.spool.files import make_directory, sync_directory
from draftfeed_producer.spool.ranges import difference, format_ranges, parse_ranges
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import Shards

FORMAT = 3
"""Of the directory as a whole; entries carry a version of their own."""
CONTROL_LOG = "control.log"


class Owner(msgspec.Struct, frozen=True):
    """Contents of spool.json, which never change but for the epochs: those may grow."""

    format: int
    descriptor: Descriptor
    prompts: Shards
    """All shards of the prompt file."""
    shards: str
    """As configured when the spool was made; empty: all. What it owns by now is in the log, of
    every epoch that there is."""

    @classmethod
    def of(cls, descriptor: Descriptor, prompts: Shards, shards: str) -> "Owner":
        """shards: as configured. Raises ShardError when it cannot be read."""
        chosen = format_ranges(parse_ranges(shards)) if shards else ""
        return cls(FORMAT, descriptor, prompts, chosen)

    def chosen(self) -> Shards:
        """The shards it was made with. Raises ShardError when the file does not have them."""
        if not self.shards:
            return self.prompts
        ranges = parse_ranges(self.shards)
        check_exist(ranges, self.prompts)
        return msgspec.structs.replace(self.prompts, ranges=ranges)


class _Format(msgspec.Struct, frozen=True):
    format: int


def check_exist(ranges: tuple[int, ...], prompts: Shards) -> None:
    """Raises ShardError when the prompt file has no such shards."""
    if missing := difference(ranges, prompts.ranges):
        raise ShardError(
            f"the prompt file has shards {format_ranges(prompts.ranges)}, "
            f"not {format_ranges(missing)}"
        )


def lock(directory: Path, *, create: bool = False) -> int:
    """The descriptor that holds the lock. Raises SpoolBusy, or SpoolError when it cannot be."""
    try:
        if create:
            make_directory(directory)
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        fd = os.open(directory / "LOCK", flags, 0o644)
    except OSError as error:
        raise SpoolError(f"{directory}: cannot be used as a spool: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SpoolBusy(directory) from None
    return fd


def read_owner(directory: Path) -> Owner:
    """Raises SpoolError when the directory is no spool, or one of another format."""
    path = directory / "spool.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpoolError(f"{directory} is not a spool: {path.name}: {error.strerror}") from None
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            raise SpoolMismatch(directory, "format", found, FORMAT)
        return msgspec.json.decode(data, type=Owner)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpoolError(f"{path}: cannot be read ({error}); choose another [spool] dir") from None


def claim(directory: Path, owner: Owner) -> None:
    """Make the directory this owner's, or find that it is.

    Raises SpoolMismatch when it is another's, SpoolError when it cannot be written, ShardError
    when the owner wants shards that the prompt file does not have.
    """
    if (directory / "spool.json").exists():
        found = read_owner(directory)
        _compare(directory, found, owner)
        if found.prompts.epochs == owner.prompts.epochs:
            return
    owner.chosen()  # a spool that could never be opened must not be made
    try:
        _write_owner(directory / "spool.json", owner)
    except OSError as error:
        raise SpoolError(f"{directory}: cannot be used as a spool: {error.strerror}") from None


def segment_paths(directory: Path) -> list[tuple[int, Path]]:
    """(number, path) of each segment, rising."""
    return sorted((int(path.stem), path) for path in directory.glob("[0-9]*.seg"))


def _compare(directory: Path, found: Owner, owner: Owner) -> None:
    for field, there, here in _fields(found, owner):
        if there != here:
            raise SpoolMismatch(directory, field, there, here)


def _fields(found: Owner, owner: Owner) -> Iterator[tuple[str, object, object]]:
    """(name, there, here) of everything that must be the same."""
    yield "prompt file", found.prompts.dataset, owner.prompts.dataset
    yield "epoch", found.prompts.epoch, owner.prompts.epoch
    yield (
        "shards of the prompt file (shard_size)",
        format_ranges(found.prompts.ranges),
        format_ranges(owner.prompts.ranges),
    )
    for field in Descriptor.__struct_fields__:
        yield field, getattr(found.descriptor, field), getattr(owner.descriptor, field)
    yield "[spool] shards", found.shards, owner.shards
    if owner.prompts.epochs < found.prompts.epochs:  # there may be samples of all of them
        yield "epochs", found.prompts.epochs, owner.prompts.epochs


def _write_owner(path: Path, owner: Owner) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(owner)))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)
