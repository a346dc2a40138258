"""Actions for a process of its own, which a test may have killed or starved of disk."""

import itertools
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftfeed_producer.errors import SpoolError, SpoolFull
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_producer.spool.control import Commit
from draftfeed_producer.spool.control_log import RESERVE_BYTES, ControlLog
from draftfeed_proto.ids import IdSet, SampleId
from samples import DATASET, DESCRIPTOR, sample
from spool_helpers import SHARDS

CHANGES = ("pwrite", "fsync", "posix_fallocate", "replace", "rename", "unlink", "ftruncate")


def store_and_die(directory: str, fsync: Any) -> None:
    spool = Spool(SpoolConfig(dir=Path(directory), fsync=fsync), DESCRIPTOR, SHARDS)
    for ordinal in range(7):
        spool.append(sample(ordinal))
    os.kill(os.getpid(), signal.SIGKILL)


def store_for_ever(directory: str, fsync: Any, told: str) -> None:
    """One byte is written to `told` for each sample that is stored."""
    spool = Spool(SpoolConfig(dir=Path(directory), fsync=fsync), DESCRIPTOR, SHARDS)
    with Path(told).open("wb", buffering=0) as file:
        for ordinal in itertools.count():
            spool.append(sample(ordinal))
            file.write(b".")


def open_and_say(directory: str) -> None:
    try:
        Spool(SpoolConfig(dir=Path(directory)), DESCRIPTOR, SHARDS)
    except SpoolError as error:
        sys.stdout.write(str(error))


def fill_the_disk(directory: str, chunk_bytes: str = "4194304", threads: str = "1") -> None:
    """One sample fits, the next meets the limit halfway, then there is room again."""
    config = SpoolConfig(
        dir=Path(directory), chunk_bytes=int(chunk_bytes), encode_threads=int(threads)
    )
    spool = Spool(config, DESCRIPTOR, SHARDS)
    spool.append(sample(0))
    _limit_files(spool.statistics().bytes + 9000)
    try:
        spool.append(sample(1))
    except SpoolFull as error:
        sys.stdout.write(str(error.cause.errno))
    _limit_files(resource.RLIM_INFINITY)
    spool.append(sample(1))
    spool.append(sample(2))
    spool.close()


def fill_at_a_segment(directory: str) -> None:
    """Three times no new segment can be begun; then it can."""
    config = SpoolConfig(dir=Path(directory), segment_bytes=1)
    spool = Spool(config, DESCRIPTOR, SHARDS)
    spool.append(sample(0))
    _limit_files(0)
    for _ in range(3):
        try:
            spool.append(sample(1))
        except SpoolFull:
            continue
        sys.exit("a full disk took a sample")
    _limit_files(resource.RLIM_INFINITY)
    spool.append(sample(1))
    spool.close()


def commit_on_a_full_disk(directory: str) -> None:
    """No file may grow beyond what it has: the kernel's ENOSPC with another number."""
    spool = Spool(SpoolConfig(dir=Path(directory)), DESCRIPTOR, SHARDS)
    spool.append(sample(0))
    _limit_files((Path(directory) / "control.log").stat().st_size)
    spool.commit(1, IdSet([sample(0).id]), term=1)
    spool.close()


def tombstones_until_refused(directory: str) -> None:
    """The room taken ahead is used up, then a record does not fit."""
    spool = Spool(SpoolConfig(dir=Path(directory)), DESCRIPTOR, SHARDS)
    _limit_files((Path(directory) / "control.log").stat().st_size)
    for stored in range(10_000):
        try:
            spool.tombstone(SampleId(DATASET, 0, 0, stored), "rejected", "x" * 5000)
        except OSError as error:
            sys.stdout.write(f"{stored} {error.errno}")
            break
    _limit_files(resource.RLIM_INFINITY)
    spool.close()


def compact_on_a_full_disk(directory: str) -> None:
    log = ControlLog(Path(directory) / "control.log", 2, compact_bytes=4096)
    _limit_files((Path(directory) / "control.log").stat().st_size - (1 << 19))
    _commits(log, 100)
    assert log.size_bytes > 6000, f"compacted to {log.size_bytes}"
    log.close()


def reopen_on_a_full_disk(directory: str) -> None:
    _limit_files((Path(directory) / "control.log").stat().st_size)
    log = ControlLog(Path(directory) / "control.log", 2)
    log.append(Commit(1, [], 1))
    log.close()


def large_commits_on_a_full_disk(directory: str) -> None:
    path = Path(directory) / "control.log"
    every_second = [(DATASET, 0, 0, 0, [1] * (2 * RESERVE_BYTES + 1))]
    log = ControlLog(path, 2)
    log.append(Commit(1, every_second, 1))
    _limit_files(path.stat().st_size)
    for number in (2, 3):
        log.append(Commit(number, every_second, 1))
    log.close()


def crash_at_every_step(directory: str) -> None:
    """Forks a writer again and again, and kills it before its first, second, third... call that
    changes a file. Every record that it was told is stored must be there."""
    path = Path(directory) / "control.log"
    step, size_bytes, ended = 0, 0, False
    while not ended:
        step += 1
        for old in Path(directory).iterdir():
            old.unlink()
        read, write = os.pipe()
        writer = os.fork()
        if writer == 0:
            die_before(step, CHANGES)
            log = ControlLog(path, 2, compact_bytes=600)
            _commits(log, 12, told=write)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            told = pipe.read()
        ended = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == 0
        log = ControlLog(path, 2)
        stored = [commit.number for commit in log.state.commits]
        last = told[-1] if told else -1
        assert (stored[-1] if stored else -1) in (last, last + 1), (step, stored, last)
        assert stored == list(range(stored[-1] + 1))[-2:] if stored else True, (step, stored)
        size_bytes = log.size_bytes
        log.close()
    sys.stdout.write(f"{step} {size_bytes}")


def _commits(log: ControlLog, count: int, told: int | None = None) -> None:
    """told: a pipe that gets the number of each commit that is stored."""
    for number in range(count):
        log.append(Commit(number, IdSet([sample(0, rows=1).id]).to_wire(), 1))
        if told is not None:
            os.write(told, bytes([number]))


def die_before(step: int, names: tuple[str, ...]) -> None:
    """Kill this process before its step-th call of any of these functions of `os`."""
    left = step

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return instead

    for name in names:
        setattr(os, name, deadly(getattr(os, name)))


def _limit_files(size_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
