"""What a batch holds, and that nothing of it belongs to the buffer any more."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy

from draftfeed_consumer.buffer import Buffer, BufferConfig, size_of
from draftfeed_consumer.collate import NO_DOCUMENT, NO_LABEL, Batch, Collator, prefetch
from draftfeed_consumer.errors import BudgetExceeded
from draftfeed_consumer.stream import to_item
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample
from samples import DESCRIPTOR, HIDDEN, LAYERS, sample

ROWS = (5, 3, 7)
SAMPLES = [sample(ordinal, rows) for ordinal, rows in enumerate(ROWS)]
Item = dict[str, Any]


WITH_FINAL = msgspec.structs.replace(DESCRIPTOR, layer_ids=(1, 4), final="postnorm")
"""The same samples as of a stream whose third layer is the final state."""


def items(rows: Iterable[int] = ROWS, stream: Descriptor = DESCRIPTOR) -> list[Item]:
    return [to_item(sample(ordinal, count), stream) for ordinal, count in enumerate(rows)]


def documents(batch: Batch) -> Iterator[dict[str, torch.Tensor]]:
    """Each sample's part of the batch, found by its document id."""
    names = ("input_ids", "labels", "loss_mask", "hidden_states", "position_ids")
    for document in range(len(batch["ids"])):
        there = batch["document_ids"] == document
        yield {name: batch[name][there] for name in names}


def lengths_of(batches: Iterable[Batch]) -> list[list[int]]:
    return [batch["lengths"].tolist() for batch in batches]


@pytest.mark.parametrize(
    "collate",
    [
        Collator(dtype=torch.float32),
        Collator(mode="pack", dtype=torch.float32),
        Collator(mode="pack", dtype=torch.float32, token_budget=40),
    ],
    ids=["padded", "packed", "packed to a budget"],
)
def test_label_of_a_row_is_the_token_after_the_one_it_was_fed(collate: Collator) -> None:
    """Off by one: ids are n+1 and rows n, and the last token of a sample is a label only."""
    batch = collate(items())
    assert batch["ids"] == [made.id for made in SAMPLES]
    assert batch["lengths"].tolist() == list(ROWS)
    for made, part in zip(SAMPLES, documents(batch), strict=True):
        assert part["input_ids"].tolist() == made.input_ids[:-1].tolist()
        assert part["labels"].tolist() == made.input_ids[1:].tolist()
        assert part["loss_mask"].tolist() == made.loss_mask[1:].astype(bool).tolist()
        assert part["position_ids"].tolist() == list(range(len(made.hidden_states)))
        assert torch.equal(part["hidden_states"], torch.tensor(made.hidden_states).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"mode": "pack"}, {"mode": "pack", "token_budget": 40}])
