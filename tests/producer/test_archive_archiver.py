"""The thread that seals: what fails there costs samples of the archive, and what it counts."""

import logging
import resource
from pathlib import Path

import pytest

from archive_helpers import archiving, commit, lines, opened, segments
from draftfeed_producer.archive import ArchivedSpool, archiver
from draftfeed_producer.spool.segments import Record
from draftfeed_proto.ids import IdSet
from samples import sample
from waiting import eventually


class Faulty(ArchivedSpool):
    """Cannot judge one of its records."""

    def _serve_again(self, record: Record) -> bool:
        if record.header.id.ordinal == 1:
            raise TypeError("unsupported operand")
        return super()._serve_again(record)


def test_segment_that_its_own_drive_does_not_give_costs_itself_and_no_root_is_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every root was tried, and the alarm named the last one."""
    with opened(tmp_path / "a") as archive, archiving(tmp_path / "spool", archive) as spool:
        for ordinal in range(3):
            spool.append(sample(ordinal))
        bad = segments(tmp_path / "spool")[1]
        bad.unlink()
        bad.symlink_to(bad)  # cannot be opened
        commit(spool, lines(range(3)))
        eventually(lambda: not segments(tmp_path / "spool"), "the spool is freed")
        assert archive.lines == lines([0, 2])
        figures = spool.archive_statistics()
        assert (figures.missed, figures.alarm) == (1, "")
    assert f"{bad} cannot be read" in caplog.text
    assert "nothing more is archived" not in caplog.text


def test_process_without_descriptors_archives_when_it_has_some_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with opened(tmp_path / "a") as archive, archiving(tmp_path / "spool", archive) as spool:
        spool.append(sample(0))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            commit(spool, lines([0]))
            eventually(lambda: archiver.NO_FILES in caplog.text, "it was tried")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        eventually(lambda: archive.lines == lines([0]), "it is sealed")
        assert spool.archive_statistics().missed == 0


def test_thread_that_seals_survives_a_fault_of_its_own_and_the_spool_is_freed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended, unseen: nothing was archived any more, and the spool grew up to its quota."""
    with (
        caplog.at_level(logging.ERROR),
        opened(tmp_path / "a") as archive,
        archiving(tmp_path / "spool", archive, Faulty) as spool,
    ):
        for ordinal in range(4):
            spool.append(sample(ordinal))
        commit(spool, lines(range(3)))
        eventually(lambda: len(archive.lines) == 2, "the others are sealed")
        eventually(lambda: spool.header_of(sample(1).id) is None, "its segment is gone")
        figures = spool.archive_statistics()
        assert figures.missed == 1
        assert archive.lines == lines([0, 2])
    assert "an error of its own: TypeError('unsupported operand')" in caplog.text


def test_sample_that_epochs_share_is_missed_once(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "a", quota_bytes=1) as archive,
        archiving(tmp_path / "spool", archive) as spool,
    ):
        id = spool.append(sample(1)).header.id
        spool.commit(1, lines([1]), term=1)
        spool.shelve(id.in_epoch(1))
        commit(spool, IdSet([id, id.in_epoch(1)]))
        eventually(lambda: not segments(tmp_path / "spool"), "its segment is gone")
        assert spool.archive_statistics().missed == 1
