"""The spool when the disk is full or the process is killed: what is there, and who waits."""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftfeed_producer.errors import SpoolFull
from draftfeed_producer.spool import Spool
from draftfeed_producer.spool import samples as sample_files
from draftfeed_producer.spool.files import free_bytes
from samples import sample
from spool_helpers import ids, open_spool, ordinals, read_back, segment_files, spool_child
from waiting import eventually

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(directory: Path, leave_bytes: int) -> Path:
    """A file of somebody else's, which takes all but so many bytes."""
    path = directory / "somebody-else"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(directory) - leave_bytes)
    return path


def append_until_full(spool: Spool) -> int:
    for stored in range(1000):
        try:
            spool.append(sample(stored, rows=400))
        except SpoolFull as error:
            if error.cause.errno != errno.ENOSPC:
                raise
            return stored
    raise AssertionError("the disk took everything")


def test_a_disk_that_does_not_say_how_full_it_is_pauses_generation(tmp_path: Path) -> None:
    """A spool's directory that was taken away ended the producer with five tracebacks, of which the
    last, "Bad file descriptor", was not the cause."""
    directory = tmp_path / "spool"
    spool = open_spool(directory)
    spool.append(sample(0))
    directory.rename(tmp_path / "elsewhere")
    assert "its free space is not known: No such file or directory" in spool.alarm
    assert not spool.wait_for_space(0)
    assert spool.statistics().alarm == spool.alarm
    (tmp_path / "elsewhere").rename(directory)
    assert spool.wait_for_space(0)
    spool.append(sample(1))
    assert ordinals(spool) == [0, 1]
    spool.close()


def test_disk_fills_and_the_producer_neither_dies_nor_repeats_finished_work(
    small_disk: Path,
) -> None:
    """Elsewhere a full disk kills the process, and the resume writes finished samples again."""
    directory = small_disk / "spool"
    options: dict[str, Any] = {"min_free_bytes": 0, "segment_bytes": 1, "keep_checkpoints": 1}
    spool = open_spool(directory, **options)
    stored = append_until_full(spool)
    assert stored > 2
    assert "the disk is full" in spool.alarm
    assert not spool.wait_for_space(0)
    assert ordinals(spool) == list(range(stored))
    spool.close()  # the producer may as well be restarted now
    spool = open_spool(directory, **options)
    assert [k for k in range(stored + 1) if not spool.finished(sample(k).id)] == [stored]
    spool.commit(1, ids(*range(stored)), term=1)  # recorded on the full disk; frees it
    assert spool.wait_for_space(0)
    spool.append(sample(stored, rows=400))
    assert spool.alarm == ""
    assert ordinals(spool) == [stored]
    assert read_back(spool, stored) == sample(stored, rows=400).digest()
    spool.close()


def test_disk_full_in_mid_sample_loses_nothing_and_goes_on_by_itself(small_disk: Path) -> None:
    spool = open_spool(small_disk / "spool", min_free_bytes=0)
    spool.append(sample(0))
    other = fill(small_disk, leave_bytes=12_000)
    with pytest.raises(SpoolFull, match="No space left on device"):
        spool.append(sample(1, rows=400))
    assert "the disk is full" in spool.alarm
    assert not spool.wait_for_space(0)
    other.unlink()
    assert spool.wait_for_space(0)
    spool.append(sample(1, rows=400))
    assert spool.alarm == ""
    spool.close()
    spool = open_spool(small_disk / "spool")
    assert [read_back(spool, k) for k in (0, 1)] == [
        sample(0).digest(),
        sample(1, rows=400).digest(),
    ]
    spool.close()


