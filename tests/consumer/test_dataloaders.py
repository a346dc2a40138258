"""The stream inside torch's DataLoader and torchdata's StatefulDataLoader, and one batch ahead."""

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.collate import Collator, prefetch
from draftfeed_consumer.errors import InWorkerProcess
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from draftfeed_proto.ids import SampleId
from harness import Producer, consuming, producing
from samples import sample
from waiting import eventually

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

SAMPLES = 14
LOADERS = [DataLoader, StatefulDataLoader]
Attach = Callable[[], HiddenStateStream]


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[Producer]:
    with producing(tmp_path / "spool") as made:
        made.generate(range(SAMPLES))
        made.server.finish()
        yield made


@pytest.fixture
def attach(producer: Producer) -> Iterator[Attach]:
    with ExitStack() as streams:
        yield lambda: streams.enter_context(consuming(producer.address))


def ordinals(batch: Any) -> list[int]:
    return [id.ordinal for id in batch["ids"]]


@pytest.mark.parametrize("loader", LOADERS)
def test_loader_without_batches_gives_the_samples_as_they_are(attach: Attach, loader: Any) -> None:
    stream = attach()
    seen = []
    for step, item in enumerate(loader(stream, batch_size=None), start=1):
        made = sample(item["id"].ordinal)
        assert item["hidden_states"].dtype == torch.float16
        assert torch.equal(item["hidden_states"], torch.from_numpy(made.hidden_states))
        stream.trained([item["id"]], step)
        seen.append(item["id"].ordinal)
    assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.parametrize("loader", LOADERS)
def test_loader_with_a_collator_gives_batches_and_a_short_last_one(
    attach: Attach, loader: Any
) -> None:
    stream = attach()
    batches = []
    for step, batch in enumerate(
        loader(stream, batch_size=4, collate_fn=Collator(stream.release)), start=1
    ):
        assert stream.statistics().buffer.held_bytes == 0  # released, and still to be trained
        stream.trained(batch["ids"], step)
        batches.append(ordinals(batch))
    assert [len(batch) for batch in batches] == [4, 4, 4, 2]
    assert sorted(chain.from_iterable(batches)) == list(range(SAMPLES))


@pytest.mark.parametrize("loader", LOADERS)
def test_forked_workers_are_refused_in_one_line(attach: Attach, loader: Any) -> None:
    """There a stream has no thread that receives: the trainer would wait for ever."""
    loading = loader(attach(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(InWorkerProcess) as refused:
        next(iter(loading))
    assert "num_workers=0" in str(refused.value)
    assert "\n" not in str(refused.value)
    for worker in multiprocessing.active_children():
        worker.terminate()  # torch would wait for it first, for five seconds


@pytest.mark.parametrize("loader", LOADERS)
def test_spawned_workers_are_refused_before_they_start(attach: Attach, loader: Any) -> None:
    loading = loader(attach(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(InWorkerProcess):
        iter(loading)


def test_stream_is_not_copied_into_another_process(attach: Attach) -> None:
    with pytest.raises(InWorkerProcess):
        pickle.dumps(attach())


def stateful(stream: HiddenStateStream, batch_size: int | None) -> "StatefulDataLoader[Any]":
    collate = None if batch_size is None else Collator(stream.release)
    return StatefulDataLoader(stream, batch_size=batch_size, collate_fn=collate)


def train(stream: HiddenStateStream, batches: Iterable[Any], steps: int) -> list[int]:
    """So many steps at most; the ordinals that they used."""
    seen: list[int] = []
    for step, batch in enumerate(batches, start=1):
        ids = batch.get("ids") or [batch["id"]]
        stream.trained(ids, step)
        seen += [id.ordinal for id in ids]
        if step == steps:
            break
    return seen


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("steps", [0, 1, 3, 100])
def test_state_of_the_loader_is_what_was_trained_and_not_what_was_taken(
    attach: Attach, batch_size: int | None, steps: int
) -> None:
    """A loader's own count of what it yielded would skip what was taken and never trained."""
    first = attach()
    loader = stateful(first, batch_size)
    before = train(first, loader, steps) if steps else []
    state = loader.state_dict()
    if steps < 100:
        next(iter(loader))  # taken, and lost with this process
    first.close()
    second = attach()
    loader = stateful(second, batch_size)
    loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    after = train(second, loader, 100)
    assert sorted(before + after) == list(range(SAMPLES))
    second.committed(second.state_dict())
    assert second.wait_committed(20)


def test_state_of_the_loader_holds_the_one_to_commit(producer: Producer, attach: Attach) -> None:
    stream = attach()
    loader = stateful(stream, 4)
    train(stream, loader, 100)
    stream.committed(loader.state_dict()["dataset_state"])
    assert producer.server.all_terminal.wait(20)


class Drained(HiddenStateStream):
    """Told to end while a loader fills its second batch of four."""

    def __iter__(self) -> Iterator[Any]:
        for count, item in enumerate(super().__iter__(), start=1):
            if count == 6:
                self.drain()
            yield item


def test_after_a_drain_the_state_belongs_to_the_stream_and_not_to_the_loader(
    producer: Producer, attach: Attach
) -> None:
    """A StatefulDataLoader writes down that its last batch was short, and when it loads that, ends
    before it begins: the run would stop with most samples untrained."""
    config = StreamConfig(producer=ClientConfig(addresses=(producer.address,)))
    first = Drained(config)
    loader = stateful(first, 4)
    before = train(first, loader, 2)
    state = loader.state_dict()
    first.close()
    assert len(before) == 6

    second = attach()
    loader = stateful(second, 4)
    loader.load_state_dict(state)
    assert train(second, loader, 100) == []
    second.close()

    third = attach()
    third.load_state_dict(state["dataset_state"])
    after = train(third, stateful(third, 4), 100)
    assert sorted(before + after) == list(range(SAMPLES))


@pytest.mark.parametrize("loader", [None, *LOADERS])
def test_prefetched_batch_is_in_no_checkpoint_and_comes_again(attach: Attach, loader: Any) -> None:
    collated: list[SampleId] = []

    def batches(stream: HiddenStateStream) -> Iterator[Any]:
        def release(ids: Iterable[SampleId]) -> None:
            stream.release(ids)
            collated.extend(ids)

        if loader is None:
            return prefetch(Collator(release).batches(stream, 4))
        return prefetch(loader(stream, batch_size=4, collate_fn=Collator(release)))

    first = attach()
    taken = batches(first)
    before = next(taken)
    first.trained(before["ids"], step=1)
    eventually(lambda: len(collated) == 8, "the next batch is made")
    state = first.state_dict()
    first.close()
    second = attach()
    second.load_state_dict(state)
    assert sorted(ordinals(before) + train(second, batches(second), 100)) == list(range(SAMPLES))


def test_batch_that_was_prefetched_before_a_drain_is_still_to_be_trained(attach: Attach) -> None:
    first = attach()
    before: list[int] = []
    for step, batch in enumerate(prefetch(Collator(first.release).batches(first, 2)), start=1):
        first.drain()
        first.trained(batch["ids"], step)
        before += ordinals(batch)
    assert len(before) in (2, 3, 4)
    state = first.state_dict()
    first.close()
    second = attach()
    second.load_state_dict(state)
    after = train(second, Collator(second.release).batches(second, 4), 100)
    assert sorted(before + after) == list(range(SAMPLES))
