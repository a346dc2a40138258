"""Batches: what a stream's samples become before a trainer sees them.

    collate = Collator(stream.release, mode="pad")
    for step, batch in enumerate(prefetch(collate.batches(stream, 8)), start=1):
        loss = train_on(batch)
        stream.trained(batch["ids"], step, {"loss": loss})

A sample has n rows and n+1 tokens: row k was fed token k, and its label is token k+1. Every trainer
has to shift by one somewhere, and it is done here and nowhere else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate
from typing import Any, Literal, NotRequired, TypedDict, TypeVar, cast

import torch

from draftfeed_consumer.errors import BudgetExceeded
from draftfeed_proto.ids import SampleId

NO_LABEL = -100
"""In padding; what torch's cross_entropy leaves out unless told otherwise."""
NO_DOCUMENT = -1
POLL_SECONDS = 0.2
CAST_ROWS = 16

Item = dict[str, Any]
T = TypeVar("T")


class Batch(TypedDict):
    """B samples: each in a row of its own (padded, [B, T]), or one after the other in a single row
    (packed, [1, N]). Below, [B, T] stands for both. T is the length of the longest sample, N the
    sum of all, or the token budget when there is one."""

    ids: list[SampleId]
    """In the order of the documents; what `trained` wants."""
    lengths: torch.Tensor
    """int64 [B]: rows of each sample."""
    input_ids: torch.Tensor
    """int64 [B, T]: the tokens that were fed; 0 in padding."""
    labels: torch.Tensor
    """int64 [B, T]: the token after each, in the prompt too; NO_LABEL in padding."""
    loss_mask: torch.Tensor
    """bool [B, T]: whether the label is of the response; false in padding."""
    hidden_states: torch.Tensor
    """The collator's dtype, [B, T, L, H]; 0 in padding."""
    final_states: NotRequired[torch.Tensor]
    """Likewise, [B, T, H]; of streams that have them."""
    position_ids: torch.Tensor
    """int64 [B, T]: from 0 in each sample; 0 in padding."""
    document_ids: torch.Tensor
    """int64 [B, T]: which sample, from 0 to B-1; NO_DOCUMENT in padding. Packed, a token may attend
    to those of its own document only."""


