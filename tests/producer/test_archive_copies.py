"""Samples that an archive has more than once: what is served, and what stands in for it."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from archive_helpers import (
    archive_samples,
    archiving,
    lines,
    opened,
    read,
    segments,
    the_other_copy_serves,
)
from draftfeed_producer.archive import Archive, ArchiveConfig
from draftfeed_producer.archive.reader import ArchiveReader
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import SyntheticConfig
from draftfeed_producer.errors import ArchiveError
from draftfeed_producer.spool import SpoolConfig
from draftfeed_proto.ids import IdSet
from samples import sample
from spool_helpers import flip

COUNT = 4


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """The second is a copy of the first."""
    with opened(tmp_path / "a") as archive:
        archive_samples(tmp_path / "spool", archive, range(COUNT))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def serves_all(archive: Archive) -> None:
    for ordinal in range(COUNT):
        assert read(archive, sample(ordinal).id) == sample(ordinal).digest()


def test_a_copied_root_beside_the_first_makes_up_for_rotten_bytes(
    tmp_path: Path, roots: tuple[Path, Path]
) -> None:
    """A file that was there twice counted once, and its second copy was never looked at."""
    id = sample(1).id.in_epoch(1)
    with opened(*roots) as archive, archiving(tmp_path / "spool", archive) as spool:
        first = archive.path_of(id).with_suffix(".seg")
        flip(first, first.stat().st_size // 2)
        the_other_copy_serves(spool, 1)
        assert id not in archive


def test_a_copied_root_beside_the_first_makes_up_for_a_rotten_index(
    tmp_path: Path, roots: tuple[Path, Path]
) -> None:
    """A replay gave its samples up for good: it had looked at the index when it started."""
    with opened(*roots) as archive, archiving(tmp_path / "spool", archive) as spool:
        for index in roots[0].glob("*.idx"):
            rotten = index.read_bytes()
            index.write_bytes(b"\xa5" * len(rotten))
        serves_all(archive)
        for ordinal in range(COUNT):
            id = sample(ordinal).id.in_epoch(1)
            assert spool.shelve(id) is not None
            places = spool.places(id, 0, 1)
            assert places is not None
            assert places.path.parent == roots[1]
            assert spool.whole(id)


def test_members_of_this_host_are_sent_to_the_copy_that_is_read_here(
    tmp_path: Path, roots: tuple[Path, Path]
) -> None:
    """They found the first one rotten, the producer found the other whole: without an end."""
    id = sample(1).id
    with opened(*roots) as archive:
        roots[0].rename(tmp_path / "away")
        assert archive.whole(id)
        (tmp_path / "away").rename(roots[0])
        places = archive.places(id, 0, 9)
        assert places is not None
        assert places.path.parent == roots[1]
        with places.path.open("rb") as file:
            for index, (offset, size) in enumerate(places.frames):
                assert os.pread(file.fileno(), size, offset) == archive.read_chunk(id, index)


def test_a_drive_that_goes_costs_nothing_while_its_copy_is_there_and_may_come_back(
    tmp_path: Path, roots: tuple[Path, Path]
) -> None:
    with opened(*roots) as archive:
        roots[0].rename(tmp_path / "away")
        serves_all(archive)
        (tmp_path / "away").rename(roots[0])
        roots[1].rename(tmp_path / "away")
    with opened(roots[0]) as archive:
        serves_all(archive)


def test_a_drive_that_comes_back_is_served_from_again(tmp_path: Path) -> None:
    """Its files were held to be unreadable until the next start."""
    root = tmp_path / "a"
    with opened(root) as archive:
        archive_samples(tmp_path / "spool", archive, range(COUNT))
    with opened(root) as archive:
        root.rename(tmp_path / "away")
        assert archive.header(sample(2).id) is None
        assert archive.unread(sample(2).id) is not None
        (tmp_path / "away").rename(root)
        serves_all(archive)


def test_made_again_and_archived_it_stands_in_for_one_on_a_drive_that_is_gone(
    tmp_path: Path,
) -> None:
    """Another segment has the sample, too: no copy of the file, but of the line."""
    one, two = tmp_path / "a", tmp_path / "b"
    for root, made in ((one, [1]), (two, [0, 1, 2])):
        with opened(root) as archive, archiving(root / "spool", archive) as spool:
            for ordinal in made:
                spool.append(sample(ordinal))
            spool.archive_rest()
    with opened(one, two) as archive, archiving(tmp_path / "spool", archive) as spool:
        id = sample(1).id.in_epoch(1)
        assert archive.path_of(id).parent == one
        one.rename(tmp_path / "away")
        assert spool.shelve(id) is not None
        assert read(spool, id) == sample(1).digest()


def test_index_that_was_exchanged_never_serves_one_sample_for_another(
    tmp_path: Path, roots: tuple[Path, Path]
) -> None:
    with opened(roots[0]) as archive:
        mine = archive.path_of(sample(0).id).with_suffix(".idx")
        other = archive.path_of(sample(1).id).with_suffix(".idx")
        shutil.copy(other, mine)
        assert archive.header(sample(0).id) is None


def test_tools_and_producers_choose_the_same_copy(tmp_path: Path, roots: tuple[Path, Path]) -> None:
    """A tool took what it found first, also out of a segment without an index."""
    (index,) = [path.with_suffix(".idx") for path in segments(roots[0])[:1]]
    index.unlink()
    reader = ArchiveReader(roots)
    records = {record.header.id: record for record in reader.records()}
    assert IdSet(records) == lines(range(COUNT))
    with opened(*roots) as archive:
        for id, record in records.items():
            assert reader.path(record) == archive.path_of(id).with_suffix(".seg")
        serves_all(archive)
        rest = [record for record in archive.records() if record.header.id in records]
        assert len(rest) == COUNT


def test_every_file_counts_in_the_quota_and_in_the_figures(
    tmp_path: Path, roots: tuple[Path, Path]
) -> None:
    files = segments(*roots)
    with opened(*roots) as archive:
        figures = archive.statistics()
    assert figures.segments == len(files) == 2 * COUNT
    assert figures.bytes == sum(path.stat().st_size for path in files)
    assert figures.samples == COUNT


@pytest.mark.parametrize("name", ["notes.seg", "5d648f13.idx", "X" * 32 + ".seg"])
def test_files_of_other_names_are_nobodys_samples(
    tmp_path: Path, roots: tuple[Path, Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A tool counted what a producer did not serve."""
    kind = name[-4:]
    victim = segments(roots[0])[0].with_suffix(kind)
    os.rename(victim, roots[0] / name)
    (roots[0] / victim.with_suffix(".idx" if kind == ".seg" else ".seg").name).unlink()
    with opened(roots[0]) as archive:
        there = archive.lines
    assert len(there) == COUNT - 1
    assert "is no name of a segment; nothing in it is served" in caplog.text
    reader = ArchiveReader(roots[:1])
    assert reader.lines == there
    assert [fault.path.name for fault in reader.faults] == [name]


