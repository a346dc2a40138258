"""Actions for a process of its own, which a test may have killed or starved of disk."""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from draftfeed_producer.errors import SpoolFull
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_proto.ids import IdSet, Shards
from samples import DATASET, DESCRIPTOR, sample

SHARDS = Shards(DATASET, 0, (0, 100))


def store_and_die(directory: str, fsync: Any) -> None:
    spool = Spool(SpoolConfig(dir=Path(directory), fsync=fsync), DESCRIPTOR, SHARDS)
    for ordinal in range(7):
        spool.append(sample(ordinal))
    os.kill(os.getpid(), signal.SIGKILL)


def fill_the_disk(directory: str) -> None:
    """One sample fits, the next meets the limit halfway, then there is room again."""
    spool = Spool(SpoolConfig(dir=Path(directory)), DESCRIPTOR, SHARDS)
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


def _limit_files(size_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
