"""`draftfeed consumer --ranks`: several ranks that a service manager can take for one process."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from draftfeed_deploy.rank_group import code_of_ranks
from torchrun_run import TorchRun
from waiting import eventually

pytestmark = pytest.mark.timeout(120)
Start = Callable[..., TorchRun]
SMALL = ("--set", "trainer.options.samples=2", "--set", "trainer.options.save_steps=2")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[TorchRun] = []

    def make(samples: int, rate: int = 0) -> TorchRun:
        run = TorchRun(tmp_path, samples, rate)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.kill_all()


def ranks_of(process: TorchRun.Process) -> list[psutil.Process]:
    """Once both are there."""
    launcher = psutil.Process(process.pid)
    eventually(lambda: len(launcher.children()) == 2, "two ranks")
    return launcher.children()


def test_sigterm_drains_all_ranks(start: Start) -> None:
    """torchrun would end with 1, drained or not."""
    run = start(2000, rate=480)
    process = run.ranks(2, *SMALL, run_dir="ranks")
    ranks = ranks_of(process)
    run.wait_for_lines("ranks/rank0/steps.jsonl", 3)
    process.terminate()
    code, output = run.ended(process)
    assert code == 0, output
    assert "samples trained and committed" in output
    assert not any(rank.is_running() for rank in ranks)
    steps = [*run.rank_steps("ranks/rank0"), *run.rank_steps("ranks/rank1")]
    trained = [id for step in steps for id in step.ids]
    assert sorted(trained) == sorted(run.in_checkpoint())


def test_ranks_that_were_replaced_end_with_three(start: Start) -> None:
    """Or a service manager would start them again, to wait for the stream of their successor."""
    run = start(2000, rate=480)
    process = run.ranks(2, *SMALL, run_dir="ranks")
    run.wait_for_lines("ranks/rank0/steps.jsonl", 2)
    other = run.alone(*SMALL, "--takeover", run_dir="other")
    code, output = run.ended(process)
    assert code == 3, output
    assert "another consumer took over" in output
    assert other.poll() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_ranks_do_not_outlive_their_parent(
    start: Start, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would train on, with the stream, beside those of the next start. When the watchdog ends
    it, each says what it was doing."""
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    run = start(2000, rate=480)
    process = run.ranks(2, *SMALL, run_dir="ranks")
    ranks = ranks_of(process)
    run.wait_for_lines("ranks/rank0/steps.jsonl", 1)
    process.send_signal(number)
    psutil.wait_procs(ranks, timeout=60)
    assert not any(rank.is_running() for rank in ranks)
    code, output = run.ended(process)
    assert code == -number
    assert output.count("Fatal Python error: Aborted") == 2 * (number == signal.SIGABRT)


def test_wrong_configuration_ends_with_two(start: Start) -> None:
    run = start(1)
    words = ("--set", "trainer.function=ddp_faults:nothing_of_that_name")
    code, output = run.ended(run.ranks(2, *words, run_dir="ranks"))
    assert code == 2, output
    assert "nothing_of_that_name" in output


def test_sigterm_before_the_ranks_are_up_is_no_failure(start: Start) -> None:
    run = start(1)
    process = run.ranks(2, run_dir="ranks")
    ranks = ranks_of(process)
    process.send_signal(signal.SIGTERM)
    code, output = run.ended(process)
    assert code == 0, output
    assert "nothing was trained" in output
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize(
    ("codes", "code"),
    [([1, 3], 3), ([2, 1], 2), ([-9, 130], 1), ([1], 1), ([-15, 3], 3), ([-9], 1)],
)
def test_code_that_tells_whether_to_restart_comes_first(codes: list[int], code: int) -> None:
    assert code_of_ranks(codes) == code
