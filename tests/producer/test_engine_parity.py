"""Rows captured while generating in a padded batch equal those of one full forward pass."""

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftfeed_producer.engines import CaptureConfig, SamplingConfig, TransformersConfig
from draftfeed_producer.engines.transformers import TransformersEngine
from draftfeed_producer.errors import CaptureError
from draftfeed_producer.target import TargetConfig, load_target
from draftfeed_proto.descriptor import Final
from draftfeed_proto.sample import Sample
from engine_suite import (  # noqa: F401 - the tests are run here
    LENGTHS,
    Captured,
    FullForward,
    assert_sampled_from,
    errors,
    given,
    lost_channels,
    make_prompts,
    test_counters_are_the_sums_over_a_samples_own_rows,
    test_every_sample_has_one_id_more_than_rows,
    test_layer_ids_shifted_by_one_do_not_pass_for_equal,
    test_prefill_of_a_response_makes_the_sample_that_live_capture_made,
    test_rows_captured_in_prefill_mode_equal_one_full_forward_pass,
    test_rows_captured_while_generating_equal_one_full_forward_pass,
    test_rows_shifted_by_one_do_not_pass_for_equal,
    test_the_final_state_equals_that_of_one_full_forward_pass,
    test_the_final_state_makes_the_targets_logits,
    test_the_last_block_is_served_before_the_final_norm,
    test_what_stands_for_the_state_before_the_norm_makes_the_targets_logits,
)

# The first test on a machine makes the SmolLM2 directory, which takes half a minute or more.
pytestmark = pytest.mark.timeout(300)

NEW_TOKENS = 10
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
CASES: dict[str, tuple[str, tuple[int, ...], str, Final]] = {
    "smollm2-float32-prenorm": ("smollm2_dir", (1, 8, 14, 20, 27, 29), "float32", "prenorm"),
    "smollm2-float32-postnorm": ("smollm2_dir", (1, 8, 14, 20, 27, 29), "float32", "postnorm"),
    "tiny_qwen3-float32": ("tiny_qwen3", (0, 2, 5), "float32", "none"),
    "tiny_qwen3-float32-postnorm": ("tiny_qwen3", (0, 2, 5), "float32", "postnorm"),
    "tiny_qwen3-bfloat16-prenorm": ("tiny_qwen3", (0, 2, 5), "bfloat16", "prenorm"),
    "tiny_qwen35-float32-prenorm": ("tiny_qwen35", (0, 3, 7), "float32", "prenorm"),
    "tiny_qwen35-bfloat16-postnorm": ("tiny_qwen35", (0, 3, 7), "bfloat16", "postnorm"),
    "tiny_qwen35_multimodal-float32-postnorm": (
        *("tiny_qwen35_multimodal", (1, 4, 7), "float32", "postnorm"),
    ),
}


class Case(NamedTuple):
    path: Path
    layer_ids: tuple[int, ...]
    dtype: str
    final: Final


def make_engine(
    path: Path,
    layer_ids: tuple[int, ...],
    dtype: str = "float32",
    batch_size: int = 4,
    final: Final = "none",
    **sampling: object,
) -> TransformersEngine:
    config = TransformersConfig(
        dtype=dtype,  # type: ignore[arg-type]
        batch_size=batch_size,
        threads=1,
        sampling=SamplingConfig(**{"max_new_tokens": NEW_TOKENS, **sampling}),  # type: ignore[arg-type]
    )
    target = load_target(TargetConfig(path=str(path)))
    return TransformersEngine(config, target, layer_ids, final=final)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    fixture, layer_ids, dtype, final = CASES[request.param]
    return Case(request.getfixturevalue(fixture), layer_ids, dtype, final)


@pytest.fixture(scope="module")
def captured(case: Case) -> Captured:
    """Six prompts of mixed lengths in batches of four: the second batch reuses the staging."""
    path, layer_ids, dtype, final = case
    prompts = make_prompts(LENGTHS)
    # Drawn, not greedy: a random model soon repeats one token, and then rows repeat, too.
    engine = make_engine(path, layer_ids, dtype, final=final, temperature=1.0)
    assert engine.descriptor.final == final
    samples = list(engine.run(iter(prompts)))
    assert len(samples) == 6
    assert engine.recaptured == 0
    engine.close()
    forward = FullForward(path, dtype)
    references = [forward(sample.input_ids[:-1]) for sample in samples]
    return Captured(
        layer_ids,
        TOLERANCE[dtype],
        NEW_TOKENS,
        prompts,
        samples,
        references,
        lost_channels(path),
        final,
        forward,
    )


@pytest.fixture(scope="module")
def prefilled(case: Case, captured: Captured) -> list[Sample]:
    """In batches of four, each of samples that are about as long as each other."""
    path, layer_ids, dtype, final = case
    config = TransformersConfig(dtype=dtype, batch_size=4, threads=1)  # type: ignore[arg-type]
    target, capture = load_target(TargetConfig(path=str(path))), CaptureConfig(mode="prefill")
    engine = TransformersEngine(config, target, layer_ids, capture, final)
    samples = sorted(engine.run(iter(given(captured))), key=lambda sample: sample.id)
    assert engine.recaptured == 0
    engine.close()
    return samples


def test_the_head_makes_the_sampled_tokens_of_the_final_states(case: Case, captured: Captured):
    if case.final == "none":
        pytest.skip("there are none")
    engine = make_engine(case.path, case.layer_ids, case.dtype, final=case.final)
    samples = list(engine.run(iter(captured.prompts)))
    engine.close()
    assert_sampled_from(samples, captured.forward, len(case.layer_ids), case.final)


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
    """Fewer rows than tokens, silently."""
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
