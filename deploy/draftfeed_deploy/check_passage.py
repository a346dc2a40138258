"""A few samples through a spool, a server and a consumer of their own."""

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.listener import Listener, ServerConfig
from draftfeed_producer.server import Server
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.encoder import Encoder
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import Sample, decoded_bytes

PASSAGE_SECONDS = 120.0
COMMIT_SECONDS = 20.0


class Passage(NamedTuple):
    digests: dict[SampleId, str]
    """Of what arrived."""
    committed: bool
    """Whether the producer has stored that all of it is trained."""
    logical_bytes: int
    """Of what was sent: hidden states alone."""
    encoded_bytes: int
    encode_seconds: float
    loopback_seconds: float


def pass_through(
    config: SpoolConfig, descriptor: Descriptor, shards: Shards, samples: Sequence[Sample]
) -> Passage:
    """Spool and encode them as configured, but in a temporary directory; serve them at a loopback
    port of the system's choice, receive, decode, and commit.

    Raises SpoolError, ConsumerError.
    """
    encode_seconds = _time_encoding(config, samples)
    with ExitStack() as stack:
        spool = stack.enter_context(_spool(config, descriptor, shards))
        for sample in samples:
            spool.append(sample)
        address = stack.enter_context(_served(spool, descriptor, samples))
        received: dict[SampleId, Sample] = {}
        stream = HiddenStateStream(
            _stream_config(address, samples), lambda s: received.update({s.id: s})
        )
        stack.callback(stream.close)
        timer = threading.Timer(PASSAGE_SECONDS, stream.drain)
        timer.start()
        stack.callback(timer.cancel)
        loopback_seconds = _receive_all(stream)
        state = stream.state_dict()
        stream.committed(state)
        committed = stream.wait_committed(COMMIT_SECONDS)
        statistics = spool.statistics()
    return Passage(
        {id: sample.digest() for id, sample in received.items()},
        committed,
        sum(sample.hidden_states.nbytes for sample in samples),
        statistics.encoded_bytes,
        encode_seconds,
        loopback_seconds,
    )


def _time_encoding(config: SpoolConfig, samples: Sequence[Sample]) -> float:
    """As the producer does it."""
    with closing(Encoder(config.chooser, config.chunk_bytes, config.encode_threads)) as encoder:
        began = time.monotonic()
        for sample in samples:
            for _ in encoder.frames(sample):
                pass
        return time.monotonic() - began


@contextmanager
def _spool(config: SpoolConfig, descriptor: Descriptor, shards: Shards) -> Iterator[Spool]:
    with tempfile.TemporaryDirectory(prefix="draftfeed-check-") as directory:
        elsewhere = Path(directory) / "spool"
        own = msgspec.structs.replace(config, dir=elsewhere, audit=True, shards="")
        spool = Spool(own, descriptor, shards)
        try:
            yield spool
        finally:
            spool.close()


@contextmanager
def _served(spool: Spool, descriptor: Descriptor, samples: Sequence[Sample]) -> Iterator[str]:
    """The address."""
    listener = Listener(ServerConfig(bind="tcp://127.0.0.1:*", same_host=False))
    ids = IdSet(sample.id for sample in samples)
    largest = max(_decoded_bytes(sample) for sample in samples)
    delivery = Delivery.of(spool, descriptor, ids, max_sample_bytes=largest, now=time.monotonic())
    server = Server(listener, spool, delivery)
    try:
        server.start()
        server.finish()
        yield listener.address
    finally:
        server.close("the check is over")


def _stream_config(address: str, samples: Sequence[Sample]) -> StreamConfig:
    sizes = [_decoded_bytes(sample) for sample in samples]
    room = max(sum(sizes), 2 * max(sizes))  # one arrives while one is held
    return StreamConfig(
        producer=ClientConfig(addresses=(address,), group="check"),
        buffer=BufferConfig(capacity_bytes=room, window_samples=1),
    )


def _receive_all(stream: HiddenStateStream) -> float:
    """Seconds from asking for the first sample to having the last one."""
    _ = stream.descriptor  # attached
    began = last = time.monotonic()
    for step, item in enumerate(stream, start=1):
        last = time.monotonic()
        stream.trained([item["id"]], step)
    return last - began


def _decoded_bytes(sample: Sample) -> int:
    return decoded_bytes(*sample.hidden_states.shape)
