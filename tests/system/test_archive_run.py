"""Several epochs out of one generation: archived while the first is served, replayed afterwards."""

import json
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bare_member import BareMember
from draftfeed_producer.archive.reader import ArchiveReader
from draftfeed_producer.engines.synthetic import SyntheticConfig
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId
from processes import SAMPLES, Run

pytestmark = pytest.mark.timeout(120)

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
same_host = false
session_timeout_seconds = 0.5
[archive]
roots = ["archive"]
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(
        *, rate: int = 0, epochs: int = EPOCHS, archive: str = "", pause_after: int = 0
    ) -> Run:
        """pause_after: a step; the trainer then waits until it may go on."""
        run = Run(tmp_path, rate, epochs=epochs)
        runs.append(run)
        text = (tmp_path / "producer.toml").read_text()
        more = 'retain = "archive"\nquota_bytes = 1_000_000_000'
        text = text.replace('dir = "spool"', f'dir = "spool"\n{more}')
        text = text.replace("epochs =", "shard_size = 10\nepochs =")
        (tmp_path / "producer.toml").write_text(text + archive)
        if pause_after:
            with (tmp_path / "consumer.toml").open("a") as file:
                file.write(f"options = {{ pause_after = {pause_after} }}\n")
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


def every(epochs: int, first: int = 0) -> dict[str, int]:
    """Each sample of so many epochs, once."""
    dataset = SyntheticConfig(
        samples=SAMPLES,
        shard_size=10,
        num_layers=8,
        hidden_size=64,
        vocab_size=512,
        prompt_tokens=8,
        response_tokens=24,
        max_tokens=256,
    ).shards.dataset
    return {
        str(SampleId(dataset, epoch, line // 10, line)): 1
        for epoch in range(first, first + epochs)
        for line in range(SAMPLES)
    }


def replay(run: Run, *, epochs: int, pause_after: int = 0, keep: tuple[str, ...] = ()) -> None:
    """From here on the producer is a replay. keep: what the consumer is not to begin without."""
    for name in {"out", "consumer", "producer"} - {*keep}:
        (run.directory / name).rename(run.directory / f"first-{name}")
    text = REPLAY.format(first_epoch=1, epochs=epochs, address=run.address)
    (run.directory / "producer.toml").write_text(text)
    if pause_after:
        with (run.directory / "consumer.toml").open("a") as file:
            file.write(f"options = {{ pause_after = {pause_after} }}\n")


def test_three_epochs_are_generated_once_and_are_byte_for_byte_the_same(
    start: Callable[..., Run],
) -> None:
    run = start(archive=ARCHIVE.format(roots='"archive"'))
    both(run)
    assert run.trained() == every(3)
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
    replay(run, epochs=2)
    both(run)
    assert digests(run) == {1: first, 2: first}
    assert run.trained() == every(2, first=1)


def test_trainer_of_the_first_epoch_goes_on_with_a_replay(start: Callable[..., Run]) -> None:
    run = start(epochs=1, archive=ARCHIVE.format(roots='"archive"'))
    both(run)
    replay(run, epochs=1, keep=("out",))
    both(run)
    assert run.trained() == every(2)


def test_producer_that_is_stopped_before_the_last_segments_are_sealed_is_not_done(
    start: Callable[..., Run],
) -> None:
    """It said that it was, nobody started it again, and a replay had no samples for those lines."""
    run = start(epochs=1, archive=ARCHIVE.format(roots='"archive"'))
    producer = run.start("producer")
    member = BareMember(run.address)
    member.open()
    member.commit(member.receive(SAMPLES))
    member.until(m.AllTerminal)
    member.until(m.Ping)  # the producer waits for it to leave
    producer.send_signal(signal.SIGTERM)
    code, output = run.ended(producer)
    member.close()
    assert code == 130, output
    assert "segments are not archived yet" in output
    run.succeeds(run.start("producer"))
    assert len(ArchiveReader((run.directory / "archive",)).lines) == SAMPLES


@pytest.mark.parametrize("quota_bytes", [0, 300_000])
def test_killed_in_the_second_epoch_of_a_mixed_run_each_sample_counts_once(
    start: Callable[..., Run], quota_bytes: int
) -> None:
    """With a quota some of each epoch is generated, and some comes out of the archive."""
    archive = ARCHIVE.format(roots='"archive"') + f"quota_bytes = {quota_bytes}\n"
    run = start(archive=archive, pause_after=SAMPLES + 20)
    producer, consumer = run.start("producer", run_dir="killed"), run.start("consumer")
    run.wait_for_lines("consumer/steps.jsonl", SAMPLES + 20)
    producer.send_signal(signal.SIGKILL)
    producer.wait()
    producer = run.start("producer")
    run.go_on()
    run.succeeds(consumer)
    run.succeeds(producer)
    assert run.trained() == every(3)
    by_epoch = digests(run)
    same = [line for line in by_epoch[0] if by_epoch[0][line] == by_epoch[2][line]]
    assert 0 < len(same) < SAMPLES if quota_bytes else len(same) == SAMPLES
    made = generated(run) + len((run.directory / "killed/samples.jsonl").read_text().splitlines())
    assert (made > SAMPLES) == bool(quota_bytes)


def test_killed_replay_goes_on_where_it_was(start: Callable[..., Run]) -> None:
    run = start(epochs=1, archive=ARCHIVE.format(roots='"archive"'))
    both(run)
    replay(run, epochs=2, pause_after=SAMPLES + 20)
    producer, consumer = run.start("producer"), run.start("consumer")
    run.wait_for_lines("consumer/steps.jsonl", SAMPLES + 20)
    producer.send_signal(signal.SIGKILL)
    producer.wait()
    producer = run.start("producer")
    run.go_on()
    run.succeeds(consumer)
    run.succeeds(producer)
    assert run.trained() == every(2, first=1)


def test_two_nodes_share_an_archive_by_shards(start: Callable[..., Run]) -> None:
    run = start(epochs=1, archive=ARCHIVE.format(roots='"archive"'))
    both(run)
    first = digests(run)[0]
    replay(run, epochs=2)
    text = (run.directory / "producer.toml").read_text()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        other = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    (run.directory / "producer.toml").write_text(
        text.replace('dir = "replayed"', 'dir = "replayed"\nshards = "0-2"')
    )
    consumer_text = (run.directory / "consumer.toml").read_text()
    both_addresses = f'"{run.address}", "{other}"'
    (run.directory / "consumer.toml").write_text(
        consumer_text.replace(f'"{run.address}"', both_addresses)
    )
    options = ["--set", 'spool.shards="3-5"', "--set", "spool.dir=other", "--set"]
    producers = [
        run.start("producer", run_dir="one"),
        run.start("producer", *options, f"server.bind={other}", run_dir="two"),
    ]
    run.succeeds(run.start("consumer"))
    for producer in producers:
        run.succeeds(producer)
    assert run.trained() == every(2, first=1)
    assert digests(run) == {1: first, 2: first}


def test_rollback_to_an_early_checkpoint_delivers_out_of_the_archive_what_the_spool_has_freed(
    start: Callable[..., Run],
) -> None:
    run = start(archive=ARCHIVE.format(roots='"archive"'), pause_after=SAMPLES + 20)
    producer, consumer = run.start("producer"), run.start("consumer")
    run.wait_for_lines("consumer/steps.jsonl", SAMPLES + 20)
    run.succeeds(run.drain())
    run.succeeds(consumer)
    checkpoints = sorted((run.directory / "out").glob("checkpoint-*.json"))
    for path in checkpoints[2:]:
        path.unlink()
    early = len(json.loads(checkpoints[1].read_text())["counts"])
    assert early < SAMPLES
    run.go_on()
    run.succeeds(run.start("consumer", "--rollback", run_dir="after"))
    run.succeeds(producer)
    assert run.trained() == every(3)
    assert generated(run) == SAMPLES, "nothing was generated again"


def flip_a_sample(run: Run) -> None:
    victim = max((run.directory / "archive").glob("*.seg"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0x10
    victim.unlink()  # the spool may have the same file
    victim.write_bytes(content)


def test_sample_damaged_at_rest_is_generated_again_by_a_live_producer(
    start: Callable[..., Run],
) -> None:
    run = start(epochs=1, archive=ARCHIVE.format(roots='"archive"'))
    both(run)
    flip_a_sample(run)
    shutil.move(run.directory / "producer", run.directory / "first")
    shutil.move(run.directory / "consumer", run.directory / "first-consumer")
    # Without the spool's segments, which have them whole.
    shutil.rmtree(run.directory / "spool")
    shutil.rmtree(run.directory / "out")
    both(run)
    assert run.trained() == every(1)
    assert generated(run) == 1


def test_sample_damaged_at_rest_is_quarantined_and_named_by_a_replay(
    start: Callable[..., Run],
) -> None:
    run = start(epochs=1, archive=ARCHIVE.format(roots='"archive"'))
    both(run)
    flip_a_sample(run)
    replay(run, epochs=2)
    both(run)
    lines = (run.directory / "producer" / "rejected.jsonl").read_text().splitlines()
    ended = {json.loads(line)["id"]: json.loads(line)["reason"] for line in lines}
    assert len(ended) == 2, "the line, in both epochs"
    assert {id.rpartition("/")[2] for id in ended} == {next(iter(ended)).rpartition("/")[2]}
    assert any("a replay has no target to make it again" in reason for reason in ended.values())
    assert run.trained() == {id: 1 for id in every(2, first=1) if id not in ended}
