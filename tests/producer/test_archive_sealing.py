"""What becomes of a spool's segments in an archive: killed, damaged, full, gone."""

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from archive_helpers import (
    LINES,
    PROMPTS,
    archive_samples,
    archiving,
    commit,
    lines,
    opened,
    read,
    segments,
    the_other_copy_serves,
)
from draftfeed_producer.archive import Archive, ArchiveConfig, ArchivedSpool, archiver
from draftfeed_producer.archive.reader import ArchiveReader
from draftfeed_producer.archive.sealed import digest_of
from draftfeed_producer.archive.shelf import Shelf
from draftfeed_producer.errors import ArchiveError
from draftfeed_producer.spool.files import free_bytes
from draftfeed_producer.spool.segments import Record
from draftfeed_proto.ids import IdSet, SampleId
from samples import DESCRIPTOR, sample
from spool_helpers import flip
from waiting import eventually

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Makes real file systems of a few MiB."""
    mounted: list[Path] = []

    def make(name: str, size: str) -> Path:
        disk = tmp_path / name
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
        mounted.append(disk)
        return disk

    yield make
    for disk in mounted:
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True)


def fill(directory: Path, leave_bytes: int) -> Path:
    path = directory / "somebody-else"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(directory) - leave_bytes)
    return path


# killed


@pytest.mark.parametrize("link", ["", "link"])
def test_killed_between_any_two_writes_leaves_no_half_segment_and_no_rubbish(
    tmp_path: Path, link: str, record_property: Callable[[str, object], None]
) -> None:
    program = Path(__file__).with_name("archive_child.py")
    done = subprocess.run(
        [sys.executable, program, tmp_path, link],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    record_property(f"places killed at{', linked' if link else ''}", done.stdout)
    assert int(done.stdout) > 15


def test_what_a_killed_process_had_released_and_not_sealed_is_sealed_by_the_next(
    tmp_path: Path,
) -> None:
    with opened(tmp_path / "a") as archive:
        with archiving(tmp_path / "spool", archive, retain="delete") as spool:
            for ordinal in range(3):
                spool.append(sample(ordinal))
            spool.commit(1, lines(range(3)), term=1)
        # The second commit is written, and then the process is gone.
        with archiving(tmp_path / "spool", archive, keep_checkpoints=3) as spool:
            spool.commit(2, lines(range(3)), term=1)
        assert archive.statistics().samples == 0
        with archiving(tmp_path / "spool", archive):
            eventually(lambda: archive.statistics().samples == 3, "three are sealed")


def test_last_segment_is_copied_and_the_closed_ones_are_linked(tmp_path: Path) -> None:
    """A link to a file that is appended to later would change in the archive."""
    with (
        opened(tmp_path / "a") as archive,
        archiving(tmp_path / "spool", archive, segment_bytes=20_000) as spool,
    ):
        for ordinal in range(5):
            spool.append(sample(ordinal))
        files = segments(tmp_path / "spool")
        assert len(files) > 1
        commit(spool, lines(range(5)))
        spool.archive_rest()
        assert archive.statistics().samples == 5
        inodes = {path.stat().st_ino for path in segments(tmp_path / "a")}
        assert files[-1].stat().st_ino not in inodes


def test_segment_that_an_archive_shares_is_never_appended_to(tmp_path: Path) -> None:
    """It was full; with a larger [spool] segment_bytes it is not, and it became the last one."""
    with opened(tmp_path / "a") as archive:
        with archiving(tmp_path / "spool", archive) as spool:
            for ordinal in range(2):
                spool.append(sample(ordinal))
            spool.archive_rest()
        segments(tmp_path / "spool")[-1].unlink()
        with archiving(tmp_path / "spool", archive, segment_bytes=MIB) as spool:
            spool.append(sample(2))
        for path in segments(tmp_path / "a"):
            assert digest_of(path) == path.stem


# on the way


class Gated(ArchivedSpool):
    """Seals when it is told to."""

    gate: threading.Event

    def _serve_again(self, record: Record) -> bool:
        assert self.gate.wait(60)
        return super()._serve_again(record)


def test_rollback_brings_back_what_waits_to_be_sealed(tmp_path: Path) -> None:
    """It was taken for freed: refused, or generated again. After a restart a commit of such
    samples was refused, too."""
    Gated.gate = threading.Event()
    with (
        opened(tmp_path / "a") as archive,
        archiving(tmp_path / "spool", archive, Gated) as spool,
    ):
        try:
            id = spool.append(sample(1)).header.id
            commit(spool, lines([1]))
            for one in (id, id.in_epoch(1)):
                assert (found := spool.header_of(one)) is not None
                assert found.id == one
            spool.commit(3, IdSet(), term=1, rollback=True)
            assert not spool.regenerated
            assert spool.whole(id)
            assert read(spool, id) == sample(1).digest()
        finally:
            Gated.gate.set()
        eventually(lambda: not segments(tmp_path / "spool"), "it is sealed")
        assert spool.whole(id)
        assert read(spool, id) == sample(1).digest()


def test_epoch_that_begins_while_segments_wait_to_be_sealed_generates_nothing_again(
    tmp_path: Path,
) -> None:
    Gated.gate = threading.Event()
    with (
        opened(tmp_path / "a") as archive,
        archiving(tmp_path / "spool", archive, Gated) as spool,
    ):
        try:
            digests = {}
            for ordinal in range(5):
                spool.append(sample(ordinal))
                digests[ordinal] = sample(ordinal).digest()
            commit(spool, lines(range(4)))  # the fifth stays in the spool
            assert archive.statistics().samples == 0
            assert spool.lines() == lines(range(5))
            shelf = Shelf(spool)
            shelf.begin(1, lines(range(5), epoch=1))
            first = shelf.take()
            assert first is not None
            assert first[0].ordinal == 4
            assert shelf.take() is None
            assert not shelf.exhausted
        finally:
            Gated.gate.set()
        eventually(lambda: archive.statistics().samples == 4, "four are sealed")
        taken = [first, *(one for _ in range(4) if (one := shelf.take()) is not None)]
        assert shelf.exhausted
        assert sorted(id.ordinal for id, _ in taken) == [0, 1, 2, 3, 4]
        assert {id.ordinal: read(spool, id) for id, _ in taken} == digests


# damaged


def damaged(path: Path, how: str) -> None:
    match how:
        case "torn":
            os.truncate(path, path.stat().st_size - 10)
        case "flipped":
            flip(path, path.stat().st_size // 2)
        case "empty":
            os.truncate(path, 0)
        case "missing":
            path.unlink()


@pytest.fixture
def four(tmp_path: Path) -> tuple[Path, Path, int]:
    """(a root with four samples, one of its segments, the line in it)"""
    root = tmp_path / "a"
    with opened(root) as archive:
        archive_samples(tmp_path / "spool", archive, range(4))
        victim = segments(root)[1]
        line = next(n for n in range(4) if archive.path_of(sample(n).id) == victim.with_suffix(""))
    return root, victim, line


@pytest.mark.parametrize("how", ["torn", "flipped", "empty", "missing"])
def test_damaged_segment_costs_its_own_samples_only_and_their_lines_still_count(
    four: tuple[Path, Path, int], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay with fewer lines than before would refuse the group's checkpoint."""
    root, victim, lost = four
    damaged(victim, how)
    with opened(root) as archive:
        there = [n for n in range(4) if archive.whole(sample(n).id)]
        assert there == [n for n in range(4) if n != lost]
        for ordinal in there:
            assert read(archive, sample(ordinal).id) == sample(ordinal).digest()
        assert archive.lines == lines(range(4))
        assert sample(lost).id in archive
        if how != "flipped":  # which is found when it is read
            assert archive.header(sample(lost).id) is None
            assert archive.statistics().samples == 3
            assert victim.stem in caplog.text


