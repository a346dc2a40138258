"""Rows captured while generating in a padded batch equal those of one full forward pass."""

import gc
import json
import math
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftfeed_producer.engines import SamplingConfig, TransformersConfig
from draftfeed_producer.engines.transformers import TransformersEngine
from draftfeed_producer.errors import CaptureError
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.tap.reference import to_wire
from draftfeed_producer.target import TargetConfig, load_target
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample

# The first test on a machine makes the SmolLM2 directory, which takes half a minute or more.
pytestmark = pytest.mark.timeout(300)

NEW_TOKENS = 10
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
CASES = {
    "smollm2-float32": ("smollm2_dir", (1, 8, 14, 20, 27, 29)),
    "tiny_qwen3-float32": ("tiny_qwen3", (0, 2, 5)),
    "tiny_qwen3-bfloat16": ("tiny_qwen3", (0, 2, 5)),
    "tiny_qwen35-float32": ("tiny_qwen35", (0, 3, 7)),
    "tiny_qwen35-bfloat16": ("tiny_qwen35", (0, 3, 7)),
    "tiny_qwen35_multimodal-float32": ("tiny_qwen35_multimodal", (1, 4, 7)),
}


@dataclass
class Reference:
    """fp16 values as float32, of one sequence of n fed tokens."""

    blocks: np.ndarray
    """[n, N, H], what each decoder block puts out."""
    final: np.ndarray
    """[n, H], the last block's output after the final norm."""


@dataclass
class Captured:
    layer_ids: tuple[int, ...]
    tolerance: float
    samples: list[Sample]
    references: list[Reference]

    def pairs(self) -> Iterator[tuple[np.ndarray, Reference]]:
        for sample, reference in zip(self.samples, self.references, strict=True):
            yield sample.hidden_states.astype(np.float32), reference


def make_prompts(lengths: list[int], vocab: int = 400) -> list[Prompt]:
    rng = np.random.default_rng(11)
    ids = (rng.integers(3, vocab, length).astype(np.int32) for length in lengths)
    return [Prompt(SampleId("f" * 16, 0, 0, i), f"p{i}", x) for i, x in enumerate(ids)]


def make_engine(
    path: Path,
    layer_ids: tuple[int, ...],
    dtype: str = "float32",
    batch_size: int = 4,
    **sampling: object,
) -> TransformersEngine:
    config = TransformersConfig(
        dtype=dtype,  # type: ignore[arg-type]
        batch_size=batch_size,
        threads=1,
        sampling=SamplingConfig(**{"max_new_tokens": NEW_TOKENS, **sampling}),  # type: ignore[arg-type]
    )
    return TransformersEngine(config, load_target(TargetConfig(path=str(path))), layer_ids)


def full_forward(path: Path, dtype: str) -> Callable[[np.ndarray], Reference]:
    """Reads Hugging Face's own `hidden_states`, whose index k+1 is layer id k. Its last entry is
    post-norm, so the last block's output is read at the final norm's input."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    before_norm: list[torch.Tensor] = []
    model.get_decoder().norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))

    def forward(input_ids: np.ndarray) -> Reference:
        before_norm.clear()
        tokens = torch.from_numpy(input_ids.astype(np.int64))[None]
        with torch.inference_mode():
            out = model(tokens, output_hidden_states=True, use_cache=False)
        blocks = torch.stack([*out.hidden_states[1:-1], before_norm[0]], dim=2)[0]
        wire = [to_wire(x)[0].float().numpy() for x in (blocks, out.hidden_states[-1][0])]
        return Reference(*wire)

    return forward


@pytest.fixture(scope="module", params=CASES)
def captured(request: pytest.FixtureRequest) -> Captured:
    """Six prompts of mixed lengths in batches of four: the second batch reuses the staging."""
    fixture, layer_ids = CASES[request.param]
    dtype = request.param.rpartition("-")[2]
    path = request.getfixturevalue(fixture)
    # Drawn, not greedy: a random model soon repeats one token, and then rows repeat, too.
    engine = make_engine(path, layer_ids, dtype, temperature=1.0)
    samples = list(engine.run(iter(make_prompts([5, 23, 1, 14, 9, 31]))))
    assert len(samples) == 6
    assert engine.recaptured == 0
    engine.close()
    forward = full_forward(path, dtype)
    references = [forward(sample.input_ids[:-1]) for sample in samples]
    return Captured(layer_ids, TOLERANCE[dtype], samples, references)


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 of each row, [2, rows]: over all channels, and without the 1% largest, which
    in a model with massive activations would hide every other channel."""
    small = np.argsort(np.abs(want).max(0))[: -math.ceil(0.01 * want.shape[1])]
    views = (slice(None), small)
    difference = [np.linalg.norm((got - want)[:, v], axis=1) for v in views]
    return np.stack(difference) / [np.linalg.norm(want[:, v], axis=1) for v in views]


