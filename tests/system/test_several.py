"""Several producers, several ranks, and one consumer after another, over real sockets."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftfeed_consumer.actions import Attach
from draftfeed_consumer.errors import Fenced, StreamRefused
from draftfeed_consumer.stream import HiddenStateStream
from harness import Producer, consuming, producing, relaying
from waiting import eventually

CHILD = Path(__file__).parent / "rank_child.py"
REFUSING = Path(__file__).parent / "late_refusal_child.py"
A, B = range(16), range(16, 32)
"""Ordinals of the first two shards."""


def train(stream: HiddenStateStream, limit: int | None = None) -> list[int]:
    seen: list[int] = []
    for item in stream:
        seen.append(item["id"].ordinal)
        stream.trained([item["id"]], step=len(seen))
        if len(seen) == limit:
            break
    return seen


def test_samples_of_two_producers_come_through_one_stream(tmp_path: Path) -> None:
    with (
        producing(tmp_path / "a", shards="0") as first,
        producing(tmp_path / "b", shards="1") as second,
        consuming(first.address, second.address) as stream,
    ):
        first.generate(A)
        second.generate(B)
        first.server.finish()
        second.server.finish()
        assert sorted(train(stream)) == list(range(32))
        stream.committed(stream.state_dict())
        assert stream.wait_committed(20)
        for producer, ordinals in ((first, A), (second, B)):
            assert producer.server.all_terminal.wait(20)
            assert len(producer.spool.committed) == len(ordinals)


def test_two_producers_with_the_same_shard_are_refused(tmp_path: Path) -> None:
    with (
        producing(tmp_path / "a", shards="0-1") as first,
        producing(tmp_path / "b", shards="1") as second,
        consuming(first.address, second.address) as stream,
        pytest.raises(StreamRefused, match="both own shards 1"),
    ):
        _ = stream.descriptor


def test_nothing_comes_before_all_producers_are_there_unless_told_to_go_without(
    tmp_path: Path,
) -> None:
    with (
        producing(tmp_path / "a", shards="0") as first,
        producing(tmp_path / "b", shards="1") as second,
    ):
        first.generate(A)
        second.generate(B)
        with relaying(second.address) as relay:
            relay.cut()
            attach = Attach(without=(relay.address,))
            with consuming(first.address, relay.address, attach=attach) as stream:
                iterator = iter(stream)
                item = next(iterator)
                stream.trained([item["id"]], 1)
                relay.mend()  # it comes late, and takes part
                eventually(
                    lambda: all(p.state == "open" for p in stream.statistics().client.producers),
                    "the second producer is open",
                )
                first.server.finish()
                second.server.finish()
                rest = [item["id"].ordinal for item in iterator]
    assert sorted([item["id"].ordinal, *rest]) == list(range(32))


@pytest.mark.parametrize("same_host", [False, True])
def test_takeover_stops_the_old_consumer_and_loses_nothing(tmp_path: Path, same_host: bool) -> None:
    with (
        producing(tmp_path / "a", shards="0", session_timeout_seconds=60) as first,
        producing(tmp_path / "b", shards="1", session_timeout_seconds=60) as second,
    ):
        for producer, ordinals in ((first, A), (second, B)):
            producer.generate(ordinals)
            producer.server.finish()
        with consuming(first.address, second.address, same_host=same_host) as old:
            iterator = iter(old)
            before = []
            for step in range(5):
                item = next(iterator)
                old.trained([item["id"]], step)
                before.append(item["id"].ordinal)
            checkpoint = old.state_dict()
            old.committed(checkpoint)
            assert old.wait_committed(20)
            attach = Attach(takeover=True)
            with consuming(
                first.address, second.address, attach=attach, same_host=same_host
            ) as new:
                new.load_state_dict(checkpoint)
                after = train(new)
                with pytest.raises(Fenced):
                    list(iterator)
                with pytest.raises(Fenced):
                    old.state_dict()  # nothing more to commit
                new.committed(new.state_dict())
                assert new.wait_committed(20)
    assert sorted(before + after) == list(range(32))


def test_old_checkpoint_needs_the_word_rollback_and_is_given_its_samples_again(
    tmp_path: Path,
) -> None:
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(6))
        producer.server.finish()
        with consuming(producer.address) as first:
            first.load_state_dict(first.state_dict())
            train(first, limit=2)
            old = first.state_dict()
            first.committed(old)
            train(first, limit=2)
            first.committed(first.state_dict())
            assert first.wait_committed(20)
        with consuming(producer.address) as second:
            second.load_state_dict(old)
            with pytest.raises(StreamRefused, match="--rollback"):
                train(second)
        attach = Attach(rollback="deliver")
        with consuming(producer.address, attach=attach) as third:
            third.load_state_dict(old)
            assert len(train(third)) == 4


def environments(ranks: int) -> list[dict[str, str]]:
    """Of the processes of a group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    # What is beside these tests, in the other directories, they find too.
    common |= {"PYTHONPATH": os.pathsep.join(sys.path), "WORLD_SIZE": str(ranks)}
    return [os.environ | common | {"RANK": str(rank)} for rank in range(ranks)]


def run_ranks(producers: list[Producer], checkpoint: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank printed at its end."""
    addresses = ",".join(producer.address for producer in producers)
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), addresses, str(checkpoint)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for environment in environments(ranks)
    ]
    try:
        outputs = [child.communicate(timeout=100) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * ranks, outputs
    return [json.loads(out) for out, _ in outputs]


def test_ranks_share_the_samples_and_stop_on_one_step(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "checkpoint.json"
    with (
        producing(tmp_path / "a", shards="0-2") as first,
        producing(tmp_path / "b", shards="3-9") as second,
    ):
        first.generate(range(48), rows=4)
        second.generate(range(48, 147))
        first.server.finish()
        second.server.finish()
        outputs = run_ranks([first, second], checkpoint, ranks=2)
        assert outputs[0]["steps"] == outputs[1]["steps"]
        assert all(output["trained"] for output in outputs)
        counts = json.loads(checkpoint.read_text())["counts"]
        assert sorted(counts.values()) == [1] * 147
        assert first.server.all_terminal.wait(20)
        assert second.server.all_terminal.wait(20)
        assert len(first.spool.committed) + len(second.spool.committed) == 147


def test_sample_that_another_rank_refuses_after_all_was_trained_here_is_trained_too(
    tmp_path: Path,
) -> None:
    """A rank that has voted for the end was given it, all of them ended, and the producer waited
    for it for ever."""
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(2))
        producer.server.finish()
        trains, refuses = (
            subprocess.Popen(
                [sys.executable, str(REFUSING), producer.address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for environment in environments(2)
        )
        assert trains.stdout is not None
        try:
            assert json.loads(trains.stdout.readline()) == "at its end"
            outputs = [refuses.communicate("refuse\n", 60)[0], trains.communicate(timeout=60)[0]]
        finally:
            for child in (trains, refuses):
                child.kill()
    said = [json.loads(line) for line in "".join(outputs).splitlines()]
    assert "over" in said
    assert sorted(said[-1]) == [0, 1]
