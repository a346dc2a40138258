"""Spools that cannot be read, and readers that go: a line, never a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_proto.ids import Shards
from samples import DATASET, DESCRIPTOR, sample

DRAFTFEED = Path(sys.executable).with_name("draftfeed")
SHARDS = Shards(DATASET, 0, (0, 10))


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    made = Spool(SpoolConfig(dir=tmp_path / "spool"), DESCRIPTOR, SHARDS)
    made.append(sample(0))
    made.close()
    return tmp_path / "spool"


def draftfeed(*arguments: object) -> tuple[int, str]:
    command = [DRAFTFEED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_segment_that_the_disk_cannot_read_is_named_in_one_line(spool: Path, command: str) -> None:
    (spool / "00000002.seg").mkdir()
    code, output = draftfeed("spool", command, spool)
    assert code == 2
    assert output == f"draftfeed: {spool}/00000002.seg: cannot be read: Is a directory\n"


def test_spool_without_its_control_log_is_not_verified_as_good(spool: Path) -> None:
    (spool / "control.log").unlink()
    code, output = draftfeed("spool", "verify", spool)
    assert code == 1
    assert output == f"DAMAGED: {spool}/control.log is lost or empty\n"


def test_reader_that_has_seen_enough_is_no_error(spool: Path) -> None:
    command = [DRAFTFEED, "spool", "inspect", spool]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 0
