"""Both services stopped, killed, restarted, refused: what a checkpoint says in the end."""

import json
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import relaying
from processes import PATHS, SAMPLES, Run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Run]]:
    runs: list[Run] = []

    def make(rate: int = 0) -> Run:
        runs.append(Run(tmp_path, rate))
        return runs[-1]

    yield make
    for run in runs:
        run.kill_all()


@PATHS
def test_a_run_ends_by_itself_with_every_sample_trained_once(
    start: Callable[..., Run], path: tuple[str, ...]
) -> None:
    run = start()
    producer, consumer = run.start("producer", *path), run.start("consumer")
    run.succeeds(consumer)
    run.succeeds(producer)
    assert run.trained() == run.expected()


def test_consumer_that_is_told_to_stop_when_all_is_done_has_done_it(
    start: Callable[..., Run],
) -> None:
    """It ended as interrupted, and `draftfeed drain` said that samples would be trained again."""
    run = start()
    producer = run.start("producer")
    consumer = run.start("consumer", "--set", "trainer.function=late_signal_trainer:train")
    run.succeeds(consumer)
    run.succeeds(producer)


def test_both_sides_log_the_same_digest_for_every_sample(start: Callable[..., Run]) -> None:
    run = start()
    for process in (run.start("producer"), run.start("consumer")):
        run.succeeds(process)

    def digests(name: str) -> dict[str, str]:
        lines = (run.directory / name / "samples.jsonl").read_text().splitlines()
        return {line["id"]: line["digest"] for line in map(json.loads, lines)}

    assert digests("producer") == digests("consumer")
    assert len(digests("producer")) == SAMPLES


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_producer_goes_on_at_its_next_start(
    start: Callable[..., Run], kind: signal.Signals
) -> None:
    run = start(500)
    producer, consumer = run.start("producer"), run.start("consumer")
    run.wait_for_lines("producer/samples.jsonl", SAMPLES // 3)
    producer.send_signal(kind)
    code, output = run.ended(producer)
    assert code in (130, -kind), output
    if code == 130:
        assert "stopped: what is generated is in the spool" in output
    again = run.start("producer")
    run.succeeds(consumer)
    run.succeeds(again)
    assert run.trained() == run.expected()


@PATHS
def test_killed_consumer_trains_the_rest_from_its_checkpoint(
    start: Callable[..., Run], path: tuple[str, ...]
) -> None:
    run = start(500)
    producer, consumer = run.start("producer", *path), run.start("consumer")
    run.wait_for_lines("consumer/steps.jsonl", SAMPLES // 3)
    consumer.kill()
    assert run.ended(consumer)[0] == -signal.SIGKILL
    again = run.start("consumer")
    run.succeeds(again)
    run.succeeds(producer)
    assert run.trained() == run.expected()


def test_trainer_restarted_again_and_again_neither_hangs_nor_repeats_nor_skips(
    start: Callable[..., Run],
) -> None:
    run = start(300)
    producer = run.start("producer")
    for life, kind in enumerate([signal.SIGKILL, signal.SIGTERM, signal.SIGKILL], start=1):
        consumer = run.start("consumer", run_dir=f"life-{life}")
        run.wait_for_lines(f"life-{life}/steps.jsonl", SAMPLES // 6)
        consumer.send_signal(kind)
        assert run.ended(consumer)[0] in (0, -kind)
    run.succeeds(run.start("consumer"))
    run.succeeds(producer)
    assert run.trained() == run.expected()


def test_spool_smaller_than_the_run_asks_for_the_checkpoints_that_free_it(
    start: Callable[..., Run],
) -> None:
    run = start()
    producer = run.start("producer", "--set", "spool.quota_bytes=300_000")
    consumer = run.start("consumer", "--set", "trainer.options.checkpoint_steps=1000")
    for process in (consumer, producer):
        code, output = run.ended(process)
        assert code == 0, output
    assert run.trained() == run.expected()
    last = (run.directory / "producer/stats.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["stall_seconds"]["spool_full"] > 0


def test_consumer_started_first_says_that_it_waits(start: Callable[..., Run]) -> None:
    run = start()
    consumer = run.start("consumer")
    run.wait_for(consumer, "waiting for the producer at tcp://127.0.0.1")
    run.succeeds(run.start("producer"))
    run.succeeds(consumer)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_consumer_dials_what_it_was_told_wherever_the_producer_thinks_it_listens(
    start: Callable[..., Run], name: str
) -> None:
    """As with a container's mapped port: the producer's own address is of no use outside."""
    run = start()
    port = run.address.rpartition(":")[2]
    producer = run.start(
        "producer", "--set", f"server.bind=tcp://0.0.0.0:{port}", "--set", "server.insecure=true"
    )
    run.wait_for(producer, "serving")
    with relaying(run.address) as relay:
        outside = relay.address.replace("127.0.0.1", name)
        run.succeeds(run.start("consumer", "--set", f'producer.addresses=["{outside}"]'))
    run.succeeds(producer)
    assert run.trained() == run.expected()
    log = (run.directory / "consumer/stats.jsonl").read_text().splitlines()
    assert list(json.loads(log[-1])["producers"]) == [outside]


def test_consumer_that_expects_other_layers_is_refused_with_both_values(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.start("producer")
    consumer = run.start("consumer", "--set", "expect.layer_ids=[2, 3, 4, 5, 6]")
    code, output = run.ended(consumer)
    assert code == 2
    assert "expects (2, 3, 4, 5, 6), the producer serves (1, 2, 3, 4, 5)" in output
    assert "Traceback" not in output


def test_example_trainer_trains_on_every_sample_and_keeps_a_checkpoint(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = Path(__file__).parents[2] / "docs" / "examples"
    monkeypatch.syspath_prepend(str(examples))
    run = start()
    run.start("producer")
    consumer = run.start("consumer", "--set", "trainer.function=custom_trainer:train")
    code, output = run.ended(consumer)
    assert code == 0, output
    lines = (run.directory / "consumer/steps.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert sorted(id for step in steps for id in step["ids"]) == sorted(run.expected())
    # Synthetic tokens are drawn uniformly: no loss can fall below that of guessing for long.
    assert all(0 < step["loss"] < 2 * math.log(512) for step in steps)
    assert list((run.directory / "out").glob("probe-*.pt"))
