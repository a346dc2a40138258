"""An impatient operator."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import stub_trainer
from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun
from processes import Run

pytestmark = pytest.mark.timeout(300)


def stubborn(stream: HiddenStateStream, run: TrainerRun) -> None:
    """Named in the configuration: trains, and then does not return."""
    stub_trainer.train(stream, run)
    threading.Event().wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, 0)
    yield run
    run.kill_all()


def test_second_drain_waits_with_the_first_and_interrupts_nothing(run: Run) -> None:
    run.start("producer")
    trainer = ("--set", f"trainer.function={__name__}:stubborn")
    consumer = run.start("consumer", *trainer, "--set", "trainer.drain_seconds=8")
    run.wait_for_lines("consumer/steps.jsonl", 1)
    first = run.drain()
    run.wait_for(first, "draining the consumer")
    second = run.drain()
    run.wait_for(second, "draining the consumer")
    _, output = run.ended(consumer)
    assert "not drained within 8 s" in output
    assert [run.ended(drain)[0] for drain in (first, second)] == [1, 1]
