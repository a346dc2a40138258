"""The demo as a person runs it: to its end, and interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftfeed_deploy import smollm2

pytestmark = pytest.mark.timeout(1800)
COMMAND = [str(Path(sys.executable).with_name("draftfeed")), "demo", "--max-new-tokens", "6"]

LEARNED = "held-out loss 25% below untrained, and below uniform guessing"


@pytest.fixture(autouse=True, scope="module")
def target() -> None:
    """Made before the clock of a test runs; seconds once it is cached."""
    smollm2.prepare()


@contextmanager
def started(
    directory: Path, prompts: int = 12, options: Iterable[str] = ()
) -> Iterator["subprocess.Popen[str]"]:
    """In a process group of its own, as a terminal starts it."""
    process = subprocess.Popen(
        [*COMMAND, "--dir", "run", "--prompts", str(prompts), *options],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    with started(tmp_path) as process:
        yield process


def group_members(group: int) -> list[int]:
    """Pids of living processes of a group."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


def wait_for(process: "subprocess.Popen[str]", words: str) -> None:
    """Until the process has said so; what it says before is dropped."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(f"it ended without saying {words!r}")


def ends_interrupted(process: "subprocess.Popen[str]") -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert group_members(process.pid) == []


def failed_checks(directory: Path) -> set[str]:
    report = json.loads((directory / "run/report.json").read_text())
    return {check["name"] for check in report["checks"] if not check["passed"]}


def test_small_run_of_three_epochs_generates_once_and_passes_every_check_on_its_samples(
    tmp_path: Path,
) -> None:
    """A run of one epoch is what is made again below, and the one of the swap."""
    with started(tmp_path, options=["--epochs", "3"]) as demo:
        output, _ = demo.communicate(timeout=500)
    report = json.loads((tmp_path / "run/report.json").read_text())
    failed = failed_checks(tmp_path)
    # Twelve short samples teach a drafter nothing that could be promised.
    assert failed <= {LEARNED}, output
    assert report["trained"] == report["prompts"] == 3 * report["generated"] == 36
    assert [epoch["generated"] for epoch in report["epochs"]] == [12, 0, 0]
    assert [epoch["equal"] for epoch in report["epochs"]] == [12, 12, 12]
    assert report["evaluation"]["same_as_greedy"]
    assert "<svg" in (tmp_path / "run/report.html").read_text()
    assert demo.returncode == (1 if failed else 0)
    # The README tells people to go on from the demo's own configuration.
    for command, says in (
        ("producer", "all 36 prompts are terminal: 36 trained"),
        ("audit", "the sums agree with the prompt list"),
    ):
        again = subprocess.run(
            [COMMAND[0], command, "-c", "run/producer.toml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert again.returncode == 0, again.stderr
        assert says in again.stderr + again.stdout


def test_second_consumer_takes_over_in_mid_run_and_every_check_still_holds(tmp_path: Path) -> None:
    with started(tmp_path, prompts=16, options=["--swap", "--max-new-tokens", "24"]) as demo:
        output, _ = demo.communicate(timeout=900)
    report = json.loads((tmp_path / "run/report.json").read_text())
    failed = {check["name"] for check in report["checks"] if not check["passed"]}
    assert failed <= {LEARNED}, output
    assert report["trained"] == report["generated"] == report["prompts"] == 16
    swap = report["swap"]
    assert swap["steps_by_first"] + swap["steps_by_second"] == 16
    assert min(swap["steps_by_first"], swap["steps_by_second"]) > 0
    times = ("started", "takeover", "first_sample", "first_step")
    assert [swap[f"{t}_seconds"] for t in times] == sorted(swap[f"{t}_seconds"] for t in times)
    assert swap["during"]["tokens_per_second"] > 0
    assert "another consumer took over" in (tmp_path / "run/consumer.log").read_text()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing_running_and_the_next_one_works(
    tmp_path: Path, demo: "subprocess.Popen[str]", kind: signal.Signals
) -> None:
    stats = tmp_path / "run/producer/stats.jsonl"
    deadline = time.monotonic() + 300
    while not stats.exists() or b"generating" not in stats.read_bytes():
        assert demo.poll() is None
        assert time.monotonic() < deadline
        os.sched_yield()
    if kind is signal.SIGINT:
        os.killpg(demo.pid, kind)  # Ctrl-C reaches the whole foreground group
    else:
        demo.send_signal(kind)
    ends_interrupted(demo)
    again = subprocess.run(
        [*COMMAND, "--dir", "run", "--prompts", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "2 of 2 prompts trained" in again.stdout, again.stderr
    assert failed_checks(tmp_path) <= {LEARNED}, again.stdout


def test_interrupted_while_the_model_is_made_it_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with started(tmp_path) as demo:
        wait_for(demo, "SmolLM2-135M-Instruct.Q4_1.gguf, once")
        os.killpg(demo.pid, signal.SIGINT)
        ends_interrupted(demo)
    left = [path.name for path in (tmp_path / "cache/draftfeed").iterdir()]
    assert left == [".smollm2-135m-instruct.lock"]


def test_interrupted_while_it_evaluates(tmp_path: Path) -> None:
    with started(tmp_path, prompts=2) as demo:
        wait_for(demo, "evaluating the drafter")
        demo.send_signal(signal.SIGTERM)
        ends_interrupted(demo)