def test_directory_under_two_names_is_refused(tmp_path: Path) -> None:
    """Every file counted twice, and a damaged one had itself as its copy."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with (
        pytest.raises(ArchiveError, match="is the same directory as"),
        opened(tmp_path / "a", tmp_path / "link"),
    ):
        pass


def test_a_link_to_a_directory_is_a_root(tmp_path: Path, roots: tuple[Path, Path]) -> None:
    (tmp_path / "link").symlink_to(roots[0])
    with opened(tmp_path / "link") as archive:
        archive_samples(tmp_path / "spool", archive, [COUNT])
        assert read(archive, sample(COUNT).id) == sample(COUNT).digest()
    assert len(segments(roots[0])) == COUNT + 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"format": 7}'])
def test_archive_json_that_is_none_is_one_line_that_names_it(
    roots: tuple[Path, Path], content: bytes
) -> None:
    (roots[0] / "archive.json").write_bytes(content)
    with pytest.raises(ArchiveError, match=str(roots[0])), opened(roots[0]):
        pass


def test_a_file_or_a_dangling_link_is_no_root_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("notes")
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    for name in ("file", "link"):
        with (
            pytest.raises(ArchiveError, match="cannot be used as an archive"),
            opened(tmp_path / name),
        ):
            pass


def test_the_spools_own_directory_is_no_root(tmp_path: Path) -> None:
    """Its segments would be taken for archived ones at the next start."""
    (tmp_path / "link").symlink_to(tmp_path / "spool")
    config = {"engine": SyntheticConfig(), "spool": SpoolConfig(dir=tmp_path / "spool")}
    for root in (tmp_path / "spool", tmp_path / "link"):
        with pytest.raises(ValueError, match=r"is \[spool\] dir"):
            ProducerConfig(archive=ArchiveConfig(roots=(root,)), **config)


def test_two_producers_fill_one_root_at_once(tmp_path: Path) -> None:
    """Each has files of its own names while it writes, and neither takes the other's away."""
    root = tmp_path / "a"

    def fill(number: int) -> None:
        with opened(root) as archive:
            ours = range(20 * number, 20 * number + 20)
            archive_samples(tmp_path / f"spool-{number}", archive, ours)

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(fill, number) for number in range(3)]:
            one.result(timeout=60)
    with opened(root) as archive:
        assert archive.lines == lines(range(60))
        for ordinal in range(60):
            assert read(archive, sample(ordinal).id) == sample(ordinal).digest()
    assert {path.suffix for path in root.iterdir()} == {".json", ".seg", ".idx"}
