import itertools
import threading
import time
import tracemalloc

import msgspec
import numpy as np
import pytest
import torch

from draftfeed_producer.engines import SyntheticConfig, make_engine
from draftfeed_producer.engines.synthetic import (
    SyntheticStates,
    synthetic_ids,
    synthetic_prompts,
    synthetic_sample,
)
from draftfeed_producer.errors import LayerIdError
from draftfeed_producer.tap.reference import to_wire
from draftfeed_proto import codecs
from draftfeed_proto.descriptor import Final
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import Assembler, Sample, encode_chunks, header_of

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


LONG = SyntheticConfig(
    samples=1, prompt_tokens=4000, response_tokens=4000, max_tokens=2000, num_layers=64
)


def long_sample() -> Sample:
    return synthetic_sample(next(synthetic_prompts(LONG)).id, LONG)


def test_a_long_sample_is_made_a_few_rows_at_a_time():
    """A sample of 32K tokens takes 1.6 GB."""
    states = long_sample().hidden_states
    assert isinstance(states, SyntheticStates)
    whole = states[:]
    assert states.nbytes == whole.nbytes > 90e6
    assert (states.shape, states.dtype, len(states)) == (whole.shape, whole.dtype, len(whole))
    for first, stop in ((0, 1), (81, 162), (7, 7), (len(whole) - 3, len(whole) + 5)):
        assert np.array_equal(states[first:stop], whole[first:stop])


def test_encoding_and_digest_of_a_long_sample_never_hold_it():
    sample = long_sample()
    synthetic_sample(SampleId("0" * 16, 0, 0, 0), SMALL)  # fills the tables
    tracemalloc.start()
    try:
        sizes = [len(frame) for frame in encode_chunks(sample, codecs.by_name("zstd"))]
        header_of(sample, chunks=len(sizes), encoded_bytes=sum(sizes), audit=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40e6, f"{peak:,} bytes for a sample of {sample.hidden_states.nbytes:,}"


def test_a_long_sample_arrives_as_it_was_made():
    sample = long_sample()
    frames = list(encode_chunks(sample, codecs.by_name("raw")))
    size = sum(map(len, frames))
    assembler = Assembler(header_of(sample, chunks=len(frames), encoded_bytes=size, audit=True))
    for frame in frames:
        assembler.add(frame)
    assert assembler.sample().digest() == sample.digest() == long_sample().digest()


def test_held_and_lazy_states_are_the_same(monkeypatch: pytest.MonkeyPatch):
    id = SampleId("0" * 16, 0, 0, 7)
    held = synthetic_sample(id, SMALL)
    monkeypatch.setattr("draftfeed_producer.engines.synthetic._HELD_BYTES", 0)
    lazy = synthetic_sample(id, SMALL)
    assert isinstance(held.hidden_states, np.ndarray)
    assert isinstance(lazy.hidden_states, SyntheticStates)
    assert held.digest() == lazy.digest()


def test_prompts_are_cut_into_shards():
    config = SyntheticConfig(samples=10, shard_size=4)
    prompts = list(synthetic_prompts(config))
    assert [prompt.id.shard for prompt in prompts] == [0] * 4 + [1] * 4 + [2] * 2
    assert [prompt.id.ordinal for prompt in prompts] == list(range(10))
    assert config.shards.ranges == (0, 3)
    assert IdSet(prompt.id for prompt in prompts) == synthetic_ids(config)
    assert synthetic_ids(config).within(config.shards) == synthetic_ids(config)


def test_producers_of_any_speed_share_a_data_set_and_other_samples_are_another():
    other = SyntheticConfig(**{**SMALL_FIELDS, "samples": 21})
    assert SyntheticConfig(**{**SMALL_FIELDS, "tokens_per_second": 5.0}).dataset == SMALL.dataset
    assert other.dataset != SMALL.dataset


def test_no_sample_has_more_rows_than_announced():
    config = SyntheticConfig(samples=50, prompt_tokens=90, response_tokens=90, max_tokens=100)
    rows = [len(synthetic_sample(p.id, config).hidden_states) for p in synthetic_prompts(config)]
    assert max(rows) == make_engine(config).max_rows(0)


def test_an_engine_runs_again_after_its_end():
    engine = make_engine(SMALL)
    first, second = (list(engine.run(synthetic_prompts(SMALL))) for _ in range(2))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert len(first) == 20


@pytest.mark.parametrize("final", ["prenorm", "postnorm"])
def test_a_final_state_is_one_more_layer(final: Final):
    engine = make_engine(msgspec.structs.replace(SMALL, final=final))
    samples = list(engine.run(synthetic_prompts(SMALL)))
    assert engine.descriptor.final == final
    layers = len(engine.descriptor.layer_ids) + 1
    for sample in samples:
        assert sample.hidden_states.shape[1] == engine.descriptor.layers == layers
        assert len(sample.counters) == layers
        assert (sample.hidden_states[:, -1] != 0).any(axis=1).all()


def test_bad_layer_ids_are_refused():
    with pytest.raises(LayerIdError, match="out of range"):
        make_engine(SyntheticConfig(num_layers=4, layer_ids=(1, 4)))
