"""A stream without a network: a list of samples with the ledger of a real one."""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from draftfeed_consumer.trainers.specforge_checkpoints import saved_checkpoints
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import LayerCounters

DATASET = "0123456789abcdef"
CLEAN = LayerCounters(saturated=0, nonfinite=0, inexact=0, zero_rows=0)
Item = dict[str, Any]


def sample_id(ordinal: int, epoch: int = 0) -> SampleId:
    return SampleId(DATASET, epoch, 0, ordinal)


def descriptor(layer_ids: tuple[int, ...], layers: int, hidden: int, vocab: int) -> Descriptor:
    return Descriptor(
        model="test",
        revision="0",
        tokenizer_hash="0",
        chat_template_hash="0",
        layer_ids=layer_ids,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
    )


def make_item(
    id: SampleId,
    input_ids: torch.Tensor,
    prompt_tokens: int,
    hidden_states: torch.Tensor,
    final_states: torch.Tensor | None = None,
) -> Item:
    """input_ids [n+1], hidden_states [n, L, H], final_states [n, H] of streams that have them; what
    follows the prompt is the response."""
    mask = (torch.arange(len(input_ids)) >= prompt_tokens).to(torch.uint8)
    final = {} if final_states is None else {"final_states": final_states.to(torch.float16)}
    return {
        "id": id,
        "key": str(id.ordinal),
        "input_ids": input_ids.to(torch.int32),
        "loss_mask": mask,
        "hidden_states": hidden_states.to(torch.float16),
        **final,
        "counters": (CLEAN,) * (hidden_states.shape[1] + len(final)),
        "finish_reason": "length",
    }


class MemoryStream:
    """Delivers what is not trained; knows what is held, trained, rejected, tail, committed.

    fail: raised after the last sample, instead of the normal end.
    on_commit: called with the state that is said to be durable.
    term: of every state made here.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        items: Iterable[Item],
        fail: Exception | None = None,
        on_commit: Callable[[dict[str, Any]], None] | None = None,
        term: int = 1,
    ) -> None:
        self.descriptor = descriptor
        self.draining = False
        self._items = list(items)
        self._fail = fail
        self._on_commit = on_commit
        self._term = term
        self._number = 0
        self._trained: set[str] = set()
        self.held: set[SampleId] = set()
        self.steps: list[list[SampleId]] = []
        self.metrics: list[dict[str, float]] = []
        self.rejected: dict[SampleId, str] = {}
        self.tails: list[SampleId] = []
        self.released: list[SampleId] = []
        self.committed_numbers: list[int] = []
        self.most_held = 0
        self.checkpoint_samples = 0
        self.checkpoint_wanted = False

    def __iter__(self) -> Iterator[Item]:
        for item in self._items:
            if str(item["id"]) in self._trained:
                continue
            if self.draining:
                return
            self.held.add(item["id"])
            self.most_held = max(self.most_held, len(self.held))
            yield item
        if self._fail is not None:
            raise self._fail

    def drain(self) -> None:
        self.draining = True

    def release(self, ids: Iterable[SampleId]) -> None:
        self.released.extend(ids)

    def trained(
        self, ids: Iterable[SampleId], step: int, metrics: dict[str, float] | None = None
    ) -> None:
        done = list(ids)
        if not self.held.issuperset(done):
            raise ValueError(f"not held: {done}")
        self.held.difference_update(done)
        self._trained.update(map(str, done))
        self.steps.append(done)
        self.metrics.append(metrics or {})

    def reject(self, id: SampleId, reason: str) -> None:
        self.held.discard(id)
        self.rejected[id] = reason

    def tail(self, ids: Iterable[SampleId]) -> None:
        done = list(ids)
        assert self.held.issuperset(done)
        self.held.difference_update(done)
        self.tails += done

    def on_idle_checkpoint(self, save: Callable[[], object]) -> None:
        """Not used by a trainer whose iterating thread is not its training thread."""

    def checkpoint_every(self, samples: int) -> None:
        self.checkpoint_samples = samples

    def state_dict(self) -> dict[str, Any]:
        self.checkpoint_wanted = False
        self._number += 1
        return {"term": self._term, "number": self._number, "trained": sorted(self._trained)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained = set(state["trained"])
        self._number = max(self._number, state["number"])

    def committed(self, state: dict[str, Any]) -> None:
        self.committed_numbers.append(state["number"])
        if self._on_commit is not None:
            self._on_commit(state)

    @property
    def trained_ids(self) -> list[SampleId]:
        """In the order of their steps; each as often as it was trained."""
        return [id for step in self.steps for id in step]


class FullSpool(MemoryStream):
    """Of a producer whose spool holds a few samples: it gives the next ones when so many
    checkpoints were committed."""

    def __init__(
        self, descriptor: Descriptor, items: Iterable[Item], holds: int, checkpoints: int
    ) -> None:
        super().__init__(descriptor, items)
        self._holds, self._checkpoints = holds, checkpoints
        self._missing = 0
        self._freed = threading.Event()

    def __iter__(self) -> Iterator[Item]:
        for count, item in enumerate(super().__iter__()):
            if count and count % self._holds == 0:
                self._wait_for_space()
            yield item

    def committed(self, state: dict[str, Any]) -> None:
        super().committed(state)
        self._missing -= 1
        if self._missing == 0:
            self._freed.set()
        elif self._missing > 0:
            self.checkpoint_wanted = True

    def _wait_for_space(self) -> None:
        self._freed.clear()
        self._missing = self._checkpoints
        self.checkpoint_wanted = True
        assert self._freed.wait(60), "no checkpoint is made while the trainer waits"


def checkpoints(output_dir: Path) -> list[str]:
    """From the oldest to the newest."""
    return [saved.path.name for saved in saved_checkpoints(output_dir)]
