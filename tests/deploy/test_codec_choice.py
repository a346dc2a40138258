"""A service whose environment asks for a codec that cannot run says so before it begins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftfeed_proto.codecs.packed import VARIABLE, available

PRODUCER = """
[engine]
name = "synthetic"
samples = 2
[spool]
dir = {directory}
[server]
bind = "tcp://127.0.0.1:*"
"""
CONSUMER = """
[producer]
addresses = ["tcp://127.0.0.1:9"]
[trainer]
function = "json:dumps"
output_dir = {directory}
"""


def run(service: str, directory: Path, text: str, isa: str) -> "subprocess.CompletedProcess[str]":
    config = directory / f"{service}.toml"
    config.write_text(text.format(directory=json.dumps(str(directory / "out"))))
    command = [sys.executable, "-m", "draftfeed_deploy.cli", service, "-c", str(config)]
    return subprocess.run(
        command, env={**os.environ, VARIABLE: isa}, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(("service", "text"), [("producer", PRODUCER), ("consumer", CONSUMER)])
def test_a_codec_that_cannot_run_ends_a_service_at_its_start(
    service: str, text: str, tmp_path: Path
) -> None:
    """At the first sample it would have come after minutes of loading; in a consumer every sample
    would have passed for damaged, and been asked for again for ever."""
    done = run(service, tmp_path, text, "sse9")
    errors = [line for line in done.stderr.splitlines() if line.startswith("draftfeed: ")]
    assert done.returncode == 2, done.stderr
    assert len(errors) == 1
    assert errors[0].startswith(f"draftfeed: {VARIABLE} is 'sse9', which is unknown; it may be ")
    assert "Traceback" not in done.stderr
    if service == "producer":
        assert not (tmp_path / "out").exists(), "no spool was made"


def test_one_that_is_known_and_not_there_is_told_as_well(tmp_path: Path) -> None:
    missing = {"avx512", "avx2", "c"} - set(available().implementations)
    if not missing:
        pytest.skip("this machine runs all of them")
    done = run("producer", tmp_path, PRODUCER, min(missing))
    assert done.returncode == 2
    assert "which this machine cannot run; it may be " in done.stderr
