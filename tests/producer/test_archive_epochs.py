"""One line of the prompt file in several epochs: what they share, and what damage to it means."""

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from archive_helpers import archive_samples, archiving, commit, lines, opened, read, segments
from draftfeed_producer.archive import archiver
from draftfeed_producer.archive.sealed import Interrupted
from draftfeed_producer.archive.store import BeingSealed
from draftfeed_producer.spool.segments import frame_fault
from samples import sample


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def test_damage_found_in_one_epoch_is_refused_and_made_again_in_the_next(
    tmp_path: Path, root: Path
) -> None:
    """Both were in stock: the second had no bytes any more, and its consumer attached again, for
    ever."""
    with opened(root) as archive:
        archive_samples(tmp_path / "first", archive, [1])
        with archiving(tmp_path / "spool", archive) as spool:
            one, two = (sample(1).id.in_epoch(epoch) for epoch in (1, 2))
            for id in (one, two):
                assert spool.shelve(id) is not None
            (path,) = segments(root)
            flip(path, path.stat().st_size // 2)
            assert not spool.whole(one)
            spool.void(one, "damaged")
            assert frame_fault(spool.read_chunk(two, 0))
            assert not spool.whole(two)
            spool.void(two, "damaged")
            assert not spool.finished(one)
            assert not spool.finished(two)
            assert set(spool.regenerated) == {one, two}


def test_record_that_epochs_share_is_forgotten_under_all_their_ids(
    tmp_path: Path, root: Path
) -> None:
    """Each epoch was given the damaged one once more, and so was every start."""
    with opened(root) as archive, archiving(tmp_path / "spool", archive) as spool:
        record = spool.append(sample(1))
        own = record.header.id
        spool.commit(1, lines([1]), term=1)
        second, third = own.in_epoch(1), own.in_epoch(2)
        assert spool.shelve(second) is not None
        flip(tmp_path / "spool" / "00000001.seg", record.chunks[1][0] + 60)
        assert not spool.whole(second)
        spool.void(second, "damaged")
        assert spool.shelve(third) is None
        assert second in spool.regenerated
    with opened(root) as archive, archiving(tmp_path / "spool", archive) as spool:
        assert spool.shelve(third) is None
        assert 1 not in {id.ordinal for id in spool.lines()}


def test_what_was_made_again_serves_the_epochs_after_it(tmp_path: Path, root: Path) -> None:
    with opened(root) as archive, archiving(tmp_path / "spool", archive) as spool:
        own = spool.append(sample(1)).header.id
        spool.commit(1, lines([1]), term=1)
        spool.shelve(own.in_epoch(1))
        spool.void(own.in_epoch(1), "damaged")
        spool.append(replace(sample(1, rows=7), id=own.in_epoch(1)))
        header = spool.shelve(own.in_epoch(2))
        assert header is not None
        assert header.rows == 7
        assert read(spool, own.in_epoch(2)) == sample(1, rows=7).digest()


def test_what_was_made_again_is_not_served_under_the_header_of_what_it_replaces(
    tmp_path: Path, root: Path
) -> None:
    """It has other rows, for its seed is another epoch's: the producer ended at a chunk that was
    not there, or the sample was refused five times and quarantined."""
    with opened(root) as archive, archiving(tmp_path / "spool", archive) as spool:
        record = spool.append(sample(1))
        spool.commit(1, lines([1]), term=1)
        second, third = (record.header.id.in_epoch(epoch) for epoch in (1, 2))
        for id in (second, third):
            spool.shelve(id)
        spool.void(second, "damaged")
        spool.append(replace(sample(1, rows=1), id=second))
        for index in range(record.header.chunks):
            assert frame_fault(spool.read_chunk(third, index))
        assert spool.places(third, 0, 1) is None
        assert not spool.whole(third)
        spool.void(third, "damaged")
        header = spool.shelve(third)
        assert header is not None
        assert header.rows == 1
        assert read(spool, third) == sample(1, rows=1).digest()


def test_what_killed_a_trainer_in_a_later_epoch_is_not_archived_either(
    tmp_path: Path, root: Path
) -> None:
    """A replay of that archive would serve what has killed the trainer three times."""
    with opened(root) as archive, archiving(tmp_path / "spool", archive) as spool:
        own = spool.append(sample(1)).header.id
        spool.append(sample(2))
        spool.commit(1, lines([1, 2]), term=1)
        spool.shelve(own.in_epoch(1))
        spool.tombstone(own.in_epoch(1), "quarantined", "the trainer died three times")
        commit(spool, lines([1, 2]))
        spool.archive_rest()
        assert {id.ordinal for id in archive.lines} == {2}


def test_looking_for_a_header_takes_nothing(tmp_path: Path, root: Path) -> None:
    """A commit that is refused was looked at so: what it named counted as finished after that."""
    with opened(root) as archive, archiving(tmp_path / "spool", archive) as spool:
        later = spool.append(sample(1)).header.id.in_epoch(1)
        assert spool.header_of(later) is not None
        assert not spool.finished(later)
        assert read(spool, later) == sample(1).digest()  # a rollback delivers it like this


def test_opening_a_large_archive_can_be_interrupted(tmp_path: Path, root: Path) -> None:
    with opened(root) as archive:
        archive_samples(tmp_path / "first", archive, [1, 2])
    with pytest.raises(Interrupted), opened(root, stopped=lambda: True):
        pass


def test_void_of_a_shared_record_names_the_id_that_it_was_stored_under(
    tmp_path: Path, root: Path
) -> None:
    """After a rollback an earlier epoch shares a later one's: the next start served it again."""
    with (
        opened(root) as archive,
        archiving(tmp_path / "spool", archive, segment_bytes=1 << 20) as spool,
    ):
        made_again = sample(1).id.in_epoch(1)
        spool.append(replace(sample(1), id=made_again))
        first = sample(1).id
        assert spool.shelve(first) is not None
        spool.void(first, "damaged")
        assert not spool.finished(made_again)
    with (
        opened(root) as archive,
        archiving(tmp_path / "spool", archive, segment_bytes=1 << 20) as spool,
    ):
        assert not spool.finished(made_again)


def test_void_that_the_log_does_not_take_can_be_tried_again(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root) as archive, archiving(tmp_path / "spool", archive) as spool:
        own = spool.append(sample(1)).header.id
        spool.commit(1, lines([1]), term=1)
        second = own.in_epoch(1)
        spool.shelve(second)
        with monkeypatch.context() as full:
            full.setattr(spool, "_void", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
            with pytest.raises(OSError, match="full"):
                spool.void(second, "damaged")
        assert spool.finished(second)
        spool.void(second, "damaged")
        assert not spool.finished(second)
        assert spool.shelve(own.in_epoch(2)) is None


def test_run_that_is_over_is_not_archived_again_at_its_next_start(
    tmp_path: Path, root: Path
) -> None:
    """With a quota it said that the archive takes no more, and with two roots it made a copy."""
    with opened(root) as archive:
        for _ in range(2):
            with archiving(tmp_path / "spool", archive) as spool:
                if not spool.committed:
                    spool.append(sample(1))
                    spool.commit(1, lines([1]), term=1)
                spool.archive_rest()
        quota = archive.statistics().bytes
        assert len(segments(root)) == 1
    with (
        opened(root, quota_bytes=quota) as archive,
        archiving(tmp_path / "spool", archive) as spool,
    ):
        spool.archive_rest()
        assert (spool.archive_statistics().alarm, spool.archive_statistics().missed) == ("", 0)


def test_what_a_root_that_hangs_is_sealing_is_made_again_and_told(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last samples of an epoch waited for it for ever, and so did the end of the run."""
    gate, sealing = threading.Event(), threading.Event()

    def hangs(*_: object, **__: object) -> None:
        sealing.set()
        gate.wait()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(archiver, "seal", hangs)
    with opened(root) as archive, archiving(tmp_path / "spool", archive) as spool:
        own = spool.append(sample(1)).header.id
        spool.append(sample(2))
        commit(spool, lines([1, 2]))
        assert sealing.wait(10)
        with pytest.raises(BeingSealed):
            spool.shelve(own.in_epoch(1))
        monkeypatch.setattr(archiver, "STUCK_SECONDS", 0.0)
        assert "does not answer" in spool.archive_statistics().alarm
        assert spool.shelve(own.in_epoch(1)) is None
        assert spool.archive_rest() == 2  # returns
        gate.set()