def test_the_final_state_is_batched_as_the_layers_are(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of another row, or of a tapped layer, it has the same shape."""
    batch = Collator(dtype=dtype, **options)(items(stream=WITH_FINAL))
    shape = batch["input_ids"].shape
    assert batch["hidden_states"].shape == (*shape, LAYERS - 1, HIDDEN)
    assert "final_states" in batch
    assert batch["final_states"].shape == (*shape, HIDDEN)
    for document, made in enumerate(SAMPLES):
        there, states = batch["document_ids"] == document, torch.tensor(made.hidden_states)
        assert torch.equal(batch["hidden_states"][there], states[:, :-1].to(dtype))
        assert torch.equal(batch["final_states"][there], states[:, -1].to(dtype))
    assert not batch["final_states"][batch["document_ids"] == NO_DOCUMENT].any()


def test_a_stream_without_a_final_state_has_no_key_for_it() -> None:
    assert "final_states" not in items()[0]
    assert "final_states" not in Collator()(items())


def test_layers_and_final_state_of_a_sample_are_views_of_one_array() -> None:
    """Samples are gigabytes: another trainer's layer must not cost a copy."""
    made = sample(0, 6)
    item = to_item(made, WITH_FINAL)
    made.hidden_states[4, 2, 7] = 99
    made.hidden_states[4, 1, 7] = 77
    assert (item["final_states"][4, 7], item["hidden_states"][4, 1, 7]) == (99, 77)


def test_padded_batch_has_a_row_for_each_sample_and_nothing_behind_it() -> None:
    batch = Collator()(items())
    assert batch["hidden_states"].shape == (3, 7, LAYERS, HIDDEN)
    assert batch["document_ids"].tolist() == [
        [0, 0, 0, 0, 0, NO_DOCUMENT, NO_DOCUMENT],
        [1, 1, 1, *[NO_DOCUMENT] * 4],
        [2] * 7,
    ]
    padding_is_empty(batch)


def test_packed_batch_is_one_row_and_positions_begin_again() -> None:
    batch = Collator(mode="pack")(items())
    assert batch["hidden_states"].shape == (1, 15, LAYERS, HIDDEN)
    assert batch["document_ids"].tolist() == [[0] * 5 + [1] * 3 + [2] * 7]
    assert batch["position_ids"].tolist() == [[*range(5), *range(3), *range(7)]]


def test_packed_batch_with_a_budget_has_the_same_shape_whatever_comes() -> None:
    collate = Collator(mode="pack", token_budget=16)
    for rows in (ROWS, (1,), (16,)):
        batch = collate(items(rows))
        assert batch["hidden_states"].shape == (1, 16, LAYERS, HIDDEN)
        assert int((batch["document_ids"] != NO_DOCUMENT).sum()) == sum(rows)
        padding_is_empty(batch)


def padding_is_empty(batch: Batch) -> None:
    padding = batch["document_ids"] == NO_DOCUMENT
    assert (batch["labels"][padding] == NO_LABEL).all()
    for name in ("input_ids", "loss_mask", "position_ids", "hidden_states"):
        assert not batch[name][padding].any(), name


def test_loss_of_a_padded_and_of_a_packed_batch_is_that_of_the_samples() -> None:
    probe = torch.nn.Linear(LAYERS * HIDDEN, 512)

    def loss(batch: Batch) -> float:
        logits = probe(batch["hidden_states"].flatten(2))
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()

    padded = loss(Collator(dtype=torch.float32)(items()))
    packed = loss(Collator(mode="pack", dtype=torch.float32, token_budget=32)(items()))
    one_by_one = [loss(Collator(dtype=torch.float32)([item])) for item in items()]
    mean = sum(each * rows for each, rows in zip(one_by_one, ROWS, strict=True)) / sum(ROWS)
    assert padded == pytest.approx(mean)
    assert packed == pytest.approx(mean)


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_cast_as_they_arrive(wire: torch.dtype, dtype: torch.dtype) -> None:
    """fp16 in the drafter's own computation overflows: 300 squared is too much for it already."""
    states = (300 * torch.randn(40, LAYERS, HIDDEN)).to(wire)
    item = {**items([40])[0], "hidden_states": states}
    arrived = Collator(dtype=dtype)([item])["hidden_states"]
    assert arrived.dtype == dtype
    assert torch.equal(arrived[0], states.to(dtype))
    assert not torch.isfinite(states * states).all() or wire == torch.bfloat16
    assert torch.isfinite(arrived * arrived).all()


def test_dtype_that_overflows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float16; it must be torch\.bfloat16"):
        Collator(dtype=torch.float16)


def test_budget_that_nobody_keeps_to_is_refused() -> None:
    with pytest.raises(ValueError, match='mode = "pack"'):
        Collator(token_budget=8)
    with pytest.raises(ValueError, match="token_budget is 0"):
        Collator(mode="pack", token_budget=0)
    with pytest.raises(ValueError, match="say how many samples"):
        next(Collator().batches(items()))
    with pytest.raises(ValueError, match="no sample"):
        Collator()([])


def test_sample_that_does_not_fit_begins_the_next_batch() -> None:
    collate = Collator(mode="pack", token_budget=10)
    rows = (4, 5, 2, 8, 3, 7, 10, 1)
    batches = list(collate.batches(items(rows)))
    assert lengths_of(batches) == [[4, 5], [2, 8], [3, 7], [10], [1]]
    assert [id.ordinal for batch in batches for id in batch["ids"]] == list(range(len(rows)))


def test_batches_of_so_many_samples_end_with_what_there_is() -> None:
    assert lengths_of(Collator().batches(items((2, 3, 4)), samples=2)) == [[2, 3], [4]]
    budget = Collator(mode="pack", token_budget=8)
    assert lengths_of(budget.batches(items((1, 1, 1, 8)), samples=2)) == [[1, 1], [1], [8]]


def test_sample_longer_than_the_budget_is_an_error_and_not_cut() -> None:
    """Cut, it would be acknowledged as trained and was not."""
    released: list[SampleId] = []
    collate = Collator(released.extend, mode="pack", token_budget=6)
    with pytest.raises(BudgetExceeded, match="7 rows in 1 sample do not fit") as raised:
        list(collate.batches(items()))
    assert (raised.value.rows, raised.value.token_budget) == (7, 6)
    assert released == [SAMPLES[0].id, SAMPLES[1].id]
    with pytest.raises(BudgetExceeded, match="15 rows in 3 samples"):
        collate(items())


@pytest.mark.parametrize("mode", ["pad", "pack"])
def test_room_that_is_used_again_after_release_does_not_change_a_batch(mode: Any) -> None:
    """The buffer gave a sample's memory to the next one while the collator still had a view."""
    made = [sample(ordinal, 6) for ordinal in range(8)]
    room = Buffer(BufferConfig(capacity_bytes=2 * size_of(made[0]), window_samples=1))
    lent: dict[SampleId, Sample] = {}

    def release(ids: Iterable[SampleId]) -> None:
        for id in ids:
            overwrite(lent.pop(id))
            assert room.release(id)

    collate = Collator(release, mode=mode)
    for first in range(0, len(made), 2):
        for arrived in made[first : first + 2]:
            assert room.reserve(size_of(arrived))  # the room of the batch before
            room.put(arrived)
            taken = room.take()
            assert taken is not None
            lent[taken.id] = taken
        batch = collate([to_item(one, DESCRIPTOR) for one in lent.values()])
        for ordinal, part in enumerate(documents(batch), start=first):
            as_sent = to_item(sample(ordinal, 6), DESCRIPTOR)
            assert torch.equal(part["hidden_states"], as_sent["hidden_states"].bfloat16())
            assert torch.equal(part["labels"], as_sent["input_ids"][1:].long())
            assert torch.equal(part["loss_mask"], as_sent["loss_mask"][1:].bool())
    assert room.statistics().bytes == 0


def overwrite(freed: Sample) -> None:
    """As the next sample would, in a buffer that keeps its memory."""
    for array in (freed.input_ids, freed.loss_mask, freed.hidden_states):
        array[:] = 1


def test_states_that_need_no_cast_are_copied_all_the_same() -> None:
    """`.to(dtype)` is no copy when the dtype is right already."""
    states = torch.zeros((2, LAYERS, HIDDEN), dtype=torch.bfloat16)
    batch = Collator()([{**items([2])[0], "hidden_states": states}])
    states.fill_(1)
    assert not batch["hidden_states"].any()


def test_batch_on_a_device_keeps_its_ids() -> None:
    """The meta device stands for a GPU, of which there may be none."""
    batch = Collator(device="meta")(items())
    assert batch["ids"] == [made.id for made in SAMPLES]
    assert batch["hidden_states"].device == batch["labels"].device == torch.device("meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batch_that_a_gpu_gets_asynchronously_is_the_batch() -> None:
    on_gpu = Collator(pin_memory=True, device="cuda")
    for _ in range(20):
        for name, value in on_gpu(items()).items():
            if isinstance(value, torch.Tensor):
                assert value.is_cuda
                assert torch.equal(value.cpu(), Collator()(items())[name])  # type: ignore[literal-required]


# Made in another thread


def test_next_batch_is_made_while_the_trainer_is_at_work() -> None:
    made = [threading.Event() for _ in range(3)]

    def batches() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    seen = []
    for number in prefetch(batches()):
        if number + 1 < len(made):
            assert made[number + 1].wait(20), "the next one waits for the trainer"
        seen.append(number)
    assert seen == [0, 1, 2]


def test_error_of_the_stream_comes_out_where_batches_are_taken() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise BudgetExceeded(2, 1, 1)

    taken = prefetch(broken())
    assert next(taken) == 1
    with pytest.raises(BudgetExceeded):
        next(taken)


def test_trainer_that_waits_can_make_the_checkpoint_that_the_producer_waits_for() -> None:
    """In its own thread: the other one could save in the middle of a step."""
    saved = threading.Event()
    callers: set[int] = set()

    def full_disk() -> Iterator[int]:
        assert saved.wait(20), "nobody makes a checkpoint"
        yield 1

    def idle() -> None:
        callers.add(threading.get_ident())
        saved.set()

    assert list(prefetch(full_disk(), idle)) == [1]
    assert callers == {threading.get_ident()}


def test_loop_that_breaks_off_leaves_no_thread_behind() -> None:
    closed = threading.Event()

    def endless() -> Iterator[int]:
        yield 1
        closed.wait(20)

    taken = prefetch(endless())
    next(taken)
    (thread,) = [one for one in threading.enumerate() if "prefetch" in one.name]
    taken.close()  # type: ignore[attr-defined]
    closed.set()
    thread.join(20)
    assert not thread.is_alive()
