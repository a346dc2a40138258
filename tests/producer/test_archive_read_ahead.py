"""A cold archive is fetched ahead of what is sent, so that the drive does not wait for the link."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from draftfeed_producer.archive import Archive, ArchiveConfig
from draftfeed_producer.archive.sealed import seal, verified
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_proto.ids import SampleId, Shards
from samples import DATASET, DESCRIPTOR, sample
from waiting import eventually

ROWS = 4000
"""1.5 MB a sample: more than the kernel reads ahead by itself."""


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """Two samples in one segment, sealed."""
    shards = Shards(DATASET, 0, (0, 1))
    archive = Archive(ArchiveConfig(roots=(tmp_path / "archive",)), DESCRIPTOR, shards)
    spool = Spool(SpoolConfig(dir=tmp_path / "spool"), DESCRIPTOR, shards)
    for ordinal in range(2):
        spool.append(sample(ordinal, ROWS))
    (segment,) = (tmp_path / "spool").rglob("*.seg")
    root = tmp_path / "archive"
    records = verified(segment, lambda _: True, bool)
    head = seal(segment, root, DESCRIPTOR.stream_id(), records, bool, link=False)
    spool.close()
    archive.add(root, head)
    return archive


def resident_bytes(path: Path) -> int:
    """Of a file, in the page cache (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert libc.mincore(address, ctypes.c_size_t(size), pages) == 0
        del start
    return mmap.PAGESIZE * sum(page & 1 for page in pages.raw)


def forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_sample_that_is_to_be_sent_next_is_fetched_before_its_chunks_are_asked_for(
    archive: Archive, tmp_path: Path
) -> None:
    (segment,) = (tmp_path / "archive").glob("*.seg")
    forget(segment)
    if resident_bytes(segment):
        pytest.skip("this file system keeps its files in memory")
    id = SampleId(DATASET, 3, 0, 1)
    header = archive.header(id)
    assert header is not None
    archive.read_ahead(id)
    eventually(lambda: resident_bytes(segment) >= header.encoded_bytes, "the sample in memory")
    assert archive.whole(id)


def test_reading_ahead_what_is_not_there_is_no_error(archive: Archive, tmp_path: Path) -> None:
    """A sample may be spoilt, or its root gone, between the grant and its turn."""
    archive.read_ahead(SampleId(DATASET, 1, 0, 9))
    for path in (tmp_path / "archive").glob("*.seg"):
        path.unlink()
    archive.read_ahead(SampleId(DATASET, 1, 0, 0))
