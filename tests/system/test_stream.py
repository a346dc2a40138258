"""A spool, a server, a client and a buffer over real loopback sockets."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from chaos.relay import Relay
from draftfeed_consumer import client
from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.collate import Collator
from draftfeed_consumer.errors import (
    BufferTooSmall,
    ProducerClosing,
    StateError,
    StreamClosed,
    StreamLost,
    StreamRefused,
)
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from draftfeed_proto.descriptor import Expectation
from draftfeed_proto.ids import IdSet
from draftfeed_proto.sample import Sample
from harness import consuming, producing, relaying
from samples import DESCRIPTOR, sample
from waiting import eventually


def train(stream: HiddenStateStream, limit: int | None = None) -> list[int]:
    """Train on what comes, one sample a step; the ordinals in order."""
    seen: list[int] = []
    for item in stream:
        seen.append(item["id"].ordinal)
        stream.trained([item["id"]], step=len(seen))
        if len(seen) == limit:
            break
    return seen


PATHS = pytest.mark.parametrize("same_host", [False, True])


@PATHS
def test_every_sample_arrives_once_with_its_own_tensors(tmp_path: Path, same_host: bool) -> None:
    with (
        producing(tmp_path / "spool") as producer,
        consuming(producer.address, same_host=same_host) as stream,
    ):
        producer.generate(range(40))
        producer.server.finish()
        seen: list[int] = []
        for item in stream:
            made = sample(item["id"].ordinal)
            assert np.array_equal(item["input_ids"], made.input_ids)
            assert np.array_equal(item["loss_mask"], made.loss_mask)
            assert np.array_equal(
                item["hidden_states"].numpy().view(np.uint16), made.hidden_states.view(np.uint16)
            )
            assert item["key"] == made.key
            seen.append(item["id"].ordinal)
            stream.trained([item["id"]], step=len(seen))
    assert sorted(seen) == list(range(40))
    assert seen != sorted(seen)  # shuffled inside the window


def test_last_sample_that_is_spoiled_on_its_way_comes_again(tmp_path: Path) -> None:
    """The end of the data, sent right behind it, was taken for the end."""
    with producing(tmp_path / "spool") as producer:
        host, _, port = producer.address.removeprefix("tcp://").rpartition(":")
        listener = socket.create_server((host, 0))
        relay = Relay(listener, lambda: socket.create_connection((host, int(port))), seed=1)
        relay.flip(1)
        producer.generate(range(1))
        producer.server.finish()
        with closing(relay), consuming(f"tcp://{host}:{listener.getsockname()[1]}") as stream:
            assert train(stream) == [0]
        assert relay.flipped == 1


def test_the_final_state_arrives_beside_the_tapped_layers(tmp_path: Path) -> None:
    """On the wire it is a layer; a trainer that takes all layers for its inputs must not get it."""
    stream_of_two = msgspec.structs.replace(DESCRIPTOR, layer_ids=(1, 4), final="postnorm")
    expect = Expectation(layer_ids=(1, 4), final="postnorm")
    with (
        producing(tmp_path / "spool", descriptor=stream_of_two) as producer,
        consuming(producer.address, expect=expect) as stream,
    ):
        producer.generate(range(6))
        producer.server.finish()
        collate = Collator(stream.release, mode="pack", dtype=torch.float32)
        batches = list(collate.batches(stream, samples=2))
        assert stream.descriptor == stream_of_two
        for step, batch in enumerate(batches):
            made = [torch.from_numpy(sample(id.ordinal).hidden_states) for id in batch["ids"]]
            assert "final_states" in batch
            assert torch.equal(batch["hidden_states"][0], torch.cat(made)[:, :2].float())
            assert torch.equal(batch["final_states"][0], torch.cat(made)[:, 2].float())
            stream.trained(batch["ids"], step)
    assert sorted(id.ordinal for batch in batches for id in batch["ids"]) == list(range(6))


def test_last_sampled_token_is_a_label_without_a_row(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer, consuming(producer.address) as stream:
        producer.generate([0], rows=17)
        producer.server.finish()
        item = next(iter(stream))
    assert len(item["input_ids"]) == len(item["loss_mask"]) == 18
    assert len(item["hidden_states"]) == 17


def test_producer_exits_when_the_final_checkpoint_is_committed(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer, consuming(producer.address) as stream:
        producer.generate(range(5))
        producer.server.finish()
        train(stream)
        assert not producer.server.all_terminal.is_set()
        stream.committed(stream.state_dict())
        assert stream.wait_committed(10)
        assert producer.server.all_terminal.wait(10)


@PATHS
def test_trained_but_uncommitted_samples_are_delivered_again_after_a_crash(
    tmp_path: Path, same_host: bool
) -> None:
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(12))
        producer.server.finish()
        with consuming(producer.address, same_host=same_host) as first:
            before = train(first, limit=4)
            checkpoint = first.state_dict()
            first.committed(checkpoint)
            assert first.wait_committed(10)
            train(first, limit=3)  # lost with the crash: no checkpoint holds them
        with consuming(producer.address, same_host=same_host) as second:
            second.load_state_dict(checkpoint)
            after = train(second)
    assert sorted(before + after) == list(range(12))


def test_checkpoint_the_producer_never_heard_of_counts(tmp_path: Path) -> None:
    """The trainer died between writing its checkpoint and reporting it."""
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(6))
        producer.server.finish()
        with consuming(producer.address) as first:
            before = train(first, limit=4)
            checkpoint = first.state_dict()
        with consuming(producer.address) as second:
            second.load_state_dict(checkpoint)
            assert sorted(before + train(second)) == list(range(6))


def test_resuming_without_the_committed_checkpoint_is_refused(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(6))
        with consuming(producer.address) as first:
            train(first, limit=2)
            first.committed(first.state_dict())
            assert first.wait_committed(10)
        with consuming(producer.address) as second, pytest.raises(StreamRefused, match="2 samples"):
            train(second)


def test_restarted_producer_goes_on_where_it_was(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(8))
        address = producer.address
        with consuming(address) as stream:
            iterator = iter(stream)
            item = next(iterator)
            stream.trained([item["id"]], step=1)
            stream.committed(stream.state_dict())
            assert stream.wait_committed(10)
    with producing(tmp_path / "spool") as producer:
        assert producer.spool.committed == IdSet([item["id"]])
        assert producer.spool.finished(sample(7).id)
        assert not producer.spool.finished(sample(8).id)
        assert len(list(producer.spool.deliverable())) == 7


def test_consumer_survives_a_restart_of_the_producer(tmp_path: Path) -> None:
    seen: list[int] = []
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(4))
        with consuming(producer.address) as stream:
            iterator = iter(stream)
            for _ in range(2):
                item = next(iterator)
                seen.append(item["id"].ordinal)
                stream.trained([item["id"]], step=len(seen))
            producer.restart()
            producer.generate(range(4, 8))
            producer.server.finish()
            for item in iterator:
                seen.append(item["id"].ordinal)
                stream.trained([item["id"]], step=len(seen))
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize(
    ("expect", "both"),
    [
        (Expectation(layer_ids=(2, 5, 8)), ("(2, 5, 8)", "(1, 4, 7)")),
        (Expectation(final="postnorm"), ("'postnorm'", "'none'")),
        (Expectation(model="other"), ("'other'", "'tiny'")),
        (Expectation(hidden_size=5120), ("5120", "64")),
    ],
)
def test_other_layers_model_or_size_are_refused_with_both_values(
    tmp_path: Path, expect: Expectation, both: tuple[str, str]
) -> None:
    with (
        producing(tmp_path / "spool") as producer,
        consuming(producer.address, expect=expect) as stream,
        pytest.raises(StreamRefused) as refused,
    ):
        _ = stream.descriptor
    assert all(value in str(refused.value) for value in both)


def test_consumer_started_first_waits_and_attaches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with producing(tmp_path / "spool") as producer:
        address = producer.address
        producer.generate(range(3))
    with consuming(address) as stream:
        eventually(lambda: "waiting for the producer" in caplog.text, "it says that it waits")
        assert not stream.statistics().client.attached
        with producing(tmp_path / "spool", bind=address) as producer:
            producer.server.finish()
            assert sorted(train(stream)) == [0, 1, 2]


def test_second_consumer_is_refused_until_the_first_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(3))
        producer.server.finish()
        with consuming(producer.address) as first:
            assert first.descriptor == DESCRIPTOR
            with consuming(producer.address) as second:
                eventually(lambda: "is attached" in caplog.text, "it says who is attached")
                assert not second.statistics().client.attached
                first.close()
                assert sorted(train(second)) == [0, 1, 2]


def test_rejected_sample_ends_there_and_is_reported(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer, consuming(producer.address) as stream:
        producer.generate(range(4))
        producer.server.finish()
        for step, item in enumerate(stream):
            if item["id"].ordinal == 2:
                stream.reject(item["id"], "non-finite rows")
            else:
                stream.trained([item["id"]], step=step)
        stream.committed(stream.state_dict())
        assert producer.server.all_terminal.wait(10)
        (tombstone,) = producer.spool.tombstones.values()
        assert (tombstone.id.ordinal, tombstone.reason) == (2, "non-finite rows")


def test_lost_link_is_an_error_after_the_time_allowed(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer, relaying(producer.address) as relay:
        producer.generate([0])
        with consuming(relay.address, lost_after_seconds=0.3) as stream:
            iterator = iter(stream)
            next(iterator)
            relay.cut()
            with pytest.raises(StreamLost):
                next(iterator)


def make_unreadable(path: Path) -> None:
    """As a bad sector would: a directory cannot be read either."""
    (fd,) = (int(link.name) for link in Path("/proc/self/fd").iterdir() if link.resolve() == path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.dup2(directory, fd)
    os.close(directory)


def test_sample_that_the_disk_does_not_give_back_is_made_again(tmp_path: Path) -> None:
    """And does not end the producer, at this start and at each one after."""
    with producing(tmp_path / "spool", segment_bytes=1) as producer:
        producer.generate(range(3))
        make_unreadable(tmp_path / "spool" / "00000001.seg")
        with consuming(producer.address) as stream:
            items = iter(stream)
            seen = [next(items)["id"].ordinal for _ in range(2)]
            again = producer.server.regenerate.get(timeout=20)
            producer.generate(id.ordinal for id in again)
            seen.append(next(items)["id"].ordinal)
    assert sorted(seen) == [0, 1, 2]
    assert [id.ordinal for id in again] == [0]


@PATHS
def test_link_that_is_cut_and_mended_delivers_the_rest(tmp_path: Path, same_host: bool) -> None:
    with producing(tmp_path / "spool") as producer, relaying(producer.address) as relay:
        producer.generate(range(3))
        with consuming(relay.address, same_host=same_host) as stream:
            iterator = iter(stream)
            items = [next(iterator) for _ in range(2)]
            relay.cut()
            producer.generate(range(3, 6))
            producer.server.finish()
            stream.trained([items[0]["id"]], step=1)
            relay.mend()
            rest = list(iterator)
    assert sorted(item["id"].ordinal for item in [*items, *rest]) == list(range(6))


def test_sample_rejected_while_the_link_is_down_is_not_sent_again(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer, relaying(producer.address) as relay:
        producer.generate(range(3))
        with consuming(relay.address) as stream:
            iterator = iter(stream)
            first = next(iterator)
            relay.cut()
            eventually(lambda: not stream.statistics().client.attached, "the cut is noticed")
            stream.reject(first["id"], "seen while the link was down")
            relay.mend()
            producer.generate([3])
            producer.server.finish()
            rest = [item["id"].ordinal for item in iterator]
            assert sorted([first["id"].ordinal, *rest]) == [0, 1, 2, 3]
        assert [t.id for t in producer.spool.tombstones.values()] == [first["id"]]


def test_state_loaded_after_samples_came_is_refused(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer, consuming(producer.address) as stream:
        producer.generate([0])
        next(iter(stream))
        with pytest.raises(StateError, match="before iterating"):
            stream.load_state_dict(stream.state_dict())


def test_closed_stream_does_not_keep_anybody_waiting() -> None:
    with consuming("tcp://127.0.0.1:1") as stream:
        stream.close()
        with pytest.raises(StreamClosed):
            _ = stream.descriptor


def test_orderly_shutdown_is_named_with_its_reason(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer:
        producer.generate([0])
        with consuming(producer.address, lost_after_seconds=0.3) as stream:
            iterator = iter(stream)
            next(iterator)
            producer.server.close("maintenance")
            with pytest.raises(ProducerClosing, match="maintenance"):
                next(iterator)


def test_shutdown_behind_more_than_is_read_at_once_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was found gone, and what lay unread before its end was dropped."""
    monkeypatch.setattr(client, "BYTES_AT_ONCE", 1)
    came, go_on = threading.Event(), threading.Event()

    def observe(_: Sample) -> None:
        came.set()
        assert go_on.wait(20)

    with producing(tmp_path / "spool") as producer:
        producer.generate(range(4))
        link = ClientConfig(addresses=(producer.address,), lost_after_seconds=0.3)
        with (
            closing(HiddenStateStream(StreamConfig(producer=link), observe)) as stream,
            ThreadPoolExecutor(1) as trainer,
        ):
            training = trainer.submit(train, stream)
            assert came.wait(20)
            delivery = producer.server.statistics
            eventually(lambda: delivery().leased == 4 and not delivery().backlog, "all is sent")
            producer.server.close("maintenance")
            go_on.set()
            with pytest.raises(ProducerClosing, match="maintenance"):
                training.result(30)


