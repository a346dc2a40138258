"""The demo with SGLang on the CPU as its engine: to its end, and interrupted while that starts."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftfeed_deploy import smollm2
from waiting import eventually

pytestmark = pytest.mark.timeout(1200)
COMMAND = [str(Path(sys.executable).with_name("draftfeed")), "demo", "--engine", "sglang"]
SMALL = ["--prompts", "6", "--max-new-tokens", "6", "--dir", "run"]
LEARNED = "held-out loss 25% below untrained, and below uniform guessing"
STARTING = re.compile(r"starting SGLang, process (\d+)")


@pytest.fixture(autouse=True, scope="module")
def target() -> None:
    """Made before the clock of a test runs; seconds once it is cached."""
    smollm2.prepare()


def pid_of_engine(directory: Path) -> int | None:
    """The leader of the engine's process group, once its start is logged."""
    log = directory / "run/producer.log"
    found = STARTING.search(log.read_text()) if log.exists() else None
    return int(found[1]) if found else None


def gone(group: int) -> bool:
    """Whether nothing of a process group runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_small_run_passes_every_check_on_its_samples(
    tmp_path: Path, record_property: Callable[[str, str], None]
) -> None:
    run = subprocess.run(
        [*COMMAND, *SMALL], cwd=tmp_path, capture_output=True, text=True, timeout=1100
    )
    report = json.loads((tmp_path / "run/report.json").read_text())
    failed = {check["name"] for check in report["checks"] if not check["passed"]}
    # Six short samples teach a drafter nothing that could be promised.
    assert failed <= {LEARNED}, run.stdout
    assert report["trained"] == report["generated"] == report["prompts"] == 6
    assert report["recaptured"] == 0
    assert run.returncode == (1 if failed else 0)
    stats = [json.loads(line) for line in (tmp_path / "run/producer/stats.jsonl").open()]
    phases = [line["phase"] for line in stats if line["prompts"]]
    # The spool is open and the engine still starts: the watch for a standstill has to know.
    assert phases[0] == "loading"
    assert phases[-1] == "done"
    pid = pid_of_engine(tmp_path)
    assert pid is not None
    assert gone(pid)
    record_property("seconds", f"{report['duration_seconds']:.0f}")


def test_interrupted_while_the_engine_starts_it_leaves_nothing_running(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, *SMALL],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        eventually(lambda: pid_of_engine(tmp_path) is not None, "the engine starts", 300)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does at a terminal
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    pid = pid_of_engine(tmp_path)
    assert pid is not None
    eventually(lambda: gone(pid), "the engine is gone")
