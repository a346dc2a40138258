"""The file that says who trains into a directory."""

import os
import socket
from pathlib import Path

import pytest

from draftfeed_consumer.errors import Fenced
from draftfeed_deploy.drain import PID_FILE, claimed, drain
from draftfeed_deploy.errors import DirectoryInUse, NothingToDrain

WHO = f"{os.getpid()} on {socket.gethostname()}"


def lines(directory: Path) -> list[str]:
    return (directory / PID_FILE).read_text().splitlines()


def test_directory_that_is_trained_into_is_refused_with_the_name_of_the_other(
    tmp_path: Path,
) -> None:
    with claimed(tmp_path, takeover=False):
        with pytest.raises(DirectoryInUse, match=WHO), claimed(tmp_path, takeover=False):
            pass
        assert lines(tmp_path) == [str(os.getpid()), socket.gethostname()]


def test_directory_is_free_again_after_the_end_however_it_ended(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), claimed(tmp_path, takeover=False):
        raise KeyboardInterrupt
    assert lines(tmp_path)[2] == "130 interrupted"
    with pytest.raises(Fenced), claimed(tmp_path, takeover=False):
        raise Fenced("tcp://h:1", "term 2 was granted", 2)
    assert lines(tmp_path)[2].startswith("3 another consumer took over")
    with claimed(tmp_path, takeover=False) as claim:
        claim.code, claim.words = 0, "done: 3 samples"
    assert lines(tmp_path)[2] == "0 done: 3 samples"


def test_takeover_does_not_wait_for_the_one_whose_place_it_takes(tmp_path: Path) -> None:
    with claimed(tmp_path, takeover=False) as old, claimed(tmp_path, takeover=True) as new:
        new.code, new.words = 0, "done"
        old.words = "fenced"
        with pytest.raises(DirectoryInUse), claimed(tmp_path, takeover=False):
            pass
    assert lines(tmp_path)[2] == "0 done"
    assert [path.name for path in tmp_path.iterdir()] == [PID_FILE]


def test_error_message_of_several_lines_is_one_line_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bug"), claimed(tmp_path, takeover=False):
        raise ValueError("a\nbug")
    assert lines(tmp_path)[2:] == ["1 a bug"]


def test_nothing_to_drain_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NothingToDrain, match="no consumer has trained into"):
        drain(tmp_path, 1)
    with claimed(tmp_path, takeover=False):
        pass
    with pytest.raises(NothingToDrain, match="no consumer is running"):
        drain(tmp_path, 1)


def test_consumer_of_another_machine_is_not_looked_for_on_this_one(tmp_path: Path) -> None:
    """The directory may be shared: its number means another process here."""
    with claimed(tmp_path, takeover=False):
        (tmp_path / PID_FILE).write_text(f"{os.getpid()}\nfar-away\n")
        with pytest.raises(NothingToDrain, match=f"{os.getpid()} on far-away is not on this"):
            drain(tmp_path, 1)
