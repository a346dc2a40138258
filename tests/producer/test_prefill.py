"""Prefill mode of the transformers engine: what one pass over given responses must not cost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from draftfeed_producer.engines import CaptureConfig, SamplingConfig, TransformersConfig
from draftfeed_producer.engines.transformers import TransformersEngine
from draftfeed_producer.errors import CaptureError
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.target import TargetConfig, load_target
from draftfeed_proto.sample import Sample
from engine_suite import errors, make_prompts

ROW_BYTES = 2 * 2 * 512


def given(prompts: list[int], responses: list[int], **fields: Any) -> list[Prompt]:
    """Prompts of these lengths with responses of those."""
    answers = make_prompts(responses)
    return [
        msgspec.structs.replace(prompt, response_ids=answer.input_ids, **fields)
        for prompt, answer in zip(make_prompts(prompts), answers, strict=True)
    ]


@pytest.fixture
def engine(tiny_qwen3: Path):
    made: list[TransformersEngine] = []

    def make(batch_size: int = 8, mode: Any = "prefill", **options: Any) -> TransformersEngine:
        sampling = SamplingConfig(max_new_tokens=options.pop("max_new_tokens", 10))
        config = TransformersConfig(
            dtype="float32", batch_size=batch_size, threads=1, sampling=sampling
        )
        target = load_target(TargetConfig(path=str(tiny_qwen3)))
        made.append(TransformersEngine(config, target, (1, 3), CaptureConfig(mode=mode, **options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def watch(engine: TransformersEngine, act: Callable[[int], None] = lambda _: None):
    """The shape of every forward pass's input; `act(i)` is called before pass i."""
    shapes: list[tuple[int, ...]] = []

    def hook(_: Any, args: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
        act(len(shapes))
        shapes.append(tuple((args[0] if args else options["input_ids"]).shape))

    engine._model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    return shapes


def by_id(samples: Any) -> list[Sample]:
    return sorted(samples, key=lambda sample: sample.id)


def test_one_pass_over_a_batch_and_a_row_for_every_fed_token(engine):
    """Padding leaves no rows, and they would be counted as captured."""
    one = engine()
    shapes = watch(one)
    samples = by_id(one.run(iter(given([3, 1, 9], [5, 1, 2]))))
    assert shapes == [(3, 10)]
    assert [len(sample.hidden_states) for sample in samples] == [7, 1, 10]
    assert one.captured == 18
    assert [sample.loss_mask.tolist() for sample in samples[:2]] == [[0] * 3 + [1] * 5, [0, 1]]


def test_rows_do_not_depend_on_what_shares_the_batch(engine):
    """What stands behind a sequence as padding must change none of its rows."""
    prompts = given([3, 1, 9, 40], [5, 1, 2, 30])
    together, alone = (by_id(engine(size).run(iter(prompts))) for size in (4, 1))
    for sample, single in zip(together, alone, strict=True):
        for layer in range(2):
            got, want = (x.hidden_states[:, layer].astype(np.float32) for x in (sample, single))
            assert errors(got, want).max() <= 1e-3


def test_no_logits_are_computed(engine):
    """Of a sequence of 32K tokens over 150K words they would be 20 GB."""
    one = engine()
    one._model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("the head was run"))
    assert len(list(one.run(iter(given([3, 1], [5, 1]))))) == 2


def test_samples_of_like_length_share_a_pass_and_memory_is_bounded(engine):
    """Anything that holds several whole long samples in memory dies."""
    one = engine(staging_bytes=50 * ROW_BYTES)
    shapes = watch(one)
    samples = list(one.run(iter(given([5, 30, 5, 30, 5, 48, 5], [6, 11, 6, 11, 6, 3, 6]))))
    assert len(samples) == 7
    assert shapes == [(4, 10), (1, 40), (1, 40), (1, 50)]


def test_a_pass_is_bounded_where_staging_is_not(engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("draftfeed_producer.engines.transformers._PREFILL_TOKENS", 20)
    one = engine()
    shapes = watch(one)
    list(one.run(iter(given([5] * 5, [6] * 5))))
    assert shapes == [(2, 10), (2, 10), (1, 10)]


def test_live_batches_are_as_many_as_their_longest_responses_allow(engine):
    """Three prompts of 5 and 10 tokens to come: 14 rows each at most, 30 are held."""
    one = engine(mode="live", staging_bytes=30 * ROW_BYTES)
    shapes = watch(one)
    samples = list(one.run(iter(make_prompts([5, 5, 5]))))
    assert [sample.id.ordinal for sample in samples] == [0, 1, 2]
    assert [shape for shape in shapes if shape[1] > 1] == [(2, 5), (1, 5)]


def test_a_response_that_is_there_is_captured_in_one_pass_whatever_the_mode(engine):
    """One engine checks itself: it starts once, and captures what it generated once more."""
    one = engine(mode="live")
    shapes = watch(one)
    first, second = by_id(one.run(iter([make_prompts([5])[0], given([3, 7], [4, 6])[1]])))
    assert shapes[-1] == (1, 12)
    assert all(columns == 1 for _, columns in shapes[1:-1])
    assert (len(first.hidden_states), len(second.hidden_states)) == (
        len(first.input_ids) - 1,
        12,
    )
    assert first.sampling
    assert not second.sampling


def test_the_longest_sample_counts_no_tokens_to_come(engine):
    assert engine().max_rows(100) == 99
    assert engine(mode="live", max_new_tokens=7).max_rows(100) == 106


@pytest.mark.parametrize(("reason", "kept"), [(None, "unknown"), ("length", "length")])
def test_the_reason_is_the_lines(engine, reason: str | None, kept: str):
    (sample,) = engine().run(iter(given([3], [5], finish_reason=reason)))
    assert (sample.finish_reason, sample.sampling) == (kept, {})


def test_stop_ends_a_run_within_one_forward_pass(engine):
    one = engine(staging_bytes=20 * ROW_BYTES)
    shapes = watch(one, lambda i: one.stop() if i == 1 else None)
    samples = list(one.run(iter(given([5] * 9, [6] * 9))))
    assert (len(shapes), len(samples)) == (2, 4)


def drop_hooks(engine: TransformersEngine) -> None:
    engine._model.get_decoder().layers[3]._forward_hooks.clear()


def test_a_sample_with_a_missing_row_is_made_again_and_not_emitted(engine):
    """Fewer rows than tokens, silently."""
    prompts = given([3, 9], [5, 2])
    plain = by_id(engine(1).run(iter(prompts)))
    one = engine()
    watch(one, lambda i: drop_hooks(one) if i == 0 else None)
    again = by_id(one.run(iter(prompts)))
    assert one.recaptured == 2
    assert [sample.digest() for sample in again] == [sample.digest() for sample in plain]


def test_a_sample_whose_rows_stay_missing_is_an_error(engine):
    one = engine()
    watch(one, lambda _: drop_hooks(one))
    with pytest.raises(CaptureError, match="7 of 7 fed tokens"):
        list(one.run(iter(given([3], [5]))))
