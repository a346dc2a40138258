"""The spool on a real disk: what is in it after restarts, torn writes and commits."""

import errno
import os
import signal
from pathlib import Path

import msgspec
import pytest
import xxhash

from draftfeed_producer.errors import SpoolBusy, SpoolError, SpoolFull, SpoolMismatch
from draftfeed_producer.spool import Spool, SpoolConfig, entries
from draftfeed_producer.spool.segments import Segment
from draftfeed_proto.ids import IdSet, Shards
from samples import DATASET, DESCRIPTOR, sample
from spool_helpers import SHARDS, flip, open_spool, ordinals, read_back, segment_files
from spool_helpers import spool_child as child


def test_samples_survive_a_restart_byte_for_byte(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for k in range(5):
        spool.append(sample(k))
    spool.close()
    spool = open_spool(tmp_path)
    assert ordinals(spool) == [0, 1, 2, 3, 4]
    assert [read_back(spool, k) for k in range(5)] == [sample(k).digest() for k in range(5)]
    spool.close()


@pytest.mark.parametrize("policy", ["always", "interval", "never"])
def test_killed_process_loses_no_stored_sample(tmp_path: Path, policy: str) -> None:
    done = child("store_and_die", tmp_path, policy)
    assert done.returncode == -signal.SIGKILL
    spool = open_spool(tmp_path)
    assert ordinals(spool) == list(range(7))
    spool.close()


@pytest.mark.parametrize("cut_bytes", [1, 9, 40, 500, 3000])
def test_half_written_sample_is_never_served(tmp_path: Path, cut_bytes: int) -> None:
    spool = open_spool(tmp_path)
    for k in range(3):
        spool.append(sample(k))
    spool.close()
    (segment,) = segment_files(tmp_path)
    os.truncate(segment, segment.stat().st_size - cut_bytes)
    spool = open_spool(tmp_path)
    assert ordinals(spool) == [0, 1]
    assert not spool.finished(sample(2).id)  # so it is generated again
    spool.append(sample(2))
    spool.append(sample(3))
    assert read_back(spool, 2) == sample(2).digest()
    spool.close()
    assert len(segment_files(tmp_path)) == 1


def test_flipped_byte_in_the_last_segment_makes_that_sample_again(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    records = [spool.append(sample(k)) for k in range(3)]
    spool.close()
    (segment,) = segment_files(tmp_path)
    flip(segment, records[1].chunks[1][0] + 77)
    spool = open_spool(tmp_path)
    assert ordinals(spool) == [0, 2]
    assert not spool.finished(sample(1).id)
    spool.close()


def test_every_cut_of_the_file_leaves_whole_samples_only(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "whole")
    ends = []
    for k in range(3):
        spool.append(sample(k, rows=4))
        ends.append(segment_files(tmp_path / "whole")[0].stat().st_size)
    spool.close()
    content = segment_files(tmp_path / "whole")[0].read_bytes()
    for size in range(0, len(content), 61):
        path = tmp_path / "cut.seg"
        path.write_bytes(content[:size])
        segment, records, _ = Segment.open(path, 1, last=True)
        assert len(records) == sum(end <= size for end in ends)
        segment.close()


def test_committed_segments_are_deleted_only_when_every_kept_checkpoint_has_them(
    tmp_path: Path,
) -> None:
    spool = open_spool(tmp_path, segment_bytes=1, keep_checkpoints=2)
    for k in range(4):
        spool.append(sample(k))
    spool.commit(1, IdSet(sample(k).id for k in range(2)), term=1)
    assert len(segment_files(tmp_path)) == 4  # a rollback to the checkpoint before may need them
    spool.commit(2, IdSet(sample(k).id for k in range(3)), term=1)
    assert len(segment_files(tmp_path)) == 2
    assert all(spool.finished(sample(k).id) for k in range(4))
    spool.close()
    spool = open_spool(tmp_path)
    assert ordinals(spool) == [3]
    assert all(spool.finished(sample(k).id) for k in range(4))
    spool.close()


def test_quota_reached_waits_and_a_commit_frees_room(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, segment_bytes=1, keep_checkpoints=1, quota_bytes=20_000)
    for k in range(3):
        spool.append(sample(k))
    assert not spool.wait_for_space(0)
    spool.commit(1, IdSet(sample(k).id for k in range(3)), term=1)
    assert spool.wait_for_space(0)
    spool.close()


def test_sample_larger_than_the_quota_does_not_stop_the_spool_for_good(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, keep_checkpoints=1, quota_bytes=5_000)
    spool.append(sample(0))
    assert not spool.wait_for_space(0)
    spool.commit(1, IdSet([sample(0).id]), term=1)
    assert spool.wait_for_space(0)
    spool.append(sample(1))
    spool.close()
    spool = open_spool(tmp_path)
    assert ordinals(spool) == [1]
    spool.close()


def test_full_disk_in_mid_sample_leaves_nothing_of_it(tmp_path: Path) -> None:
    """A file size limit stands for the disk: the kernel refuses the write in the same way."""
    done = child("fill_the_disk", tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == errno.EFBIG
    spool = open_spool(tmp_path)
    assert ordinals(spool) == [0, 1, 2]
    assert [read_back(spool, k) for k in range(3)] == [sample(k).digest() for k in range(3)]
    spool.close()


def test_two_producers_cannot_own_one_spool(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    with pytest.raises(SpoolBusy):
        open_spool(tmp_path)
    spool.close()
    open_spool(tmp_path).close()


def test_spool_of_other_layers_or_prompts_is_refused_with_both_values(tmp_path: Path) -> None:
    open_spool(tmp_path).close()
    other = msgspec.structs.replace(DESCRIPTOR, layer_ids=(2, 5, 8))
    with pytest.raises(SpoolMismatch, match=r"\(1, 4, 7\).*\(2, 5, 8\)"):
        Spool(SpoolConfig(dir=tmp_path), other, SHARDS)
    with pytest.raises(SpoolMismatch, match=f"{DATASET}.*fedcba9876543210"):
        Spool(SpoolConfig(dir=tmp_path), DESCRIPTOR, Shards("fedcba9876543210", 0, (0, 100)))
    open_spool(tmp_path).close()  # a refusal leaves no lock behind


@pytest.mark.parametrize("cut_bytes", [1, 7, 33])
def test_torn_commit_falls_back_to_the_one_before(tmp_path: Path, cut_bytes: int) -> None:
    spool = open_spool(tmp_path)
    for k in range(3):
        spool.append(sample(k))
    spool.commit(1, IdSet([sample(0).id]), term=1)
    spool.commit(2, IdSet([sample(0).id, sample(1).id]), term=1)
    spool.close()
    log = tmp_path / "control.log"
    os.truncate(log, len(log.read_bytes().rstrip(b"\0")) - cut_bytes)
    spool = open_spool(tmp_path)
    assert spool.commit_number == 1
    assert ordinals(spool) == [1, 2]
    spool.close()


def test_disk_error_names_its_directory(tmp_path: Path) -> None:
    error = SpoolFull(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert str(error) == f"{tmp_path}: No space left on device"


def test_directory_that_cannot_be_a_spool_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(SpoolError, match="cannot be used as a spool"):
        open_spool(tmp_path / "file")
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "spool.json").write_text("{ half")
    with pytest.raises(SpoolError, match="cannot be read"):
        open_spool(tmp_path / "spool")


@pytest.mark.parametrize("name", ["control.log", "00000001.seg"])
def test_spool_of_a_newer_version_is_refused_and_left_whole(tmp_path: Path, name: str) -> None:
    spool = open_spool(tmp_path)
    spool.append(sample(0))
    spool.commit(1, IdSet(), term=1)
    spool.close()
    path = tmp_path / name
    before = path.read_bytes()
    newer = entries.header(entries.Kind.CONTROL, b"x")
    fields = newer[:5] + bytes([entries.VERSION + 1]) + newer[6:24]
    path.write_bytes(before + fields + xxhash.xxh3_64(fields).digest()[::-1] + b"x")
    with pytest.raises(SpoolError, match="newer draftfeed"):
        open_spool(tmp_path)
    assert path.read_bytes().startswith(before)
    path.write_bytes(before)
    open_spool(tmp_path).close()


def test_damage_in_the_middle_of_the_control_log_is_refused_and_nothing_is_cut(
    tmp_path: Path,
) -> None:
    spool = open_spool(tmp_path)
    spool.append(sample(0))
    spool.commit(1, IdSet(), term=1)
    spool.commit(2, IdSet([sample(0).id]), term=1)
    spool.close()
    log = tmp_path / "control.log"
    flip(log, 40)
    before = log.read_bytes()
    with pytest.raises(SpoolError, match="damaged at byte 0, and whole records follow"):
        open_spool(tmp_path)
    assert log.read_bytes() == before


@pytest.mark.parametrize("last", [True, False])
def test_damaged_entry_header_costs_one_sample_and_not_those_behind_it(
    tmp_path: Path, last: bool
) -> None:
    spool = open_spool(tmp_path)
    records = [spool.append(sample(k)) for k in range(4)]
    if not last:
        spool._samples._segment_bytes = 1  # the next sample goes to a segment of its own
        spool.append(sample(4))
    spool.close()
    flip(segment_files(tmp_path)[0], records[1].chunks[1][0] - entries.HEADER_BYTES + 9)
    spool = open_spool(tmp_path)
    assert ordinals(spool) == ([0, 2, 3] if last else [0, 2, 3, 4])
    spool.append(sample(1))
    spool.close()
    spool = open_spool(tmp_path)
    assert ordinals(spool)[-1] == 1
    assert read_back(spool, 3) == sample(3).digest()
    spool.close()


def test_disk_that_is_full_when_a_segment_begins_leaves_no_files_behind(tmp_path: Path) -> None:
    done = child("fill_at_a_segment", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in segment_files(tmp_path)] == ["00000001.seg", "00000005.seg"]


def test_commit_is_recorded_when_the_disk_is_full(tmp_path: Path) -> None:
    done = child("commit_on_a_full_disk", tmp_path)
    assert done.returncode == 0, done.stderr
    spool = open_spool(tmp_path)
    assert spool.committed == IdSet([sample(0).id])
    spool.close()


def test_rejected_samples_free_their_space_without_a_commit(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, segment_bytes=1)
    for k in range(2):
        spool.append(sample(k))
    spool.tombstone(sample(0).id, "rejected", "x")
    assert [path.name for path in segment_files(tmp_path)] == ["00000002.seg"]
    spool.close()
