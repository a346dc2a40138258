"""A replay whose archive changes while it runs."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from archive_helpers import archive_samples, lines, opened, segments
from bare_member import BareMember
from draftfeed_producer import distribution, server
from draftfeed_producer.archive import ArchiveConfig
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import ReplayConfig
from draftfeed_producer.errors import ArchiveGone
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.service import ProducerService
from draftfeed_producer.spool import SpoolConfig
from draftfeed_producer.spool.reader import Reader
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet
from waiting import eventually

COUNT = 8


class Replay:
    """A service in a thread of its own."""

    def __init__(self, directory: Path, address: str, **options: Any) -> None:
        self.directory, self.address = directory, f"ipc://{directory}/{address}.sock"
        self.service = ProducerService(
            ProducerConfig(
                engine=ReplayConfig(),
                spool=SpoolConfig(dir=directory / "replayed", min_free_bytes=0),
                archive=ArchiveConfig(roots=(directory / "a",), **options),
                server=ServerConfig(bind=self.address),
            )
        )
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failure = error

    def ended(self) -> BaseException | None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        return self.failure


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with opened(tmp_path / "a") as archive:
        archive_samples(tmp_path / "spool", archive, range(COUNT))
    return tmp_path


@pytest.fixture
def first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """It has one sample off the shelf, and takes the next when that is gone."""
    monkeypatch.setattr(server, "RESTOCK_SAMPLES", 1)
    replay = Replay(directory, "first")
    eventually(lambda: replay.service.statistics().replayed == 1, "a sample off the shelf")
    return replay


def test_drive_that_goes_ends_the_replay_and_none_of_its_samples(
    directory: Path, first: Replay
) -> None:
    """They ended as quarantined, for good, and the drive was mounted again a minute later."""
    (directory / "a").rename(directory / "away")
    member = BareMember(first.address)
    member.open()
    ended_without_loss(first, "No such file or directory")
    member.close()
    (directory / "away").rename(directory / "a")
    trains_all(Replay(directory, "second"), term=2)


def test_error_of_a_drive_that_is_there_ends_the_replay_and_none_of_its_samples(
    directory: Path, first: Replay
) -> None:
    """A file server that was away for a minute cost every sample, in all epochs to come."""
    indexes = [path.with_suffix(".idx") for path in segments(directory / "a")]
    with replaced(indexes, lambda path: path.symlink_to(path)):
        member = BareMember(first.address)
        member.open()
        ended_without_loss(first, "Too many levels of symbolic links")
        member.close()
    trains_all(Replay(directory, "second"), term=2)


def test_error_while_a_sample_is_sent_is_no_damage(directory: Path, first: Replay) -> None:
    with replaced(segments(directory / "a"), Path.mkdir):
        member = BareMember(first.address)
        member.open()
        second = member.receive(2)[1]
        member.say(m.Nack, id=second, reason="its bytes are none of a sample")
        ended_without_loss(first, "Is a directory")
        member.close()
    trains_all(Replay(directory, "second"), term=2)


@contextmanager
def replaced(paths: list[Path], make: Callable[[Path], None]) -> Iterator[None]:
    """As long as it lasts, something that can be found there and not be read."""
    for path in paths:
        path.rename(path.with_suffix(".away"))
        make(path)
    yield
    for path in paths:
        path.rmdir() if path.is_dir() else path.unlink()
        path.with_suffix(".away").rename(path)


def ended_without_loss(replay: Replay, because: str) -> None:
    """For want of a file that may still be whole."""
    failure = replay.ended()
    assert isinstance(failure, ArchiveGone)
    assert str(failure).endswith(f": {because}; see to its drive, and start again")
    assert not Reader(replay.directory / "replayed").control.tombstones


def test_age_of_what_waits_is_told_of_a_replay_too(directory: Path) -> None:
    replay = Replay(directory, "only")

    def oldest_seconds() -> float:
        figures = replay.service.statistics().server
        return figures.figures.oldest_seconds if figures else 0.0

    eventually(lambda: oldest_seconds() > 0, "an age")
    trains_all(replay, term=1)


def trains_all(replay: Replay, term: int) -> None:
    member = BareMember(replay.address, term=term)
    member.open()
    received = member.receive(COUNT)
    assert IdSet(received) == lines(range(COUNT), epoch=1)
    member.commit(received)
    member.until(m.AllTerminal)
    member.say(m.Bye)
    assert replay.ended() is None
    member.close()


def test_a_replay_asks_for_checkpoints_though_its_spool_stays_empty(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that saves when it is asked to saved nothing until the last epoch was over."""
    monkeypatch.setattr(distribution, "MAX_UNCOMMITTED_SAMPLES", COUNT)
    replay = Replay(directory, "only")
    member = BareMember(replay.address)
    member.open()
    member.say(m.AtWork, ids=member.receive(COUNT))
    member.say(m.AtWork, ids=[])
    member.until(m.CheckpointWanted)
    member.commit(member.received)
    member.until(m.AllTerminal)
    member.say(m.Bye)
    assert replay.ended() is None
    member.close()


def test_a_replay_needs_no_right_to_write_to_its_roots(directory: Path) -> None:
    root = str(directory / "a")
    done = subprocess.run(["mount", "--bind", "-o", "ro", root, root], capture_output=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted: {done.stderr.decode().strip()}")
    try:
        with pytest.raises(OSError, match="Read-only"):
            (directory / "a" / "file").touch()
        trains_all(Replay(directory, "only"), term=1)
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)
