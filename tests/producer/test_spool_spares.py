"""Segments are written over the files of those that nobody needs any more."""

import resource
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from draftfeed_producer.errors import SpoolFull
from draftfeed_producer.spool import Spool
from draftfeed_producer.spool import space as space_module
from draftfeed_producer.spool.reader import Reader
from draftfeed_producer.spool.segments import Damage
from samples import sample
from spool_helpers import flip, ids, open_spool, ordinals, read_back, segment_files

SEGMENT_BYTES = 60_000
"""Of several samples."""


def spares(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.spare"))


def places(directory: Path) -> list[tuple[int, int]]:
    """Segment and ordinal of each record."""
    return [(one.segment, one.header.id.ordinal) for one in Reader(directory).records()]


def filled(directory: Path, count: int = 12, **options: Any) -> Spool:
    spool = open_spool(
        directory, segment_bytes=SEGMENT_BYTES, keep_checkpoints=1, codec="raw", **options
    )
    for k in range(count):
        spool.append(sample(k))
    return spool


def test_new_segments_are_written_over_files_of_old_ones(tmp_path: Path) -> None:
    """New pages for all that is written cost the producer more than writing."""
    spool = filled(tmp_path)
    before = {path.stat().st_ino for path in segment_files(tmp_path)}
    spool.commit(1, ids(*range(12)), term=1)
    kept = spares(tmp_path)
    assert kept
    for k in range(12, 24):
        spool.append(sample(k))
    after = {path.stat().st_ino for path in segment_files(tmp_path)}
    assert len(before & after) >= len(kept)
    assert [read_back(spool, k) for k in range(12, 24)] == [
        sample(k).digest() for k in range(12, 24)
    ]
    spool.close()
    assert not spares(tmp_path)
    assert sum(path.stat().st_size for path in segment_files(tmp_path)) < 13 * SEGMENT_BYTES


@pytest.mark.parametrize("appended", range(1, 6))
def test_after_a_kill_no_old_sample_comes_back_and_no_new_one_is_damaged(
    tmp_path: Path, appended: int
) -> None:
    """Behind what is new in a file lies what was there before: samples that were trained."""
    spool = filled(tmp_path / "s")
    spool.commit(1, ids(*range(12)), term=1)
    for k in range(12, 12 + appended):
        spool.append(sample(k))
    before = places(tmp_path / "s")
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    spool.close()
    assert spares(tmp_path / "killed")
    again = open_spool(tmp_path / "killed", segment_bytes=SEGMENT_BYTES, keep_checkpoints=1)
    assert not spares(tmp_path / "killed")
    assert places(tmp_path / "killed") == before
    assert ordinals(again) == list(range(12, 12 + appended))
    for k in range(12, 12 + appended):
        assert read_back(again, k) == sample(k).digest()
    assert not again.regenerated
    again.close()


def test_a_tool_that_reads_a_segment_while_it_is_freed_and_written_over_sees_no_damage(
    tmp_path: Path,
) -> None:
    """A verification of a running producer's spool called healthy samples damaged."""
    spool = filled(tmp_path)
    reader = Reader(tmp_path)
    first, *_ = reader.segments()
    looks = reader.scan(first)
    record = next(looks)
    assert not isinstance(record, Damage)
    spool.commit(1, ids(*range(12)), term=1)
    for k in range(12, 18):
        spool.append(sample(k))
    assert not list(looks)
    assert reader.sample(record) is None
    assert reader.frame(record, 0) is None
    spool.close()


def test_spare_that_cannot_be_opened_leaves_no_segment(tmp_path: Path) -> None:
    """Its file had the segment's name by then, and the next start found a sample cut short."""
    spool = filled(tmp_path)
    spool.commit(1, ids(*range(12)), term=1)
    before = segment_files(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(SpoolFull):
            deque(map(spool.append, map(sample, range(12, 24))), maxlen=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert segment_files(tmp_path) == before
    spool.close()


def test_who_was_shut_out_reads_nothing_that_comes_later(tmp_path: Path) -> None:
    """A member of this host keeps the files that it was handed."""
    spool = filled(tmp_path)
    spool.commit(1, ids(*range(6)), term=1)
    handed = {path.stat().st_ino for path in [*segment_files(tmp_path), *spares(tmp_path)]}
    opened = [path.open("rb") for path in [*segment_files(tmp_path), *spares(tmp_path)]]
    spool.retire_files()
    for k in range(12, 40):
        spool.append(sample(k))
        spool.commit(k, ids(*range(k)), term=1)
    new = segment_files(tmp_path)[1:]  # one may have been in use
    assert not handed & {path.stat().st_ino for path in new}
    assert spares(tmp_path)
    for file in opened:
        file.close()
    spool.close()


def test_all_files_together_stay_below_the_quota(tmp_path: Path) -> None:
    spool = filled(tmp_path, 4, quota_bytes=10 * SEGMENT_BYTES)
    for k in range(4, 40):
        spool.append(sample(k))
        if k % 4 == 0:
            spool.commit(k, ids(*range(k)), term=1)
        files = [*segment_files(tmp_path), *spares(tmp_path)]
        assert sum(path.stat().st_size for path in files) <= 10 * SEGMENT_BYTES
    spool.close()


def test_spares_go_when_others_need_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = filled(tmp_path)
    spool.commit(1, ids(*range(8)), term=1)
    assert spares(tmp_path)
    monkeypatch.setattr(space_module, "free_bytes", lambda directory: 0)
    spool.commit(2, ids(*range(12)), term=1)
    assert not spares(tmp_path)
    spool.close()


def test_a_file_that_others_have_too_or_that_is_damaged_is_not_written_over(
    tmp_path: Path,
) -> None:
    """It may be a copy that somebody took; and where headers are lost, old ones may lie behind."""
    spool = filled(tmp_path)
    spool.close()
    first, second, *_ = segment_files(tmp_path)
    (tmp_path / "copy").hardlink_to(first)
    content = first.read_bytes()
    flip(second, 30)  # in the header of its second entry
    again = open_spool(tmp_path, segment_bytes=SEGMENT_BYTES, keep_checkpoints=1)
    again.commit(1, ids(*range(12)), term=1)
    names = {path.stem for path in spares(tmp_path)}
    assert names
    assert not names & {first.stem, second.stem}
    again.close()
    assert (tmp_path / "copy").read_bytes() == content
