"""Archives of small samples, and spools that fill them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftfeed_producer.archive import Archive, ArchiveConfig, ArchivedSpool
from draftfeed_producer.archive.shelf import Shelf
from draftfeed_producer.spool import SpoolConfig
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import Assembler
from samples import DATASET, DESCRIPTOR, sample
from waiting import eventually

EPOCHS = 3
PROMPTS = Shards(DATASET, 0, (0, 100), EPOCHS)


def lines(ordinals: Iterable[int], epoch: int = 0) -> IdSet:
    return IdSet(SampleId(DATASET, epoch, line // 16, line) for line in ordinals)


LINES = lines(range(1600))


@contextmanager
def opened(*roots: Path, stopped: Callable[[], bool] = bool, **options: Any) -> Iterator[Archive]:
    config = ArchiveConfig(roots=roots, **{"min_free_bytes": 0, **options})
    archive = Archive(config, DESCRIPTOR, PROMPTS, LINES, stopped)
    try:
        yield archive
    finally:
        archive.close()


def spool_config(directory: Path, **options: Any) -> SpoolConfig:
    """Every sample has a segment of its own unless told otherwise."""
    settings = {
        "retain": "archive",
        "segment_bytes": 1,
        "quota_bytes": 1 << 30,  # the tests' drive must have more
        "audit": True,
        "fsync": "never",
    }
    return SpoolConfig(dir=directory, **{**settings, **options})


@contextmanager
def archiving(
    directory: Path, archive: Archive, kind: type[ArchivedSpool] = ArchivedSpool, **options: Any
) -> Iterator[ArchivedSpool]:
    spool = kind(spool_config(directory, **options), DESCRIPTOR, PROMPTS, archive)
    try:
        yield spool
    finally:
        spool.close()


def commit(spool: ArchivedSpool, trained: IdSet) -> None:
    """Twice: what the last two checkpoints contain no restore needs again."""
    for _ in range(2):
        spool.commit(spool.commit_number + 1, trained, term=1)


def archive_samples(directory: Path, archive: Archive, ordinals: Iterable[int]) -> None:
    """Made, trained and sealed."""
    ordinals = list(ordinals)
    with archiving(directory, archive) as spool:
        for ordinal in ordinals:
            spool.append(sample(ordinal))
        commit(spool, IdSet.union([spool.committed, lines(ordinals)]))
        eventually(lambda: not list(directory.glob("*.seg")), "the spool is empty")


def read(archive: Archive | ArchivedSpool, id: SampleId) -> str:
    """Digest of what is served under an id."""
    header = archive.header(id) if isinstance(archive, Archive) else archive.header_of(id)
    assert header is not None, f"{id} is not there"
    assert header.id == id
    assembler = Assembler(header)
    for index in range(header.chunks):
        assembler.add(archive.read_chunk(id, index))
    return assembler.sample().digest()


def the_other_copy_serves(spool: ArchivedSpool, ordinal: int) -> None:
    """When the copy of this line that is served first is damaged, and nothing does when both are.
    In epoch 1."""
    id = sample(ordinal).id.in_epoch(1)
    shelf = Shelf(spool)
    shelf.begin(1, lines([ordinal], epoch=1))
    assert shelf.take() is not None
    assert not spool.whole(id)
    spool.void(id, "damaged")
    assert shelf.give_back(id)
    assert shelf.take() is not None
    assert read(spool, id) == sample(ordinal).digest()
    spool.void(id, "damaged, too")
    assert not shelf.give_back(id)


def segments(*roots: Path) -> list[Path]:
    return sorted(path for root in roots for path in root.glob("*.seg"))
