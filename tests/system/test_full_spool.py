"""Trainers that save rarely, fed by a producer whose spool holds a part of the run."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftfeed_consumer.trainers.specforge_checkpoints import saved_checkpoints
from processes import SAMPLES, Run
from specforge_run import SHAPE, configure

pytestmark = pytest.mark.timeout(300)

QUOTA = "spool.quota_bytes=200_000"
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, rate=0)
    yield made
    made.kill_all()


def spool_was_full(run: Run) -> bool:
    last = (run.directory / "producer/stats.jsonl").read_text().splitlines()[-1]
    return bool(json.loads(last)["stall_seconds"]["spool_full"] > 0)


def test_trainer_idle_at_a_full_spool_makes_the_checkpoints_that_free_it(run: Run) -> None:
    producer = run.start("producer", "--set", QUOTA)
    consumer = run.start("consumer", "--set", "trainer.options.checkpoint_steps=100_000")
    run.succeeds(consumer)
    run.succeeds(producer)
    assert run.trained() == run.expected()
    assert spool_was_full(run)


def test_example_trainer_idle_at_a_full_spool_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    producer = run.start("producer", "--set", QUOTA)
    consumer = run.start("consumer", "--set", "trainer.function=custom_trainer:train")
    run.succeeds(consumer)
    run.succeeds(producer)
    assert Counter(run.steps("consumer")) == Counter(run.expected())
    assert spool_was_full(run)


def test_specforge_idle_at_a_full_spool_goes_on_and_lets_go_of_the_tail(run: Run) -> None:
    """60 samples are 8 steps of 7, and 4 that fill none: the producer must not wait for them."""
    configure(run, batch_size=7, save_interval_steps=100_000)
    small = ("--set", "spool.quota_bytes=100_000", "--set", "spool.segment_bytes=10_000")
    producer = run.start("producer", *SHAPE, *small)
    consumer = run.start("consumer")
    run.succeeds(consumer)
    run.succeeds(producer)
    trained = Counter(run.steps("consumer"))
    rejected = [
        json.loads(line)
        for line in (run.directory / "producer/rejected.jsonl").read_text().splitlines()
    ]
    ends = Counter(one["reason"].partition(":")[0] for one in rejected)
    assert set(trained.values()) == {1}
    assert len(trained) + len(rejected) == SAMPLES
    assert ends["tail"] == (SAMPLES - len(rejected) + ends["tail"]) % 7
    assert not trained.keys() & {one["id"] for one in rejected}
    assert saved_checkpoints(run.directory / "out")[-1].step == len(trained) // 7
    assert spool_was_full(run)
