"""draftfeed's consumer in transport.py: the stream that a trainer imports, and a trainer that does
nothing but look whether all is there."""

from typing import Any

import torch
import torch.distributed as dist

from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.ranks import Ranks
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from transport_check import Check
from transport_orders import LOOPBACK, Order, Talk
from transport_states import StateSet

STALL_SECONDS = 0.05
SMALL_PARTS = 1.01
"""Of a sample are tokens and mask, a row's of which are next to nothing."""


def receive(order: Order, states: StateSet, check: Check, talk: Talk) -> None:
    """First what is made meanwhile; then, in a term of its own, what fills the spools before the
    first of it is taken."""
    torch.set_num_threads(1)
    stream = _stream(order, states)
    assert stream.descriptor
    talk.tell("attached")
    trainer = _Trainer(order, stream, check)
    trainer.take(order.producers * order.samples)
    check.done()
    state = trainer.commit()
    stream.wait_committed()
    stream.close()
    stream = _stream(order, states)
    stream.load_state_dict(state)
    talk.tell("attached")
    talk.wait("stored")
    trainer = _Trainer(order, stream, check)
    trainer.take(order.producers * order.edge)
    talk.tell("warm")
    talk.wait("count")
    check.begin(warm=0)
    trainer.take(order.producers * (order.stored - order.edge))
    check.done()
    trainer.take(order.producers * order.stored)
    talk.tell("over", samples=trainer.own)
    stream.close()


class _Trainer:
    """One sample is a step. All ranks take it together, with or without one, and commit together,
    as in data-parallel training."""

    def __init__(self, order: Order, stream: HiddenStateStream, check: Check) -> None:
        self._order, self._stream, self._check = order, stream, check
        self.own = 0
        """Samples that this rank has had."""
        self._all, self._steps = 0, 0

    def take(self, samples: int) -> None:
        """Until all ranks together have had so many since it began."""
        while self._all < samples:
            own = self._take_one()
            self.own += own
            if came := self._of_all(own):
                self._all += came
                self._steps += 1
                if self._steps % self._order.commit_steps == 0:
                    self.commit()

    def commit(self) -> dict[str, Any]:
        """As if a checkpoint had been written."""
        state = self._stream.state_dict()
        self._stream.committed(state)
        return state

    def _take_one(self) -> int:
        """How many there were. Nothing of it is kept."""
        items = self._stream.batch(1)
        for item in items:
            producer, n = divmod(item["id"].ordinal, self._order.all_samples)
            states = item["hidden_states"]
            self._check.sample(producer, n, [states.view(torch.uint8).numpy().reshape(-1).data])
            self._stream.trained([item["id"]], self._steps)
            if not self.own:
                _check_path(self._order, self._stream)
        return len(items)

    def _of_all(self, own: int) -> int:
        if self._order.consumers == 1:
            return own
        count = torch.tensor([own])
        dist.all_reduce(count)
        return int(count)


def _check_path(order: Order, stream: HiddenStateStream) -> None:
    """A line of the table must not be about the other one."""
    for producer in stream.statistics().client.producers:
        if producer.logical_bytes and producer.same_host != order.same_host:
            raise SystemExit(f"same host: {producer.same_host}, where {order.same_host} was meant")


def _stream(order: Order, states: StateSet) -> HiddenStateStream:
    keys = order.keys
    producer = ClientConfig(
        addresses=tuple(order.addresses),
        insecure=keys is None and order.host != LOOPBACK,
        key=None if keys is None else keys / "clients" / "consumer.secret",
        server_key=None if keys is None else keys / "producers.pub",
        same_host=order.same_host,
    )
    capacity_bytes = int(order.buffered * states.largest_bytes * SMALL_PARTS)
    buffer = BufferConfig(
        capacity_bytes=capacity_bytes, window_samples=1, stall_seconds=STALL_SECONDS
    )
    config = StreamConfig(producer=producer, buffer=buffer)
    return HiddenStateStream(config, ranks=_ranks(order))


def _ranks(order: Order) -> Ranks | None:
    if order.consumers == 1:
        return None
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=order.rendezvous, rank=order.number, world_size=order.consumers
        )
    return Ranks()
