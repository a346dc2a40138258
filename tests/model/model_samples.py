"""The smallest samples there are, made once: what travels in the model."""

from functools import cache

import numpy as np

from draftfeed_proto import codecs
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import SampleId, Shards
from draftfeed_proto.sample import (
    LayerCounters,
    Sample,
    SampleHeader,
    encode_chunks,
    header_of,
)
from samples import DATASET

DESCRIPTOR = Descriptor(
    model="model",
    revision="",
    tokenizer_hash="",
    chat_template_hash="",
    layer_ids=(0,),
    num_layers=1,
    hidden_size=1,
    vocab_size=2,
)
STREAM = DESCRIPTOR.stream_id()


def id_of(producer: int, ordinal: int) -> SampleId:
    """Each producer owns the shard of its own number."""
    return SampleId(DATASET, 0, producer, ordinal)


def shards_of(producer: int) -> Shards:
    return Shards(DATASET, 0, (producer, producer + 1))


@cache
def frames(id: SampleId) -> list[bytes]:
    """The tokens and the states."""
    return list(encode_chunks(_sample(id), codecs.by_name("raw")))


@cache
def header(id: SampleId) -> SampleHeader:
    size = sum(map(len, frames(id)))
    return header_of(_sample(id), chunks=len(frames(id)), encoded_bytes=size, audit=False)


def _sample(id: SampleId) -> Sample:
    return Sample(
        id=id,
        key="",
        input_ids=np.zeros(2, np.int32),
        loss_mask=np.ones(2, np.uint8),
        hidden_states=np.ones((1, 1, 1), np.float16),
        counters=(LayerCounters(0, 0, 0, 0),),
        finish_reason="stop",
        sampling={},
    )