def test_rows_captured_while_generating_equal_one_full_forward_pass(
    captured: Captured, record_property: Callable[[str, object], None]
):
    worst = 0.0
    for rows, reference in captured.pairs():
        for i, k in enumerate(captured.layer_ids):
            error = errors(rows[:, i], reference.blocks[:, k])
            assert error.max() <= captured.tolerance, (k, error.max())
            worst = max(worst, float(error.max()))
    record_property("worst row's relative L2", f"{worst:.2e}")


def test_layer_ids_shifted_by_one_do_not_pass_for_equal(captured: Captured):
    """Ids shifted by one between tools, same shape, no error."""
    for rows, reference in captured.pairs():
        for i, k in enumerate(captured.layer_ids):
            for other in {max(k - 1, 0), min(k + 1, reference.blocks.shape[1] - 1)} - {k}:
                error = errors(rows[:, i], reference.blocks[:, other])
                assert (error.max(1) > captured.tolerance).all(), (k, other, error.max(1))
                assert (np.median(error, 1) > captured.tolerance).all(), (k, other)


def test_rows_shifted_by_one_do_not_pass_for_equal(captured: Captured):
    """The last sampled token has no row, off by one between ids and rows."""
    for rows, reference in captured.pairs():
        for i, k in enumerate(captured.layer_ids):
            error = errors(rows[1:, i], reference.blocks[:-1, k])
            assert (np.median(error, 1) > captured.tolerance).all(), k


def test_the_last_block_is_served_before_the_final_norm(captured: Captured):
    """Asking for the last block; pre- and post-norm state mixed up."""
    for rows, reference in captured.pairs():
        assert captured.layer_ids[-1] == reference.blocks.shape[1] - 1
        last = rows[:, -1]
        assert errors(last, reference.blocks[:, -1]).max() <= captured.tolerance
        assert (np.median(errors(last, reference.final), 1) > captured.tolerance).all()


def test_every_sample_has_one_id_more_than_rows(captured: Captured):
    """The last sampled token was never fed, so it is a label without a row."""
    prompts = make_prompts([5, 23, 1, 14, 9, 31])
    for sample, prompt in zip(captured.samples, prompts, strict=True):
        p, n = len(prompt.input_ids), len(sample.hidden_states)
        response = len(sample.input_ids) - p
        assert n == p + response - 1
        np.testing.assert_array_equal(sample.input_ids[:p], prompt.input_ids)
        assert sample.loss_mask.tolist() == [0] * p + [1] * response
        assert sample.key == prompt.key
        assert sample.finish_reason == ("length" if response == NEW_TOKENS else "stop")


def test_counters_are_the_sums_over_a_samples_own_rows(captured: Captured):
    for sample in captured.samples:
        assert len(sample.counters) == len(captured.layer_ids)
        states = np.ascontiguousarray(sample.hidden_states)
        for layer, counters in enumerate(sample.counters):
            column = states[:, layer]
            assert counters.nonfinite == 0
            assert counters.zero_rows == 0
            assert counters.saturated == (np.abs(column) == 65504).sum()


def words(sample: Sample) -> list[int]:
    """The response."""
    return sample.input_ids[sample.loss_mask == 1].tolist()


def run(path: Path, lengths: list[int], **options: object) -> list[Sample]:
    engine = make_engine(path, (1, 3), **options)  # type: ignore[arg-type]
    return list(engine.run(iter(make_prompts(lengths))))


@pytest.mark.parametrize("model", ["tiny_qwen3", "tiny_qwen35"])
def test_greedy_tokens_of_a_batch_equal_those_of_unbatched_generation(
    model: str, request: pytest.FixtureRequest
):
    path = request.getfixturevalue(model)
    network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = make_prompts([3, 17, 8])
    for sample, prompt in zip(run(path, [3, 17, 8]), prompts, strict=True):
        alone = torch.from_numpy(prompt.input_ids.astype(np.int64))[None]
        out = network.generate(
            alone, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(alone)
        )
        assert sample.input_ids.tolist() == out[0].tolist()


def stops_for(responses: list[list[int]]) -> tuple[int, int] | None:
    """Tokens that end the first response at its first token, the second at its fifth, and leave
    the others alone."""
    stops = responses[0][0], responses[1][4]
    untouched = {*responses[1][:4], *responses[2], *responses[3]}
    return None if untouched & set(stops) else stops


def test_sequences_that_end_early_and_late_share_a_batch(tiny_qwen3: Path):
    """One ends with its first token, one in the middle, the others at the limit; the rows of
    each are those it has alone, and none is made for what an ended sequence is still fed."""
    for seed in range(20):
        options = {"temperature": 2.0, "seed": seed}
        stops = stops_for([words(sample) for sample in run(tiny_qwen3, [4, 12, 7, 9], **options)])
        if stops:
            break
    else:
        raise AssertionError("no seed gives responses that differ enough")
    together = run(tiny_qwen3, [4, 12, 7, 9], stop_token_ids=stops, **options)
    alone = run(tiny_qwen3, [4, 12, 7, 9], stop_token_ids=stops, batch_size=1, **options)
    assert [len(words(sample)) for sample in together] == [1, 5, NEW_TOKENS, NEW_TOKENS]
    assert [sample.finish_reason for sample in together] == ["stop", "stop", "length", "length"]
    for sample, single in zip(together, alone, strict=True):
        np.testing.assert_array_equal(sample.input_ids, single.input_ids)
        assert len(sample.hidden_states) == len(sample.input_ids) - 1
        for layer in range(2):
            got, want = (x.hidden_states[:, layer].astype(np.float32) for x in (sample, single))
            assert errors(got, want).max() <= 1e-3


