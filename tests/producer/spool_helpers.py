"""Spools of small samples, for the tests of the spool."""

import os
import subprocess
import sys
from pathlib import Path

from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_proto.ids import IdSet, Shards
from draftfeed_proto.sample import Assembler
from samples import DATASET, DESCRIPTOR, sample

SHARDS = Shards(DATASET, 0, (0, 100))


def open_spool(directory: Path, file: Shards = SHARDS, **options: object) -> Spool:
    """file: the shards of the whole prompt file."""
    return Spool(SpoolConfig(dir=directory, **options), DESCRIPTOR, file)  # type: ignore[arg-type]


def ids(*ordinals: int) -> IdSet:
    return IdSet(sample(k).id for k in ordinals)


def ordinals(spool: Spool) -> list[int]:
    return [record.header.id.ordinal for record in spool.deliverable()]


def read_back(spool: Spool, ordinal: int) -> str:
    """Digest of a deliverable sample."""
    (record,) = (r for r in spool.deliverable() if r.header.id.ordinal == ordinal)
    assembler = Assembler(record.header)
    for index in range(record.header.chunks):
        assembler.add(spool.read_chunk(record.header.id, index))
    return assembler.sample().digest()


def spool_child(action: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """An action of spool_child.py in a process of its own."""
    program = Path(__file__).with_name("spool_child.py")
    return subprocess.run(
        [sys.executable, program, action, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.seg"))


def flip(path: Path, offset: int) -> None:
    """One bit of a file is not what was written."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
