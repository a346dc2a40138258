"""A consumer that ends, and another that goes on: drained, or replaced while it lives."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import stub_trainer
from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun
from processes import PATHS, Run

pytestmark = pytest.mark.timeout(300)
DRAINED = "samples trained and committed"


def stubborn(stream: HiddenStateStream, run: TrainerRun) -> None:
    """Named in the configuration: trains, and then does not return."""
    stub_trainer.train(stream, run)
    threading.Event().wait()


TRAINED = 17
"""Steps of a consumer before it pauses: two more than its last checkpoint has."""
PAUSING = ("--set", f"trainer.options.pause_after={TRAINED}")
STUBBORN = ("--set", f"trainer.function={__name__}:stubborn")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, 0)
    yield run
    run.kill_all()


def training(
    run: Run, *options: str, path: tuple[str, ...] = ()
) -> tuple[Run.Process, Run.Process]:
    """A producer, and a consumer that pauses in mid-run."""
    producer, consumer = run.start("producer", *path), run.start("consumer", *PAUSING, *options)
    run.wait_for_lines("consumer/steps.jsonl", TRAINED)
    return producer, consumer


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_stopped_consumer_leaves_nothing_to_be_trained_again(
    run: Run, kind: signal.Signals
) -> None:
    producer, consumer = training(run)
    consumer.send_signal(kind)
    code, output = run.ended(consumer)
    assert code == 0, output
    first = run.steps("consumer")
    assert f"drained: {len(first)} {DRAINED}" in output
    assert sorted(run.trained()) == sorted(first)
    run.succeeds(run.start("consumer", run_dir="second"))
    run.succeeds(producer)
    assert run.trained() == run.expected()
    assert sorted(first + run.steps("second")) == sorted(run.expected())


def test_drain_command_ends_the_consumer_and_says_what_it_left(run: Run) -> None:
    _, consumer = training(run)
    code, output = run.ended(run.drain())
    assert code == 0, output
    assert f"draining the consumer {consumer.pid} on " in output
    assert f"drained: {len(run.steps('consumer'))} {DRAINED}" in output
    run.succeeds(consumer)
    code, output = run.ended(run.drain())
    assert code == 2
    assert "draftfeed: no consumer is running that trains into out" in output


def test_second_signal_ends_a_consumer_that_does_not_drain(run: Run) -> None:
    _, consumer = training(run, *STUBBORN)
    consumer.terminate()
    run.wait_for(consumer, "draining")
    consumer.send_signal(signal.SIGINT)  # the same again could be the first one, sent twice
    code, output = run.ended(consumer)
    assert code == 130, output
    assert "not drained within" not in output
    assert "Traceback" not in output


def test_drain_of_a_consumer_that_does_not_end_says_that_it_still_runs(run: Run) -> None:
    _, consumer = training(run, *STUBBORN)
    code, output = run.ended(run.drain("--timeout", "0.5"))
    assert code == 1
    assert f"the consumer {consumer.pid} on " in output
    assert "still running" in output
    assert consumer.poll() is None


def test_drain_that_takes_longer_than_allowed_ends_uncommitted_and_is_reported_so(run: Run) -> None:
    _, consumer = training(run, *STUBBORN, "--set", "trainer.drain_seconds=0.5")
    code, output = run.ended(run.drain())
    assert code == 1
    assert "ended undrained (exit code 130: interrupted)" in output
    code, output = run.ended(consumer)
    assert code == 130
    assert "not drained within" in output


def test_consumer_that_waits_for_its_producer_ends_at_once(run: Run) -> None:
    consumer = run.start("consumer")
    run.wait_for(consumer, "waiting for the producer")
    consumer.terminate()
    code, output = run.ended(consumer)
    assert code == 0
    assert "stopped before any producer had granted the stream" in output


def test_second_consumer_in_the_same_directory_is_refused_by_name(run: Run) -> None:
    producer, consumer = training(run)
    code, output = run.ended(run.start("consumer", run_dir="second"))
    assert code == 2
    assert f"out is in use by the consumer {consumer.pid} on " in output
    assert output.count("\n") == 1
    run.go_on()
    run.succeeds(consumer)
    run.succeeds(producer)


@PATHS
def test_takeover_ends_the_old_consumer_and_every_sample_is_trained_once(
    run: Run, path: tuple[str, ...]
) -> None:
    producer, old = training(run, path=path)
    new = run.start("consumer", "--takeover", run_dir="second")
    code, output = run.ended(old)
    assert code == 3, output
    assert "Traceback" not in output
    assert "another consumer took over" in output
    run.succeeds(new)
    run.succeeds(producer)
    assert run.trained() == run.expected()
    assert run.steps("second")


def test_old_consumer_started_again_after_a_takeover_waits_and_says_for_whom(run: Run) -> None:
    """On its own machine nothing else stops it: it must neither fight nor train."""
    producer, old = training(run)
    new = run.start("consumer", "--takeover", *PAUSING, run_dir="second")
    assert run.ended(old)[0] == 3
    elsewhere = ("--set", "trainer.output_dir=elsewhere")
    restarted = run.start("consumer", *elsewhere, run_dir="restarted")
    run.wait_for(restarted, "is attached; wait until it leaves, or take its place with --takeover")
    restarted.terminate()
    code, output = run.ended(restarted)
    assert code == 0, output
    assert new.poll() is None
    run.go_on()
    run.succeeds(new)
    run.succeeds(producer)
    assert run.trained() == run.expected()
    assert not (run.directory / "restarted/steps.jsonl").read_text()


def test_drain_finds_the_consumer_that_took_over_and_not_the_old_one(run: Run) -> None:
    producer, old = training(run)
    new = run.start("consumer", "--takeover", *PAUSING, run_dir="second")
    assert run.ended(old)[0] == 3
    run.wait_for_lines("second/steps.jsonl", TRAINED)
    code, output = run.ended(run.drain())
    assert code == 0, output
    assert f"draining the consumer {new.pid} on " in output
    run.succeeds(new)
    run.succeeds(run.start("consumer", run_dir="third"))
    run.succeeds(producer)
    assert run.trained() == run.expected()


def test_checkpoint_older_than_the_last_commit_is_refused_until_a_rollback_is_asked_for(
    run: Run,
) -> None:
    producer, consumer = training(run)
    consumer.terminate()
    assert run.ended(consumer)[0] == 0
    newest = stub_trainer.newest(run.directory / "out")
    assert newest is not None
    newest.unlink()
    code, output = run.ended(run.start("consumer", run_dir="second"))
    assert code == 2
    assert "--rollback" in output
    run.succeeds(run.start("consumer", "--rollback", run_dir="third"))
    run.succeeds(producer)
    assert run.trained() == run.expected()