def test_a_short_last_batch_is_not_waited_for(tiny_qwen3: Path):
    samples = run(tiny_qwen3, [4, 5, 6, 7, 8], batch_size=4)
    assert [sample.id.ordinal for sample in samples] == [0, 1, 2, 3, 4]


def test_no_prompts_no_samples(tiny_qwen3: Path):
    assert run(tiny_qwen3, []) == []


def test_a_samples_random_numbers_do_not_depend_on_its_batch(tiny_qwen3: Path):
    drawn = {"temperature": 1.5, "top_p": 0.95, "seed": 5}
    together = [words(sample) for sample in run(tiny_qwen3, [4, 9, 6], **drawn)]
    alone = [words(sample) for sample in run(tiny_qwen3, [4, 9, 6], batch_size=1, **drawn)]
    other_seed = [words(sample) for sample in run(tiny_qwen3, [4, 9, 6], **{**drawn, "seed": 6})]
    assert together == alone
    assert together != other_seed


def count_forwards(engine: TransformersEngine, act: Callable[[int], None]) -> list[int]:
    """Calls `act(i)` before forward pass i of the engine's model; returns the growing count."""
    seen: list[int] = []

    def hook(*_: object) -> None:
        act(len(seen))
        seen.append(len(seen))

    engine._model.get_decoder().register_forward_pre_hook(hook)
    return seen


def test_stop_ends_a_run_within_one_forward_pass(tiny_qwen3: Path):
    engine = make_engine(tiny_qwen3, (1, 3), max_new_tokens=200)
    seen = count_forwards(engine, lambda i: engine.stop() if i == 3 else None)
    assert list(engine.run(iter(make_prompts([4, 6])))) == []
    assert len(seen) == 4


def test_stop_keeps_the_samples_that_were_finished(tiny_qwen3: Path):
    first = words(run(tiny_qwen3, [4, 6])[0])
    engine = make_engine(tiny_qwen3, (1, 3), max_new_tokens=200, stop_token_ids=(first[0],))
    count_forwards(engine, lambda i: engine.stop() if i == 3 else None)
    samples = list(engine.run(iter(make_prompts([4, 6]))))
    assert [sample.id.ordinal for sample in samples] == [0]


def drop_hooks(engine: TransformersEngine, block: int) -> None:
    engine._model.get_decoder().layers[block]._forward_hooks.clear()


@pytest.mark.parametrize("block", [1, 3])
def test_a_sample_with_a_missing_row_is_made_again_and_not_emitted(tiny_qwen3: Path, block: int):
    """Symptom 1: fewer rows than tokens, silently."""
    engine = make_engine(tiny_qwen3, (1, 3))
    count_forwards(engine, lambda i: drop_hooks(engine, block) if i == 4 else None)
    again = list(engine.run(iter(make_prompts([4, 6]))))
    assert engine.recaptured == 2
    for sample, plain in zip(again, run(tiny_qwen3, [4, 6], batch_size=1), strict=True):
        assert sample.digest() == plain.digest()


def test_a_sample_whose_rows_stay_missing_is_an_error(tiny_qwen3: Path):
    engine = make_engine(tiny_qwen3, (1, 3))
    count_forwards(engine, lambda i: drop_hooks(engine, 3) if i % NEW_TOKENS == 4 else None)
    with pytest.raises(CaptureError, match="6 of 13 fed tokens") as caught:
        list(engine.run(iter(make_prompts([4, 6]))))
    assert (caught.value.missing, caught.value.fed) == (6, 13)


def test_the_models_own_sampling_settings_do_not_leak_in(tiny_qwen3: Path, tmp_path: Path):
    """Checkpoints ship temperatures and penalties that a sample's record would not show."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_qwen3, copy)
    settings = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "eos_token_id": 2}
    (copy / "generation_config.json").write_text(json.dumps(settings))
    plain, tuned = run(tiny_qwen3, [5, 8]), run(copy, [5, 8])
    assert [words(sample) for sample in plain] == [words(sample) for sample in tuned]


def test_close_frees_the_model_and_may_be_called_twice(tiny_qwen3: Path):
    engine = make_engine(tiny_qwen3, (1, 3))
    network = weakref.ref(engine._model)
    list(engine.run(iter(make_prompts([4]))))
    engine.close()
    engine.close()
    gc.collect()
    assert network() is None
