"""`HiddenStateStream`: what a trainer imports."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch

from draftfeed_consumer.buffer import Buffer, BufferConfig, BufferStatistics
from draftfeed_consumer.client import Client, ClientConfig, ClientStatistics
from draftfeed_consumer.errors import StateError
from draftfeed_consumer.ledger import Ledger, parse
from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

Item = dict[str, Any]


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    producer: ClientConfig = ClientConfig()
    expect: Expectation = Expectation()
    """What the stream must be; the producer refuses a consumer that expects something else."""
    buffer: BufferConfig = BufferConfig()


class StreamStatistics(NamedTuple):
    client: ClientStatistics
    buffer: BufferStatistics
    held: int
    trained: int
    rejected: int
    step: int
    metrics: dict[str, float]
    """Of the last acknowledged step."""


class HiddenStateStream(torch.utils.data.IterableDataset[Item]):
    """Samples of a producer, each trained exactly once.

    The order of calls: make it, `load_state_dict` when resuming, iterate; `release` a sample when
    its tensors are copied, `trained` when an optimizer step has used it, `state_dict` into the
    checkpoint at a step boundary, `committed` when that checkpoint is durable, `close`.

    Iterating yields dicts of

        id             SampleId
        key            str
        input_ids      int32[n+1]     the last one has no row: it was sampled, never fed
        loss_mask      uint8[n+1]     1 on the response
        hidden_states  fp16 or bf16 [n, L, H]
        counters       L LayerCounters
        finish_reason  str

    and ends when the producer has nothing more. Every other end is an error: StreamLost,
    ProducerClosing, StreamRefused, StreamClosed.
    """

    def __init__(
        self, config: StreamConfig, observe: Callable[[Sample], None] | None = None
    ) -> None:
        """Begins to attach and returns at once.

        observe: called in another thread with every sample that arrives.
        """
        self._buffer = Buffer(config.buffer)
        self._ledger = Ledger()
        self._client = Client(config.producer, config.expect, self._buffer, self._ledger, observe)
        self._iterated = False
        self._rejected = 0
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._on_step: Callable[[int, list[SampleId], dict[str, float]], None] | None = None
        self._client.start()

    @property
    def descriptor(self) -> Descriptor:
        """What the stream carries. Waits for the producer; raises StreamRefused."""
        while not self._client.granted.wait(0.5):
            pass
        if self._client.failure is not None:
            raise self._client.failure
        assert self._client.descriptor is not None
        return self._client.descriptor

    def __iter__(self) -> Iterator[Item]:
        dtype = torch.float16 if self.descriptor.dtype == "fp16" else torch.bfloat16
        self._iterated = True
        self._client.open()
        while (sample := self._buffer.take()) is not None:
            yield to_item(sample, dtype)

    def release(self, ids: Iterable[SampleId]) -> None:
        """The tensors are copied or no longer needed: their room may be used again."""
        for id in ids:
            self._buffer.release(id)
        self._client.wake()

    def trained(
        self, ids: Iterable[SampleId], step: int, metrics: dict[str, float] | None = None
    ) -> None:
        """A completed optimizer step used all of each of these samples.

        Raises ValueError for an id that is not held by this consumer.
        """
        done = list(ids)
        self._ledger.train(done)
        self._step, self._metrics = step, metrics or {}
        self.release(done)
        if self._on_step is not None:
            self._on_step(step, done, self._metrics)

    def on_step(self, callback: Callable[[int, list[SampleId], dict[str, float]], None]) -> None:
        """Call this with (step, ids, metrics) after every acknowledged step: order over a live
        stream cannot be reproduced from a seed, so it is recorded."""
        self._on_step = callback

    def reject(self, id: SampleId, reason: str) -> None:
        """This sample is not to be trained, now or ever; the producer reports it."""
        logger.warning("rejected sample %s: %s", id, reason)
        self._rejected += 1
        self._client.reject(id, reason)
        self.release([id])

    @property
    def checkpoint_wanted(self) -> bool:
        """The producer's disk fills up; a checkpoint at the next step boundary frees some of it.

        A trainer that only saves at the end may ignore it, if the spool's quota holds everything.
        """
        return self._client.checkpoint_wanted.is_set()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint made now must hold. Plain values; take it at a step boundary."""
        self._client.checkpoint_wanted.clear()
        return self._ledger.state(self.descriptor.stream_id())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, before iterating.

        Raises StateError when it is no state of ours, or of another stream, or too late.
        """
        if self._iterated:
            raise StateError("load_state_dict comes before iterating: samples have come already")
        stream_id = self.descriptor.stream_id()
        loaded = parse(state)
        if loaded.stream_id != stream_id:
            raise StateError(
                f"the checkpoint belongs to stream {loaded.stream_id}, the producer serves "
                f"{stream_id}: other model, layers or tokenizer"
            )
        self._ledger.load(state)

    def committed(self, state: dict[str, Any]) -> None:
        """The checkpoint that holds `state` is durable. Returns at once."""
        durable = parse(state)
        self._ledger.committed(durable)
        self._client.commit(durable)

    def wait_committed(self, timeout_seconds: float = 30.0) -> bool:
        """Whether the producer has stored the last commit, now or within the time."""
        return self._client.wait_acknowledged(timeout_seconds)

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(
            self._client.statistics(),
            self._buffer.statistics(),
            self._ledger.held_count,
            self._ledger.trained_count,
            self._rejected,
            self._step,
            self._metrics,
        )

    def close(self) -> None:
        """Leave: what is held goes back to the producer's queue."""
        self._client.close()


def to_item(sample: Sample, dtype: torch.dtype = torch.float16) -> Item:
    """The dict that iterating yields. dtype: of the wire."""
    return {
        "id": sample.id,
        "key": sample.key,
        "input_ids": torch.from_numpy(sample.input_ids),
        "loss_mask": torch.from_numpy(sample.loss_mask.copy()),
        "hidden_states": torch.from_numpy(sample.hidden_states).view(dtype),
        "counters": sample.counters,
        "finish_reason": sample.finish_reason,
    }
