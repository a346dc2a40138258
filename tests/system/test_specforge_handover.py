"""SpecForge is drained, and taken over from, by a second one with the same directory."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftfeed_consumer.ledger import parse
from draftfeed_consumer.trainers.dflash import read_state
from draftfeed_consumer.trainers.specforge_checkpoints import latest_checkpoint, saved_checkpoints
from draftfeed_proto.ids import IdSet
from processes import SAMPLES, Run
from specforge_run import SHAPE, configure

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, rate=150)
    yield made
    made.kill_all()


def rejected(run: Run) -> list[int]:
    """Line numbers of prompts with an answer too short for DFlash."""
    path = run.directory / "producer/rejected.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(json.loads(line)["id"].rpartition("/")[2]) for line in lines]


def check_last_checkpoint(run: Run) -> None:
    """It has every sample that was not rejected, and as many optimizer steps."""
    newest = latest_checkpoint(run.directory / "out")
    assert newest is not None
    state = read_state(newest)
    trained = IdSet.from_wire(parse(state["draftfeed"]).trained)
    ordinals = sorted([id.ordinal for id in trained] + rejected(run))
    assert ordinals == list(range(SAMPLES))
    assert state["global_step"] == len(trained)


def test_drained_specforge_leaves_the_rest_to_the_next_one(run: Run) -> None:
    configure(run, batch_size=1, save_interval_steps=100_000)
    producer, consumer = run.start("producer", *SHAPE), run.start("consumer", run_dir="first")
    run.wait_for_lines("first/steps.jsonl", 8)
    consumer.send_signal(signal.SIGTERM)
    run.succeeds(consumer)
    run.succeeds(run.start("consumer", run_dir="second"))
    run.succeeds(producer)
    first, second = run.steps("first"), run.steps("second")
    assert second, "there was nothing left to train"
    assert len({*first, *second}) == len(first) + len(second)
    check_last_checkpoint(run)


def test_specforge_that_takes_over_goes_on_from_the_last_checkpoint(run: Run) -> None:
    configure(run, batch_size=1, save_interval_steps=5)
    producer, old = run.start("producer", *SHAPE), run.start("consumer", run_dir="old")
    run.wait_for_lines("old/steps.jsonl", 8)
    old.send_signal(signal.SIGSTOP)
    new = run.start("consumer", "--takeover", run_dir="new")
    run.wait_for_lines("new/steps.jsonl", 1)
    old.send_signal(signal.SIGCONT)  # in the middle of whatever it was doing
    code, output = run.ended(old)
    assert code == 3, output
    run.succeeds(new)
    run.succeeds(producer)
    terms = [saved.term for saved in saved_checkpoints(run.directory / "out") if saved.complete]
    assert terms[-1] == 2
    check_last_checkpoint(run)
