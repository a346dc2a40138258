"""Several epochs out of one generation: archived while the first is served, replayed afterwards."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import SAMPLES, Run

pytestmark = pytest.mark.timeout(300)

EPOCHS = 3
ARCHIVE = """
[archive]
roots = [{roots}]
min_free_bytes = 0
"""
REPLAY = """
[engine]
name = "archive"
first_epoch = {first_epoch}
epochs = {epochs}
[spool]
dir = "replayed"
[server]
bind = "{address}"
session_timeout_seconds = 0.5
[archive]
roots = ["archive"]
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*, rate: int = 0, epochs: int = EPOCHS, archive: str = "") -> Run:
        run = Run(tmp_path, rate, epochs=epochs)
        runs.append(run)
        text = (tmp_path / "producer.toml").read_text()
        text = text.replace('dir = "spool"', 'dir = "spool"\nretain = "archive"')
        (tmp_path / "producer.toml").write_text(text + archive)
        return run

    yield make
    for run in runs:
        run.kill_all()


def both(run: Run) -> None:
    producer, consumer = run.start("producer"), run.start("consumer")
    run.succeeds(consumer)
    run.succeeds(producer)


def digests(run: Run) -> dict[int, dict[int, str]]:
    """By epoch and line of the prompt file, as the consumer computed them."""
    found: dict[int, dict[int, str]] = {}
    for text in (run.directory / "consumer" / "samples.jsonl").read_text().splitlines():
        line = json.loads(text)
        _, epoch, _, ordinal = line["id"].split("/")
        found.setdefault(int(epoch), {})[int(ordinal)] = line["digest"]
    return found


def generated(run: Run) -> int:
    return len((run.directory / "producer" / "samples.jsonl").read_text().splitlines())


def test_three_epochs_are_generated_once_and_are_byte_for_byte_the_same(
    start: Callable[..., Run],
) -> None:
    run = start(archive=ARCHIVE.format(roots='"archive"'))
    both(run)
    assert run.trained() == run.expected()
    assert generated(run) == SAMPLES
    by_epoch = digests(run)
    assert sorted(by_epoch) == [0, 1, 2]
    assert by_epoch[0] == by_epoch[1] == by_epoch[2]
    orders = [[id for id in run.steps("consumer") if id.split("/")[1] == e] for e in "012"]
    lines = [[id.split("/")[3] for id in order] for order in orders]
    assert lines[1] != lines[2], "every epoch is shuffled anew"


def test_a_replay_serves_what_was_archived_without_a_model(start: Callable[..., Run]) -> None:
    run = start(epochs=1, archive=ARCHIVE.format(roots='"archive"'))
    both(run)
    first = digests(run)[0]
    for name in ("out", "consumer", "producer"):
        (run.directory / name).rename(run.directory / f"first-{name}")
    text = REPLAY.format(first_epoch=1, epochs=2, address=run.address)
    (run.directory / "producer.toml").write_text(text)
    both(run)
    by_epoch = digests(run)
    assert by_epoch == {1: first, 2: first}
    assert set(run.trained().values()) == {1}
    assert len(run.trained()) == 2 * SAMPLES
