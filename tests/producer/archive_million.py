"""Makes an archive of a million samples without their bytes, or opens one and says what it took."""

import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from draftfeed_producer.archive import Archive, ArchiveConfig
from draftfeed_producer.archive.sealed import INDEX, SEGMENT, Head, write_index
from draftfeed_producer.spool.segments import Record
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import header_of
from samples import DATASET, DESCRIPTOR, sample

SHARD = 4096
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def prompts(count: int) -> Shards:
    return Shards(DATASET, 0, (0, -(-count // SHARD)))


def make(root: Path, count: int, each: int) -> None:
    config = ArchiveConfig(roots=(root,))
    Archive(config, DESCRIPTOR, prompts(count), IdSet()).close()
    header = header_of(sample(0), chunks=2, encoded_bytes=8 << 20, audit=True)
    for number, some in enumerate(stored(count, each)):
        records = [
            Record(
                msgspec.structs.replace(
                    header, id=SampleId(DATASET, 0, line // SHARD, line), key=f"key-{line}"
                ),
                number,
                ((at << 23, 4 << 20), (at << 23 | 4 << 20, 4 << 20)),
            )
            for at, line in enumerate(some)
        ]
        digest = xxhash.xxh3_128_hexdigest(str(number).encode())
        with (root / (digest + SEGMENT)).open("wb") as file:
            file.truncate(each << 23)
        head = Head(DESCRIPTOR.stream_id(), digest, each << 23, len(records))
        write_index(root / (digest + INDEX), head, records)


def stored(count: int, each: int) -> Iterator[list[int]]:
    """Lines as they are finished: a few thousand of them are generated side by side."""
    rng, lines = random.Random(0), list(range(count))
    for start in range(0, count, 2000):
        some = lines[start : start + 2000]
        rng.shuffle(some)
        lines[start : start + 2000] = some
    for start in range(0, count, each):
        yield lines[start : start + each]


def look(root: Path, count: int) -> None:
    logging.basicConfig(level=logging.INFO)
    Path("/proc/self/clear_refs").write_text("5")  # else the peak is that of who started us
    before, began, worked = resident_bytes(), time.monotonic(), time.process_time()
    archive = Archive(ArchiveConfig(roots=(root,)), DESCRIPTOR, prompts(count))
    seconds, opened = time.monotonic() - began, resident_bytes()
    worked = time.process_time() - worked
    rng = random.Random(0)
    for line in rng.sample(range(count), 400):
        assert archive.header(SampleId(DATASET, 3, line // SHARD, line)) is not None
    found = {
        "samples": archive.statistics().samples,
        "seconds": seconds,
        "cpu_seconds": worked,
        "opened_bytes": opened - before,
        "served_bytes": resident_bytes() - before,
        "most_bytes": peak_bytes() - before,
    }
    sys.stdout.write(json.dumps(found))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    root, count = Path(sys.argv[2]), int(sys.argv[3])
    if sys.argv[1] == "make":
        make(root, count, int(sys.argv[4]))
    else:
        look(root, count)
