"""`draftfeed consumer` in this process, against a producer in another."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun
from draftfeed_deploy import consumer
from draftfeed_deploy.cli import main
from processes import Run


def train_all(stream: HiddenStateStream, run: TrainerRun) -> None:
    """Named in the configuration. Kills the producer before the commit if it is told its pid."""
    for step, sample in enumerate(stream, start=1):
        stream.trained([sample["id"]], step)
    if pid := run.options.get("kill"):
        os.kill(pid, signal.SIGKILL)
    stream.committed(stream.state_dict())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, 0)
    yield run
    run.kill_all()


def command(run: Run, *overrides: str) -> int:
    options = [f"trainer.function={__name__}:train_all", f"trainer.output_dir={run.directory}/out"]
    sets = [word for override in (*options, *overrides) for word in ("--set", override)]
    return main(["consumer", "-c", str(run.directory / "consumer.toml"), *sets])


def test_producer_that_never_confirms_the_last_commit_makes_exit_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(consumer, "COMMIT_SECONDS", 1.0)
    producer = run.start("producer")
    assert command(run, f"trainer.options.kill={producer.pid}") == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "draftfeed: " in line]
    assert len(errors) == 1
    assert "the producer has not confirmed it" in errors[0]


def test_confirmed_commit_makes_exit_code_0(run: Run) -> None:
    producer = run.start("producer")
    assert command(run) == 0
    assert run.ended(producer)[0] == 0
