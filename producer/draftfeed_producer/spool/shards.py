"""Moving shards between spools. The producers of both must be stopped."""

import os
from pathlib import Path

from draftfeed_producer.errors import ShardError, SpoolError
from draftfeed_producer.spool.control import Control, Owned
from draftfeed_producer.spool.control_log import KEEP_ALL, ControlLog
from draftfeed_producer.spool.directory import CONTROL_LOG, check_exist, lock, read_owner
from draftfeed_producer.spool.ranges import Ranges, difference, format_ranges, intersection, union
from draftfeed_producer.spool.reader import Reader
from draftfeed_proto.ids import IdSet, Shards


def give(directory: Path, ranges: Ranges) -> Shards:
    """The spool owns these shards no more; returns those it still has.

    Raises ShardError when it does not have them, or when one is begun: a sample of it was stored,
    committed or ended here. Raises SpoolBusy while its producer runs.
    """
    fd = lock(directory)
    try:
        reader = Reader(directory)
        owned = _owned(reader.control, directory)
        if missing := difference(ranges, owned.shards.ranges):
            raise ShardError(
                f"{directory} does not own shards {format_ranges(missing)}; "
                f"it has {format_ranges(owned.shards.ranges)}"
            )
        _check_not_begun(reader, ranges)
        left = _with_ranges(owned.shards, difference(owned.shards.ranges, ranges))
        lost = _with_ranges(owned.lost, difference(owned.lost.ranges, ranges))
        _store(directory, Owned(left, lost))
    finally:
        os.close(fd)
    return left


def take(directory: Path, ranges: Ranges, *, lost: bool) -> Shards:
    """The spool owns these shards too; returns all it has.

    lost: the spool they were in is gone for good. Its producer then asks the trainer what it has
    of them before it generates the rest again.
    Raises ShardError when the prompt file does not have them, or the spool has them already.
    Raises SpoolBusy while its producer runs.
    """
    fd = lock(directory)
    try:
        check_exist(ranges, read_owner(directory).prompts)
        owned = _owned(Reader(directory).control, directory)
        if twice := intersection(ranges, owned.shards.ranges):
            raise ShardError(f"{directory} has shards {format_ranges(twice)} already")
        all_shards = _with_ranges(owned.shards, union(owned.shards.ranges, ranges))
        gone = union(owned.lost.ranges, ranges) if lost else owned.lost.ranges
        _store(directory, Owned(all_shards, _with_ranges(owned.lost, gone)))
    finally:
        os.close(fd)
    return all_shards


def _owned(control: Control, directory: Path) -> Owned:
    if control.owned is None:
        raise SpoolError(f"{directory}: the spool is not complete; start its producer once")
    return control.owned


def begun(reader: Reader) -> Ranges:
    """Shards of which something was stored, committed or ended in this spool."""
    control = reader.control
    ids = IdSet([*(record.header.id for record in reader.records()), *control.tombstones])
    ids.update(control.committed)
    shards: Ranges = ()
    for (_, _, shard), _ in ids.within(reader.owner.prompts).by_partition():
        shards = union(shards, (shard, shard + 1))
    return shards


def _check_not_begun(reader: Reader, ranges: Ranges) -> None:
    if stuck := intersection(ranges, begun(reader)):
        raise ShardError(
            f"{reader.directory}: shard {format_ranges(stuck)} is begun: what is stored, committed "
            "or rejected of it is in this spool and stays there"
        )


def _store(directory: Path, owned: Owned) -> None:
    log = ControlLog(directory / CONTROL_LOG, KEEP_ALL)
    try:
        log.append(owned)
    except OSError as error:
        raise SpoolError(f"{directory}: cannot be written: {error.strerror}") from None
    finally:
        log.close()


def _with_ranges(shards: Shards, ranges: Ranges) -> Shards:
    return Shards(shards.dataset, shards.epoch, ranges)