@pytest.mark.parametrize("how", ["torn", "flipped", "empty", "missing"])
def test_damaged_index_costs_nothing_while_its_segment_is_whole(
    four: tuple[Path, Path, int], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, victim, _ = four
    damaged(victim.with_suffix(".idx"), how)
    with opened(root) as archive:
        for ordinal in range(4):
            assert read(archive, sample(ordinal).id) == sample(ordinal).digest()
        assert len(list(archive.records())) == 4
    assert "1 samples are found in the segment, 0 are lost" in caplog.text


def test_pair_that_is_sealed_while_a_root_is_listed_is_whole(
    four: tuple[Path, Path, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A large root is read in parts: of a new pair the segment alone may be seen."""
    root, victim, _ = four
    seen = [name for name in os.listdir(root) if name != victim.stem + ".idx"]
    monkeypatch.setattr(os, "listdir", lambda _: seen)
    with opened(root) as archive:
        assert archive.statistics().segments == 4
    assert ArchiveReader((root,)).faults == []
    assert caplog.text == ""


def test_damaged_sample_is_served_from_its_other_copy(tmp_path: Path) -> None:
    """It was made again and archived. Which of the two the next start takes first is chance."""
    root, id = tmp_path / "a", sample(1).id.in_epoch(1)
    with opened(root) as archive:
        archive_samples(tmp_path / "one", archive, [1])
        with archiving(tmp_path / "two", archive) as spool:
            for ordinal in (0, 1, 2):  # another digest, for it has another place
                spool.append(sample(ordinal))
            spool.archive_rest()
    with opened(root) as archive:
        first = archive.path_of(id).with_suffix(".seg")
        flip(first, first.stat().st_size // 2)
        with archiving(tmp_path / "three", archive) as spool:
            the_other_copy_serves(spool, 1)


def test_damage_at_rest_is_made_again_once_and_takes_the_place_of_the_old(tmp_path: Path) -> None:
    root = tmp_path / "a"
    id = sample(1).id
    with opened(root) as archive:
        archive_samples(tmp_path / "spool", archive, range(3))
        victim = archive.path_of(id).with_suffix(".seg")
        flip(victim, victim.stat().st_size // 2)
        with archiving(tmp_path / "spool", archive) as spool:
            later = id.in_epoch(1)
            assert spool.shelve(later) is not None
            assert not spool.whole(later)
            spool.void(later, "damaged")
            assert spool.header_of(later) is None
            assert later in spool.regenerated
            spool.append(msgspec.structs.replace(sample(1), id=later))
            commit(spool, IdSet.union([lines(range(3)), lines([1], epoch=1)]))
            eventually(lambda: id in archive, "the new one is sealed")
        assert read(archive, id) == sample(1).digest()


def test_archive_of_another_stream_is_refused_by_name(tmp_path: Path) -> None:
    with opened(tmp_path / "a"):
        pass
    other = msgspec.structs.replace(DESCRIPTOR, revision="r2")
    with pytest.raises(ArchiveError, match="revision 'r1', this is 'r2'"):
        Archive(ArchiveConfig(roots=(tmp_path / "a",)), other, PROMPTS)


def test_archive_of_another_prompt_file_is_refused_by_name(tmp_path: Path) -> None:
    with opened(tmp_path / "a"):
        pass
    other = msgspec.structs.replace(PROMPTS, dataset="f" * 16)
    with pytest.raises(ArchiveError, match="prompt file '0123456789abcdef'"):
        Archive(ArchiveConfig(roots=(tmp_path / "a",)), DESCRIPTOR, other)


@pytest.mark.parametrize("what", ["stream", "prompts"])
def test_segments_copied_into_the_wrong_archive_are_not_served(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = msgspec.structs.replace(DESCRIPTOR, revision="r2") if what == "stream" else DESCRIPTOR
    prompts = PROMPTS if what == "stream" else msgspec.structs.replace(PROMPTS, dataset="f" * 16)
    with opened(tmp_path / "a") as archive:
        archive_samples(tmp_path / "spool", archive, range(2))
    config = ArchiveConfig(roots=(tmp_path / "b",))
    Archive(config, stream, prompts).close()
    for path in (tmp_path / "a").glob("*.*x"):
        shutil.copy(path, tmp_path / "b")
        shutil.copy(path.with_suffix(".seg"), tmp_path / "b")
    archive = Archive(config, stream, prompts)
    assert archive.statistics().samples == 0
    assert f"is of another {'stream' if what == 'stream' else 'prompt file'}" in caplog.text
    archive.close()


def test_segments_without_archive_json_are_not_taken_for_an_empty_root(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as archive:
        archive_samples(tmp_path / "spool", archive, range(2))
    (tmp_path / "a" / "archive.json").unlink()
    with pytest.raises(ArchiveError, match="it was lost, or never copied"), opened(tmp_path / "a"):
        pass


def test_quarantined_samples_are_not_archived_and_rejected_ones_are(tmp_path: Path) -> None:
    """What kills the trainer would kill it again; what its policy refuses it refuses again."""
    with opened(tmp_path / "a") as archive, archiving(tmp_path / "spool", archive) as spool:
        for ordinal in range(3):
            spool.append(sample(ordinal))
        spool.tombstone(sample(0).id, "quarantined", "the trainer dies of it")
        spool.tombstone(sample(1).id, "rejected", "zero rows")
        commit(spool, lines([2]))
        spool.archive_rest()
        assert archive.lines == lines([1, 2])


# full


def test_full_quota_names_the_sample_and_a_larger_one_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "a") as archive:
        archive_samples(tmp_path / "spool", archive, range(1))
        size = archive.statistics().bytes
    with opened(tmp_path / "a", quota_bytes=3 * size + size // 2) as archive:
        with archiving(tmp_path / "spool", archive) as spool:
            for ordinal in range(1, 6):
                spool.append(sample(ordinal))
                commit(spool, lines(range(ordinal + 1)))
            eventually(lambda: not segments(tmp_path / "spool"), "the stream goes on")
            full = spool.archive_statistics()
            assert full.samples == 3
            assert full.missed == 3
            assert "the archive takes no more" in full.alarm
            assert "quota_bytes" in full.alarm
        said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
        assert len(said) == 1
        assert f"from sample {sample(3).id} on" in said[0]
    with opened(tmp_path / "a", quota_bytes=100 * size) as archive:
        archive_samples(tmp_path / "spool", archive, range(6, 8))
        assert archive.lines == lines([0, 1, 2, 6, 7])


def test_full_drive_stops_the_archive_and_not_the_stream_and_room_lets_it_go_on(
    tmp_path: Path, small_disk: Callable[[str, str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk = small_disk("disk", "4m")
    with (
        opened(disk / "a") as archive,
        archiving(tmp_path / "spool", archive) as spool,
    ):
        big = fill(disk, leave_bytes=0)
        spool.append(sample(0))
        commit(spool, lines([0]))
        eventually(lambda: spool.archive_statistics().missed == 1, "it is given up")
        eventually(lambda: not segments(tmp_path / "spool"), "the spool goes on")
        assert "min_free_bytes" in spool.archive_statistics().alarm
        assert [path.name for path in (disk / "a").iterdir()] == ["archive.json"]
        big.unlink()
        spool.append(sample(1))
        commit(spool, lines([0, 1]))
        eventually(lambda: archive.statistics().samples == 1, "archiving goes on")
        assert not spool.archive_statistics().alarm
    assert f"archiving goes on, in {disk / 'a'}" in caplog.text


def test_archive_on_the_spools_drive_leaves_it_what_it_may_grow_to(
    small_disk: Callable[[str, str], Path],
) -> None:
    """Links free nothing: it took the drive, and of a spool that was small then little was left for
    a trainer that fell behind later."""
    disk = small_disk("disk", "8m")
    with (
        opened(disk / "a") as archive,
        archiving(disk / "spool", archive, quota_bytes=2 * MIB, min_free_bytes=MIB) as spool,
    ):
        made = 0
        while not spool.archive_statistics().missed:
            spool.append(sample(made, rows=400))
            made += 1
            commit(spool, lines(range(made)))
            eventually(lambda: not segments(disk / "spool"), "it is archived, or given up")
        assert archive.statistics().bytes > 2 * MIB
        assert "[spool] quota_bytes" in spool.archive_statistics().alarm
        while spool.wait_for_space(0.0):
            spool.append(sample(made, rows=400))
            made += 1
        assert "quota_bytes is" in spool.alarm


def test_drive_that_fills_while_a_segment_is_copied_keeps_nothing_of_it(
    tmp_path: Path, small_disk: Callable[[str, str], Path]
) -> None:
    disk = small_disk("disk", "4m")
    with opened(disk / "a") as archive, archiving(tmp_path / "spool", archive) as spool:
        spool.append(sample(0, rows=400))
        (segment,) = segments(tmp_path / "spool")
        # The segment fits as a file, and its index does not.
        fill(disk, leave_bytes=-(-segment.stat().st_size // 4096) * 4096)
        commit(spool, lines([0]))
        eventually(lambda: spool.archive_statistics().missed == 1, "it is given up")
        assert [path.name for path in (disk / "a").iterdir()] == ["archive.json"]
        assert "No space left" in spool.archive_statistics().alarm


# several roots


def test_segments_go_to_the_root_with_most_space(
    tmp_path: Path, small_disk: Callable[[str, str], Path]
) -> None:
    small, large = small_disk("small", "2m"), small_disk("large", "8m")
    with opened(small / "a", large / "a") as archive:
        archive_samples(tmp_path / "spool", archive, range(2))
        assert len(segments(large / "a")) == 2
        fill(large, leave_bytes=1 << 16)
        archive_samples(tmp_path / "spool", archive, range(2, 4))
        assert len(segments(small / "a")) == 2
    with opened(small / "a", large / "a") as archive:
        for ordinal in range(4):
            assert read(archive, sample(ordinal).id) == sample(ordinal).digest()


def test_root_that_refuses_to_be_written_does_not_stop_the_others(
    tmp_path: Path, small_disk: Callable[[str, str], Path]
) -> None:
    large, small = small_disk("large", "8m"), small_disk("small", "2m")
    with opened(large, small) as archive:
        subprocess.run(["mount", "-o", "remount,ro", str(large)], check=True)
        archive_samples(tmp_path / "spool", archive, range(2))
        assert len(segments(small)) == 2
        assert segments(large) == []


def test_producers_that_begin_an_archive_at_once_share_it(tmp_path: Path) -> None:
    root, barrier, failed = tmp_path / "a", threading.Barrier(6), list[Exception]()

    def begin() -> None:
        barrier.wait()
        try:
            with opened(root):
                pass
        except ArchiveError as error:
            failed.append(error)

    threads = [threading.Thread(target=begin) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [path.name for path in root.iterdir()] == ["archive.json"]


def test_root_that_hangs_costs_the_archive_and_neither_the_stream_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the archive takes room in the spool, and generation would wait for it."""
    monkeypatch.setattr(archiver, "PATIENCE_SECONDS", 0.0)
    Gated.gate = threading.Event()
    with (
        opened(tmp_path / "a") as archive,
        archiving(tmp_path / "spool", archive, Gated, quota_bytes=1 << 17) as spool,
    ):
        try:
            for ordinal in range(30):
                assert spool.wait_for_space(0.2), f"sample {ordinal} waits"
                spool.append(sample(ordinal))
                commit(spool, lines(range(ordinal + 1)))
            full = spool.archive_statistics()
            assert full.missed > 10
            assert "slower than what is to be archived" in full.alarm
        finally:
            Gated.gate.set()
        eventually(lambda: archive.statistics().samples == 30 - full.missed, "it goes on")
        assert not spool.archive_statistics().alarm


def test_archive_that_keeps_up_loses_nothing_to_a_spool_that_is_full(tmp_path: Path) -> None:
    """Where the trainer is slower than generation it always is."""
    Gated.gate = threading.Event()
    with (
        opened(tmp_path / "a") as archive,
        archiving(tmp_path / "spool", archive, Gated, quota_bytes=1 << 17) as spool,
    ):
        for ordinal in range(30):
            if not spool.wait_for_space(0.01):
                break
            spool.append(sample(ordinal))
            commit(spool, lines(range(ordinal + 1)))
        assert spool.alarm
        Gated.gate.set()
        eventually(lambda: spool.wait_for_space(0.1), "room")
        assert spool.archive_statistics().missed == 0


def test_root_that_disappears_costs_its_samples_and_nothing_goes_there(
    tmp_path: Path, small_disk: Callable[[str, str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The empty mount point that is left must not be filled: it is the system's own disk."""
    lost, other = small_disk("lost", "8m"), small_disk("other", "2m")
    with opened(lost, other) as archive:
        archive_samples(tmp_path / "spool", archive, range(2))
        assert len(segments(lost)) == 2
    with opened(lost, other) as archive:
        subprocess.run(["umount", "--lazy", str(lost)], check=True)
        archive_samples(tmp_path / "spool", archive, range(2, 4))
        assert list(lost.iterdir()) == []
        assert len(segments(other)) == 2
        with archiving(tmp_path / "spool", archive) as spool:
            assert spool.shelve(SampleId(*sample(0).id.partition, 0).in_epoch(1)) is None
            assert spool.shelve(sample(2).id.in_epoch(1)) is not None
        assert "its samples are not served" in caplog.text
        subprocess.run(["umount", "--lazy", str(other)], check=True)
        with archiving(tmp_path / "spool", archive) as spool:
            spool.append(sample(4))
            commit(spool, lines(range(5)))
            eventually(lambda: spool.archive_statistics().missed == 1, "it is given up")
            assert "no root can be reached" in spool.archive_statistics().alarm


def test_roots_say_which_prompts_there_are(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as archive:
        assert IdSet.from_wire(archive.contents.lines) == LINES
