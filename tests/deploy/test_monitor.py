import json
import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftfeed_deploy.board import Board
from draftfeed_deploy.monitor import JsonLines, Monitor
from draftfeed_deploy.records import Snapshot
from draftfeed_deploy.status import STALE_SECONDS
from shown import identity
from snapshots import produced
from waiting import eventually


class Shown:
    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def show(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)


def test_last_state_is_recorded_even_when_the_service_fails(tmp_path: Path) -> None:
    log, view, state = JsonLines(tmp_path / "new/stats.jsonl"), Shown(), {"samples": 0}
    try:
        with Monitor(lambda: produced(1.0, samples=state["samples"]), log, [view]):
            state["samples"] = 7
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        log.close()
    lines = (tmp_path / "new/stats.jsonl").read_bytes().splitlines()
    assert json.loads(lines[-1])["samples"] == 7
    assert view.snapshots[-1].samples == 7
    assert len(view.snapshots) == len(lines)


def test_log_is_appended_to_by_a_service_that_starts_again(tmp_path: Path) -> None:
    for number in (1, 2):
        log = JsonLines(tmp_path / "stats.jsonl")
        log.write(produced(number))
        log.close()
    lines = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert [json.loads(line)["time_seconds"] for line in lines] == [1, 2]


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """The last write that goes beyond it is cut short, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_costs_lines_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the service whose progress was written down."""
    path = tmp_path / "stats.jsonl"
    log = JsonLines(path)
    log.write(produced(1))
    size = path.stat().st_size
    with files_of_at_most(size + size // 2), caplog.at_level(logging.WARNING):
        log.write(produced(2))
        log.write(produced(3))
    log.write(produced(4))
    log.close()
    written = [json.loads(line)["time_seconds"] for line in path.read_text().splitlines()]
    assert written == [1, 4]
    assert [record.getMessage() for record in caplog.records] == [
        f"lines are left out of {path}: No space left on device",
        f"{path} lacks 2 lines, and goes on",
    ]


def test_views_go_on_when_the_log_is_full_and_a_terminal_is_gone() -> None:
    """The page stood still for the rest of the run and looked alive."""

    class Gone:
        def show(self, snapshot: Snapshot) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    view = Shown()
    with Monitor(lambda: produced(1.0), JsonLines(Path("/dev/full")), [Gone(), view]):
        eventually(lambda: len(view.snapshots) >= 2, "two snapshots")


def test_figures_of_which_no_newer_ones_come_have_an_age() -> None:
    board, now = Board(), threading.Event()
    board.show(produced(1.0))
    now.wait(0.05)
    age = board.document(identity(), []).age_seconds
    assert 0.05 <= age < STALE_SECONDS
