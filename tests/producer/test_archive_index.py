"""An archive of a million samples: how much memory its index takes, and how long it opens."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

COUNT, EACH = 1_000_000, 500


def child(*arguments: object) -> "subprocess.CompletedProcess[str]":
    program = Path(__file__).with_name("archive_million.py")
    return subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.timeout(900)
def test_million_samples_open_in_bounded_time_and_under_100_mb(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    made = child("make", tmp_path / "root", COUNT, EACH)
    assert made.returncode == 0, made.stderr
    looked = child("look", tmp_path / "root", COUNT)
    assert looked.returncode == 0, looked.stderr
    found = json.loads(looked.stdout)
    record_property("seconds to open", round(found["seconds"], 1))
    record_property("CPU seconds to open", round(found["cpu_seconds"], 1))
    record_property("MB when open", round(found["opened_bytes"] / 1e6, 1))
    record_property("MB after 400 samples", round(found["served_bytes"] / 1e6, 1))
    record_property("MB at most", round(found["most_bytes"] / 1e6, 1))
    assert found["samples"] == COUNT
    assert found["most_bytes"] < 100e6
    assert found["cpu_seconds"] < 60
    assert found["seconds"] < 11 or "segments are indexed" in looked.stderr