class Collator:
    """A list of the stream's samples as one batch. Everything in it is a copy.

    Use it as the `collate_fn` of a DataLoader, or iterate its `batches`.
    """

    def __init__(
        self,
        release: Callable[[Iterable[SampleId]], None] | None = None,
        *,
        mode: Literal["pad", "pack"] = "pad",
        dtype: torch.dtype = torch.bfloat16,
        token_budget: int | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Raises ValueError for a dtype, a mode or a budget that is none.

        release: the stream's `release`, called when a batch's samples are copied, so that their
            room in the buffer is free before the step begins. Without it that is when `trained` is
            called.
        dtype: of the hidden states, bfloat16 or float32. On the wire they may be float16, but
            computing in it overflows.
        token_budget: N of every packed batch; what is left over is padding, and all batches have
            one shape. The samples of a batch must fit, as those of `batches` do.
        pin_memory: build batches in page-locked memory; needs a GPU.
        device: where to copy batches. With `pin_memory` the copy is only asked for, on the current
            stream of the calling thread, and the memory is not used again before it is made.
        """
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype is {dtype}; it must be torch.bfloat16 or torch.float32")
        if mode not in ("pad", "pack"):
            raise ValueError(f'mode is {mode!r}; it must be "pad" or "pack"')
        if token_budget is not None and (mode == "pad" or token_budget < 1):
            raise ValueError(
                f'token_budget is {token_budget}; it must be at least 1, with mode = "pack"'
            )
        self._release = release
        self._packs = mode == "pack"
        self._dtype = dtype
        self._token_budget = token_budget
        self._pin_memory = pin_memory
        self._device = device

    def __call__(self, items: Sequence[Item]) -> Batch:
        """Raises ValueError when there are none, and BudgetExceeded."""
        if not items:
            raise ValueError("there is no sample to make a batch of")
        batch = self._collated(items)
        if self._release is not None:
            self._release(batch["ids"])
        return batch if self._device is None else self._moved(batch, self._device)

    def batches(self, items: Iterable[Item], samples: int | None = None) -> Iterator[Batch]:
        """Batches of so many samples, the last one of what there is. With a token budget: of as
        many as fit, and so many at most; the first that does not fit begins the next batch. Their
        order stays.

        items: a stream, or anything that yields its samples.

        Raises BudgetExceeded for a sample that is longer than the whole budget: cut short it would
        not be trained in full. To do without such samples, `reject` them before they come here.
        """
        if samples is None and self._token_budget is None:
            raise ValueError("a batch without an end: say how many samples, or set token_budget")
        waiting: list[Item] = []
        for item in items:
            if waiting and not self._fits([*waiting, item]):
                yield self(waiting)
                waiting = []
            waiting.append(item)
            if len(waiting) == samples:
                yield self(waiting)
                waiting = []
        if waiting:
            yield self(waiting)

    def _fits(self, items: list[Item]) -> bool:
        return self._token_budget is None or sum(map(rows, items)) <= self._token_budget

    def _collated(self, items: Sequence[Item]) -> Batch:
        lengths = [rows(item) for item in items]
        shape = self._shape(lengths)
        _, layers, hidden = items[0]["hidden_states"].shape
        batch = Batch(
            ids=[item["id"] for item in items],
            lengths=self._new((len(items),), torch.int64),
            input_ids=self._new(shape, torch.int64).zero_(),
            labels=self._new(shape, torch.int64).fill_(NO_LABEL),
            loss_mask=self._new(shape, torch.bool).zero_(),
            hidden_states=self._new((*shape, layers, hidden), self._dtype),
            position_ids=self._new(shape, torch.int64).zero_(),
            document_ids=self._new(shape, torch.int64).fill_(NO_DOCUMENT),
        )
        if "final_states" in items[0]:
            batch["final_states"] = self._new((*shape, hidden), self._dtype)
        batch["lengths"].copy_(torch.tensor(lengths))
        starts = accumulate(lengths, initial=0)
        for document, (item, length, start) in enumerate(zip(items, lengths, starts, strict=False)):
            row, first = (0, start) if self._packs else (document, 0)
            place = (row, slice(first, first + length))
            batch["input_ids"][place] = item["input_ids"][:-1]
            batch["labels"][place] = item["input_ids"][1:]
            batch["loss_mask"][place] = item["loss_mask"][1:].bool()
            _cast(item["hidden_states"], into=batch["hidden_states"][place])
            if "final_states" in batch:
                _cast(item["final_states"], into=batch["final_states"][place])
            batch["position_ids"][place] = torch.arange(length)
            batch["document_ids"][place] = document
        # Only there: filling all of it first would write most of a large tensor twice.
        padding = batch["document_ids"] == NO_DOCUMENT
        batch["hidden_states"][padding] = 0
        if "final_states" in batch:
            batch["final_states"][padding] = 0
        return batch

    def _shape(self, lengths: list[int]) -> tuple[int, int]:
        if not self._packs:
            return len(lengths), max(lengths)
        if self._token_budget is None:
            return 1, sum(lengths)
        if sum(lengths) > self._token_budget:
            raise BudgetExceeded(sum(lengths), len(lengths), self._token_budget)
        return 1, self._token_budget

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin_memory)

    def _moved(self, batch: Batch, device: torch.device | str) -> Batch:
        def moved(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(device, non_blocking=self._pin_memory)
            return value

        return cast(Batch, {name: moved(value) for name, value in batch.items()})


def _cast(states: torch.Tensor, into: torch.Tensor) -> None:
    """Both [n, L, H], or [n, H]. torch converts float16 to bfloat16 value by value; to float32 and
    on from there it has vectors, and the way round is the faster one while float32 stays in the
    cache."""
    if (states.dtype, into.dtype) != (torch.float16, torch.bfloat16):
        into.copy_(states)
        return
    for part, target in zip(
        torch.split(states, CAST_ROWS), torch.split(into, CAST_ROWS), strict=True
    ):
        target.copy_(part.float())


def rows(item: Item) -> int:
    """n of a sample."""
    return len(item["hidden_states"])


def prefetch(batches: Iterable[T], idle: Callable[[], object] | None = None) -> Iterator[T]:
    """The same, each made in another thread while the trainer is at work on the one before.

    The thread ends with `batches`. When a loop breaks off before, close the stream.

    idle: called in the calling thread, again and again, while it waits. A producer whose disk is
        full waits for a checkpoint, and this is where to make it when `checkpoint_wanted` says so:
        what `on_idle_checkpoint` is given is called in the other thread, in the middle of a step.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="draftfeed-prefetch")
    try:
        source = iter(batches)
        coming = thread.submit(next, source, None)
        while True:
            while not wait([coming], POLL_SECONDS).done:
                if idle is not None:
                    idle()
            if (batch := coming.result()) is None:
                return
            coming = thread.submit(next, source, None)
            yield batch
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
