"""A process that is killed while it seals segments, before each call that changes a file."""

import os
import sys
from pathlib import Path

from archive_helpers import opened, segments
from draftfeed_producer.archive.sealed import digest_of, read_index, seal, verified
from draftfeed_producer.spool import Spool, SpoolConfig
from samples import DESCRIPTOR, sample
from spool_child import die_before
from spool_helpers import SHARDS

SAMPLES = 2


def main(directory: str, link: str) -> None:
    """Prints how many steps there are."""
    spool, roots = Path(directory) / "spool", Path(directory) / "roots"
    made = make_segments(spool)
    step, ended = 0, False
    while not ended:
        step += 1
        root = roots / str(step)
        with opened(root):
            pass
        ended = not killed(made, root, step, link=bool(link))
        check_pairs(root)
        seal_all(made, root, link=bool(link))
        check_whole(root)
    sys.stdout.write(str(step))


def make_segments(directory: Path) -> list[Path]:
    config = SpoolConfig(dir=directory, segment_bytes=1, fsync="never")
    spool = Spool(config, DESCRIPTOR, SHARDS)
    for ordinal in range(SAMPLES):
        spool.append(sample(ordinal))
    spool.close()
    return segments(directory)


def seal_all(made: list[Path], root: Path, *, link: bool) -> None:
    for path in made:
        records = verified(path, lambda _: True, bool)
        seal(path, root, DESCRIPTOR.stream_id(), records, bool, link=link)


def killed(made: list[Path], root: Path, step: int, *, link: bool) -> bool:
    child = os.fork()
    if child == 0:
        die_before(step, ("pwrite", "fsync", "fdatasync", "replace", "unlink", "link"))
        seal_all(made, root, link=link)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def check_pairs(root: Path) -> None:
    """What has an index is whole, whatever the moment."""
    for index in root.glob("*.idx"):
        assert read_index(index).head.digest == digest_of(index.with_suffix(".seg")), index


def check_whole(root: Path) -> None:
    names = [path.name for path in root.iterdir() if path.suffix not in (".seg", ".idx")]
    assert names == ["archive.json"], names
    with opened(root) as archive:
        assert archive.statistics().samples == SAMPLES
        assert all(archive.whole(sample(ordinal).id) for ordinal in range(SAMPLES))
    assert len(segments(root)) == SAMPLES


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