def test_sample_larger_than_the_buffer_names_the_size_needed(tmp_path: Path) -> None:
    buffer = BufferConfig(capacity_bytes=4096)
    with (
        producing(tmp_path / "spool") as producer,
        consuming(producer.address, buffer=buffer) as stream,
    ):
        producer.generate([0])
        with pytest.raises(BufferTooSmall, match=r"15565"):
            train(stream)


def test_trainer_that_hoards_samples_is_told_instead_of_deadlocking(tmp_path: Path) -> None:
    buffer = BufferConfig(capacity_bytes=40_000, window_samples=1, hoard_seconds=0.1)
    with (
        producing(tmp_path / "spool") as producer,
        consuming(producer.address, buffer=buffer) as stream,
    ):
        producer.generate(range(5))
        with pytest.raises(BufferTooSmall, match="holds 31130 bytes in 2 samples"):
            list(stream)


def test_buffer_never_exceeds_its_bytes(tmp_path: Path) -> None:
    buffer = BufferConfig(capacity_bytes=100_000, window_samples=64, stall_seconds=0.1)
    with (
        producing(tmp_path / "spool") as producer,
        consuming(producer.address, buffer=buffer) as stream,
    ):
        producer.generate(range(60))
        producer.server.finish()
        fills: list[int] = []
        for item in stream:
            fills.append(stream.statistics().buffer.bytes)
            stream.trained([item["id"]], step=len(fills))
    assert len(fills) == 60
    assert 80_000 < max(fills) <= 100_000