def test_generation_pauses_at_the_free_space_floor_and_goes_on_by_itself(small_disk: Path) -> None:
    spool = open_spool(small_disk / "spool", min_free_bytes=MIB)
    assert spool.wait_for_space(0)
    other = fill(small_disk, leave_bytes=MIB // 2)
    assert not spool.wait_for_space(0)
    assert "min_free_bytes is 1048576" in spool.alarm
    spool.append(sample(0))  # what had begun is still stored
    assert spool.statistics().alarm == spool.alarm
    assert spool.fill == 1.0  # the producer asks for a checkpoint
    other.unlink()
    assert spool.wait_for_space(0)
    assert spool.alarm == ""
    spool.close()


def test_segment_that_is_not_full_is_freed_when_nothing_else_makes_room(small_disk: Path) -> None:
    spool = open_spool(small_disk / "spool", min_free_bytes=MIB, keep_checkpoints=1)
    count = 0
    while spool.wait_for_space(0):
        spool.append(sample(count, rows=400))
        count += 1
    spool.commit(1, ids(*range(count)), term=1)
    assert spool.wait_for_space(0)
    assert segment_files(small_disk / "spool") == []
    spool.append(sample(count))
    spool.close()
    spool = open_spool(small_disk / "spool")
    assert ordinals(spool) == [count]
    assert all(spool.finished(sample(k).id) for k in range(count + 1))
    spool.close()


def test_quota_raises_an_alarm_until_a_commit(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, quota_bytes=20_000, segment_bytes=1, keep_checkpoints=1)
    for k in range(3):
        spool.append(sample(k))
    assert "quota_bytes is 20000" in spool.alarm
    spool.commit(1, ids(0, 1, 2), term=1)
    assert spool.alarm == ""
    spool.close()


def test_segments_leave_files_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an open file: with small ones the process would run out of them before the quota."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8, limits[1]))
    spool = open_spool(tmp_path, segment_bytes=1, keep_checkpoints=1)
    for k in range(4):
        assert spool.wait_for_space(0)
        spool.append(sample(k))
    assert not spool.wait_for_space(0)
    assert spool.alarm == "4 segments are open, of 8 files; raise segment_bytes"
    spool.commit(1, ids(0, 1, 2), term=1)
    assert spool.wait_for_space(0)
    assert spool.alarm == ""
    spool.close()


def test_blocks_are_taken_ahead_and_given_back(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    spool.append(sample(0))
    (segment,) = segment_files(tmp_path)
    status = segment.stat()
    if status.st_blocks * 512 < sample_files.AHEAD_BYTES:
        pytest.skip("this file system takes no blocks ahead")
    assert status.st_size == spool.statistics().bytes  # the end of the file is that of the data
    spool.close()
    assert segment.stat().st_blocks * 512 < MIB


@pytest.mark.parametrize("policy", ["always", "interval", "never"])
def test_killed_in_mid_sample_loses_nothing_that_was_stored(tmp_path: Path, policy: str) -> None:
    """The process is killed from outside while it stores as fast as it can. It says of each
    sample that it is stored, as a producer does when it offers it."""
    program = [sys.executable, Path(__file__).with_name("spool_child.py"), "store_for_ever"]
    child = subprocess.Popen(
        [*program, tmp_path / "spool", policy, tmp_path / "told"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    told = tmp_path / "told"
    eventually(lambda: told.exists() and told.stat().st_size > 40, "samples are stored")
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    stored = told.stat().st_size
    spool = open_spool(tmp_path / "spool")
    found = ordinals(spool)
    assert found[:stored] == list(range(stored))
    assert len(found) <= stored + 1  # one may have been whole and not told
    for k in found[-3:]:
        assert read_back(spool, k) == sample(k).digest()
    assert not spool.finished(sample(len(found)).id)
    spool.close()


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files and directories that are forced to disk from now on, in order."""
    names: list[str] = []
    for call in ("fsync", "fdatasync"):

        def noted(fd: int, really: object = getattr(os, call)) -> None:
            names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            really(fd)  # type: ignore[operator]

        monkeypatch.setattr(os, call, noted)
    return names


def test_policy_always_has_every_sample_on_the_disk_before_it_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path, fsync="always")
    names = synced(monkeypatch)
    for k in range(3):
        spool.append(sample(k))
        assert names[-1] == "00000001.seg"
        assert names.count("00000001.seg") == k + 1
    spool.close()


def test_policy_interval_forces_samples_to_disk_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path, fsync="interval")
    names = synced(monkeypatch)
    for k in range(3):
        spool.append(sample(k))
    spool.sync_when_due()
    assert "00000001.seg" not in names
    monkeypatch.setattr(sample_files, "FSYNC_INTERVAL_SECONDS", 0.0)
    spool.sync_when_due()
    spool.sync_when_due()  # nothing new: nothing to force
    assert names.count("00000001.seg") == 1
    spool.close()


def test_policy_never_leaves_samples_to_the_kernel_but_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path, fsync="never")
    names = synced(monkeypatch)
    spool.append(sample(0))
    spool.sync_when_due()
    spool.commit(1, ids(0), term=1)
    spool.close()
    assert "00000001.seg" not in names
    assert "control.log" in names


def test_segment_that_is_full_is_on_the_disk_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path, fsync="interval", segment_bytes=1)
    names = synced(monkeypatch)
    spool.append(sample(0))
    assert names[-1] == "00000001.seg"
    spool.close()


def test_directories_are_forced_to_disk_after_create_rename_and_unlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = synced(monkeypatch)
    spool = open_spool(tmp_path / "a" / "b", segment_bytes=1, keep_checkpoints=1)
    made = [tmp_path.name, "a", "spool.part", "b"]  # a, a/b, spool.json
    assert names[:4] == made
    before = names.count("b")
    spool.append(sample(0))
    assert names.count("b") == before + 1
    spool.commit(1, ids(0), term=1)
    assert names[-3:] == ["control.log", "b", "00000001.spare"]
    spool.append(sample(1))
    assert names[-2:] == ["b", "00000002.seg"]
    spool.close()


def test_full_disk_when_the_spool_is_made_is_one_clear_line(small_disk: Path) -> None:
    fill(small_disk, leave_bytes=0)
    done = spool_child("open_and_say", small_disk / "spool")
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout
    assert str(small_disk / "spool") in done.stdout
