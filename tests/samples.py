"""Samples whose content follows from their ordinal, for tests of every room."""

import numpy as np

from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import LayerCounters, Sample

DATASET = "0123456789abcdef"
LAYERS, HIDDEN = 3, 64
DESCRIPTOR = Descriptor(
    model="tiny",
    revision="r1",
    tokenizer_hash="t",
    chat_template_hash="c",
    layer_ids=(1, 4, 7),
    num_layers=10,
    hidden_size=HIDDEN,
    vocab_size=512,
)


def sample(ordinal: int, rows: int = 40) -> Sample:
    """Content follows from the ordinal."""
    rng = np.random.default_rng(ordinal)
    states = rng.standard_normal((rows, LAYERS, HIDDEN)).astype(np.float32)
    bf16 = (states.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return Sample(
        id=SampleId(DATASET, 0, ordinal // 16, ordinal),
        key=f"key-{ordinal}",
        input_ids=rng.integers(0, 512, rows + 1, np.int32),
        loss_mask=(np.arange(rows + 1) >= rows // 4).astype(np.uint8),
        hidden_states=bf16.astype(np.float16),
        counters=(LayerCounters(0, 0, 0, 0),) * LAYERS,
        finish_reason="stop",
        sampling={"temperature": 0.0},
    )
