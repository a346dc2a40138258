import itertools
import threading
import time

import numpy as np
import pytest
import torch

from draftfeed_producer.engines import SyntheticConfig, make_engine
from draftfeed_producer.engines.synthetic import synthetic_prompts, synthetic_sample
from draftfeed_producer.errors import LayerIdError
from draftfeed_producer.tap.reference import to_wire
from draftfeed_proto.ids import SampleId

SMALL = SyntheticConfig(
    samples=20, prompt_tokens=20, response_tokens=30, num_layers=8, hidden_size=256
)


def same(a, b) -> bool:
    return a.id == b.id and a.key == b.key and a.digest() == b.digest()


def test_a_sample_can_be_made_again_from_its_id_alone():
    engine = make_engine(SMALL)
    samples = list(engine.run(synthetic_prompts(SMALL)))
    assert [sample.id.ordinal for sample in samples] == list(range(20))
    assert all(same(sample, synthetic_sample(sample.id, SMALL)) for sample in samples)
    assert len({sample.digest() for sample in samples}) == 20


def test_another_epoch_or_seed_gives_other_content():
    id = SampleId("0" * 16, 0, 0, 5)
    base = synthetic_sample(id, SMALL)
    other_seed = SyntheticConfig(**{**SMALL_FIELDS, "seed": 1})
    assert synthetic_sample(SampleId("0" * 16, 1, 0, 5), SMALL).digest() != base.digest()
    assert synthetic_sample(id, other_seed).digest() != base.digest()


SMALL_FIELDS = {field: getattr(SMALL, field) for field in SMALL.__struct_fields__}


def test_samples_have_the_shape_every_engine_gives():
    descriptor = make_engine(SMALL).descriptor
    sample = synthetic_sample(SampleId("0" * 16, 0, 0, 3), SMALL)
    n = len(sample.input_ids) - 1
    assert sample.hidden_states.shape == (n, len(descriptor.layer_ids), 256)
    assert sample.hidden_states.dtype == np.float16
    assert sample.input_ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.uint8
    assert len(sample.loss_mask) == n + 1
    assert sample.loss_mask[-1] == 1
    assert sample.loss_mask[0] == 0
    assert len(sample.counters) == len(descriptor.layer_ids)


def test_states_have_the_statistics_of_a_real_stream():
    config = SyntheticConfig(prompt_tokens=200, response_tokens=200, hidden_size=1024)
    states = synthetic_sample(SampleId("0" * 16, 0, 0, 1), config).hidden_states
    bits = states.view(np.uint16)
    assert not (bits & 7).any(), "bf16-sourced values leave the low three bits of fp16 zero"
    for layer in range(states.shape[1]):
        share = np.bincount((bits[:, layer].ravel() >> 10) & 31) / bits[:, layer].size
        entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
        assert 2.6 <= entropy <= 2.8
    assert np.abs(states).max() == 24960
    again, counters = to_wire(torch.from_numpy(states.astype(np.float32)))
    assert np.array_equal(again.numpy().view(np.uint16), bits)
    assert not counters.any(), "the counters of a synthetic sample say zero, and that is true"


def test_lengths_follow_the_configured_means_and_limit():
    config = SyntheticConfig(
        samples=400, prompt_tokens=40, response_tokens=60, max_tokens=300, hidden_size=4
    )
    lengths = [len(synthetic_sample(p.id, config).input_ids) for p in synthetic_prompts(config)]
    assert 80 < np.mean(lengths) < 120
    assert max(lengths) <= 300
    assert len(set(lengths)) > 50


def test_the_configured_rate_holds():
    config = SyntheticConfig(**{**SMALL_FIELDS, "tokens_per_second": 2000.0})
    begin = time.monotonic()
    rows = sum(len(s.hidden_states) for s in make_engine(config).run(synthetic_prompts(config)))
    elapsed = time.monotonic() - begin
    assert elapsed >= 0.95 * rows / 2000.0 - 0.25


def test_stop_ends_a_wait_at_once():
    config = SyntheticConfig(**{**SMALL_FIELDS, "tokens_per_second": 0.001})
    engine = make_engine(config)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.extend(engine.run(synthetic_prompts(config))))
    thread.start()
    engine.stop()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert got == []


def test_prompts_are_pulled_one_by_one_as_there_is_room():
    pulled = itertools.count()
    prompts = (prompt for prompt, _ in zip(synthetic_prompts(SMALL), pulled, strict=False))
    run = make_engine(SMALL).run(prompts)
    next(run)
    next(run)
    assert next(pulled) == 2


def test_bad_layer_ids_are_refused():
    with pytest.raises(LayerIdError, match="out of range"):
        make_engine(SyntheticConfig(num_layers=4, layer_ids=(1, 4)))
