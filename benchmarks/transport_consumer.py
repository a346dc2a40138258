"""draftfeed's consumer in transport.py: the stream that a trainer imports, and a trainer that does
nothing but look whether all is there."""

import torch
import torch.distributed as dist

from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.ranks import Ranks
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from transport_check import Check
from transport_orders import LOOPBACK, Order, Talk
from transport_states import StateSet

BUFFERED_SAMPLES = 8
LEAST_BUFFER_BYTES = 256 << 20


def receive(order: Order, states: StateSet, check: Check, talk: Talk) -> None:
    """Everything while it is made, and once more out of the spools. Nothing is committed, so that
    the next term gets all of it again."""
    torch.set_num_threads(1)
    stream = _stream(order, states)
    assert stream.descriptor
    talk.tell("attached")
    _take_all(order, stream, check)
    check.done()
    stream.close()
    stream = _stream(order, states)
    assert stream.descriptor
    check.begin(warm=0)
    talk.tell("attached")
    talk.wait("stored")
    _take_all(order, stream, check)
    check.done()
    stream.close()


def _take_all(order: Order, stream: HiddenStateStream, check: Check) -> None:
    for step, item in enumerate(stream, start=1):
        producer, n = divmod(item["id"].ordinal, order.samples)
        states = item["hidden_states"]
        check.sample(producer, n, [states.view(torch.uint8).numpy().reshape(-1).data])
        stream.trained([item["id"]], step)
        if step == 1:
            _check_path(order, stream)


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
    capacity_bytes = max(LEAST_BUFFER_BYTES, BUFFERED_SAMPLES * states.largest_bytes)
    buffer = BufferConfig(capacity_bytes=capacity_bytes, window_samples=1)
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
