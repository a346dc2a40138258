"""The control log: what a spool remembers beside its samples, and what a crash leaves of it."""

import errno
import os
from itertools import pairwise
from pathlib import Path

import pytest

from draftfeed_producer.errors import SpoolDamaged
from draftfeed_producer.spool.control import Commit, Owned, Suspects, Term, Tombstone, Void
from draftfeed_producer.spool.control_log import RESERVE_BYTES, ControlLog, read_control
from draftfeed_proto.ids import IdSet, SampleId, Shards
from samples import DATASET, sample
from spool_helpers import flip, ids, open_spool, ordinals, read_back, segment_files, spool_child

SMALL = 2048


def content(log: Path) -> bytes:
    return log.read_bytes().rstrip(b"\0")


def test_spool_remembers_its_term_commit_and_suspects(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    spool.append(sample(0))
    spool.grant(Term(4, "run-a", "abc", 8))
    spool.commit(12, ids(0), term=3)
    spool.suspect({sample(1).id: 2, sample(2).id: 1})
    spool.suspect({sample(1).id: 3})  # the whole of it: sample 2 was not at work this time
    spool.close()
    spool = open_spool(tmp_path)
    assert spool.term == Term(4, "run-a", "abc", 8)
    assert (spool.commit_term, spool.commit_number, spool.committed) == (3, 12, ids(0))
    assert spool.suspects == {sample(1).id: 3}
    spool.close()


def test_rollback_makes_samples_unfinished_and_frees_nothing_on_the_word_of_older_commits(
    tmp_path: Path,
) -> None:
    """R7, R9: two checkpoints had sample 1, but the trainer went back behind both."""
    spool = open_spool(tmp_path, segment_bytes=1, keep_checkpoints=2)
    for k in range(3):
        spool.append(sample(k))
    spool.commit(1, ids(0), term=1)
    spool.commit(2, ids(0, 1), term=1)  # frees sample 0
    assert ordinals(spool) == [2]
    spool.commit(1, ids(), term=2, rollback=True)
    assert ordinals(spool) == [1, 2]
    assert not spool.finished(sample(0).id)
    assert spool.regenerated == ids(0)  # the only one that is gone
    assert read_back(spool, 1) == sample(1).digest()
    spool.close()
    spool = open_spool(tmp_path, segment_bytes=1, keep_checkpoints=2)
    assert (spool.commit_number, spool.commit_term, spool.committed) == (1, 2, ids())
    assert (ordinals(spool), spool.regenerated) == ([1, 2], ids(0))
    spool.commit(2, ids(1), term=2)
    assert len(segment_files(tmp_path)) == 2  # the rollback's own set is the oldest kept one
    spool.commit(3, ids(1, 2), term=2)
    assert len(segment_files(tmp_path)) == 1
    spool.close()


def test_commit_that_is_stored_twice_frees_nothing_early(tmp_path: Path) -> None:
    """R7: a server that is not sure that a commit was written writes it again."""
    spool = open_spool(tmp_path, segment_bytes=1, keep_checkpoints=2)
    spool.append(sample(0))
    for _ in range(2):
        spool.commit(1, ids(0), term=1)
    assert len(segment_files(tmp_path)) == 1
    spool.close()


def test_void_record_is_not_indexed_again_and_its_successor_is(tmp_path: Path) -> None:
    """R22: a sample found damaged at rest is generated again under its id."""
    spool = open_spool(tmp_path, segment_bytes=1)
    records = [spool.append(sample(k)) for k in range(3)]
    flip(segment_files(tmp_path)[0], records[0].chunks[1][0] + 50)
    assert not spool.whole(sample(0).id)
    assert spool.whole(sample(1).id)
    spool.void(sample(0).id, "checksum")
    assert not spool.finished(sample(0).id)
    assert not spool.whole(sample(0).id)
    assert len(segment_files(tmp_path)) == 2  # nothing else lay in the first
    spool.close()
    spool = open_spool(tmp_path, segment_bytes=1)
    assert (ordinals(spool), spool.regenerated) == ([1, 2], ids(0))
    spool.append(sample(0))
    spool.close()
    spool = open_spool(tmp_path, segment_bytes=1)
    assert ordinals(spool) == [1, 2, 0]
    assert read_back(spool, 0) == sample(0).digest()
    spool.close()


def test_void_record_beside_its_successor_in_one_segment(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    record = spool.append(sample(0))
    spool.append(sample(1))
    flip(segment_files(tmp_path)[0], record.chunks[1][0] + 50)
    spool.void(sample(0).id, "checksum")
    spool.append(sample(0))
    spool.close()
    for _ in range(2):
        spool = open_spool(tmp_path)
        assert sorted(ordinals(spool)) == [0, 1]
        assert read_back(spool, 0) == sample(0).digest()
        spool.close()


def test_void_place_hides_nothing_in_a_later_segment(tmp_path: Path) -> None:
    """A segment's number is not used again, though every file was deleted before a restart."""
    spool = open_spool(tmp_path)
    spool.append(sample(0))
    spool.void(sample(0).id, "checksum")
    spool.close()
    segment_files(tmp_path)[0].unlink()
    spool = open_spool(tmp_path)
    spool.append(sample(0))
    spool.close()
    spool = open_spool(tmp_path)
    assert ordinals(spool) == [0]
    spool.close()


def test_damage_that_is_found_at_start_is_reported_as_regenerated_for_good(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    records = [spool.append(sample(k)) for k in range(3)]
    spool.close()
    flip(segment_files(tmp_path)[0], records[1].chunks[1][0] + 50)
    for _ in range(2):
        spool = open_spool(tmp_path)
        assert (ordinals(spool), spool.regenerated) == ([0, 2], ids(1))
        spool.close()


def test_log_that_is_mostly_history_is_rewritten_and_means_the_same(tmp_path: Path) -> None:
    log = ControlLog(tmp_path / "control.log", 2, compact_bytes=SMALL)
    (tmp_path / "00000007.seg").touch()
    everything = Shards(DATASET, 0, (0, 9))
    log.append(Owned(everything, Shards(DATASET, 0, (4, 5))))
    log.append(Tombstone(sample(1).id, "rejected", "x"))
    log.append(Void(sample(2).id, 7, 100, "its segment is there"))
    log.append(Void(sample(3).id, 6, 100, "its segment is gone"))
    log.append(Suspects([(sample(5).id, 2)]))
    sizes = []
    for number in range(60):
        log.append(Term(number, "run", "i", 2))
        log.append(Commit(number, ids(*range(number)).to_wire(), 1))
        sizes.append(log.size_bytes)
    log.append(Commit(500, ids(1).to_wire(), 2, rollback=True, regenerated=ids(9).to_wire()))
    assert sum(after < before for before, after in pairwise(sizes)) > 2
    assert max(sizes) < 2 * SMALL
    log.close()
    log = ControlLog(tmp_path / "control.log", 2)
    state = log.state
    assert state.term == Term(59, "run", "i", 2)
    assert [(c.number, c.rollback) for c in state.commits] == [(500, True)]
    assert list(state.tombstones) == [sample(1).id]
    assert list(state.voids) == [(7, 100)]
    assert state.suspects == {sample(5).id: 2}
    assert state.owned == Owned(everything, Shards(DATASET, 0, (4, 5)))
    assert state.regenerated == ids(2, 3, 9)
    log.close()


def test_log_of_live_records_only_is_not_rewritten_at_every_append(tmp_path: Path) -> None:
    log = ControlLog(tmp_path / "control.log", 2, compact_bytes=SMALL)
    inodes = set()
    for k in range(300):
        log.append(Tombstone(SampleId(DATASET, 0, 0, k), "rejected", "x" * 100))
        inodes.add((tmp_path / "control.log").stat().st_ino)
    assert len(inodes) == 1
    assert log.size_bytes > 8 * SMALL
    log.close()


def test_killed_at_any_step_of_a_rewrite_leaves_one_good_log(tmp_path: Path) -> None:
    done = spool_child("crash_at_every_step", tmp_path)
    assert done.returncode == 0, done.stderr
    steps, size_bytes = map(int, done.stdout.split())
    assert steps > 40
    assert size_bytes < 600  # of twelve records that have more: it was rewritten


def test_full_disk_skips_the_rewrite_and_loses_nothing(tmp_path: Path) -> None:
    done = spool_child("compact_on_a_full_disk", tmp_path)
    assert done.returncode == 0, done.stderr
    log = ControlLog(tmp_path / "control.log", 2)
    assert log.state.commits[-1].number == 99
    assert not list(tmp_path.glob("*.part"))
    log.close()


def test_restart_on_a_full_disk_keeps_the_room_of_the_log(tmp_path: Path) -> None:
    """What was taken ahead is not given back: on a full disk we would not get it again."""
    ControlLog(tmp_path / "control.log", 2).close()
    blocks = (tmp_path / "control.log").stat().st_blocks
    done = spool_child("reopen_on_a_full_disk", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "control.log").stat().st_blocks >= blocks
    assert (tmp_path / "control.log").stat().st_size >= RESERVE_BYTES
    assert read_control(tmp_path / "control.log").commits[-1].number == 1


def test_commits_that_free_a_full_disk_have_room_however_large_they_are(tmp_path: Path) -> None:
    """In an epoch in random order a commit is half a byte for each line, and the second frees."""
    done = spool_child("large_commits_on_a_full_disk", tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_control(tmp_path / "control.log").commits[-1].number == 3


def test_torn_record_is_wiped_so_that_it_never_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "control.log"
    log = ControlLog(path, 2)
    log.append(Term(1, "run", "i"))
    whole = log.size_bytes
    log.append(Tombstone(sample(1).id, "rejected", "x" * 200))
    log.close()
    flip(path, whole + 60)
    log = ControlLog(path, 2)
    assert (log.state.tombstones, log.state.term) == ({}, Term(1, "run", "i"))
    assert len(content(path)) <= whole
    log.append(Term(2, "run", "i"))  # shorter than what was there
    log.close()
    assert read_control(path).term == Term(2, "run", "i")


def test_log_that_is_lost_is_refused_while_there_are_samples(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    spool.append(sample(0))
    spool.close()
    (tmp_path / "control.log").unlink()
    with pytest.raises(SpoolDamaged, match="lost or empty, and there are samples"):
        open_spool(tmp_path)


def test_record_that_the_disk_refuses_changes_nothing(tmp_path: Path) -> None:
    done = spool_child("tombstones_until_refused", tmp_path)
    assert done.returncode == 0, done.stderr
    stored, code = map(int, done.stdout.split())
    assert code == errno.EFBIG
    spool = open_spool(tmp_path)
    assert len(spool.tombstones) == stored
    spool.close()


def test_reading_while_a_producer_writes_and_rewrites_the_log(tmp_path: Path) -> None:
    """A tool never takes a record that is half written, or a log that is replaced, for damage."""
    path = tmp_path / "control.log"
    ControlLog(path, 2).close()
    writer = os.fork()
    if writer == 0:
        log = ControlLog(path, 2, compact_bytes=SMALL)
        for number in range(1, 500):
            log.append(Commit(number, IdSet([sample(0).id]).to_wire(), 1))
        os._exit(0)
    seen, ended = 0, False
    while not ended:
        ended = os.waitpid(writer, os.WNOHANG) != (0, 0)
        commits = read_control(path).commits
        number = commits[-1].number if commits else 0
        assert number >= seen
        seen = number
    assert seen == 499
