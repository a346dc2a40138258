"""An engine on trial: full length whatever is sampled, every token told of, and no capture if so
wished."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftfeed_producer.engines import SamplingConfig, TransformersConfig
from draftfeed_producer.engines.transformers import TransformersEngine
from draftfeed_producer.engines.trial import Trial
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.target import Target, TargetConfig, load_target
from draftfeed_proto.ids import SampleId
from engine_suite import make_prompts

NEW_TOKENS = 12


class Told(list[tuple[SampleId, int, float]]):
    def __call__(self, id: SampleId, tokens: int, at: float) -> None:
        self.append((id, tokens, at))


@pytest.fixture(scope="module")
def target(tiny_qwen3: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_qwen3)))


def engine(target: Target, trial: Trial | None, **sampling: Any) -> TransformersEngine:
    config = TransformersConfig(
        dtype="float32",
        batch_size=4,
        threads=1,
        sampling=SamplingConfig(**{"max_new_tokens": NEW_TOKENS, **sampling}),
    )
    return TransformersEngine(config, target, (1, 3), trial=trial)


def words(samples: list[Any]) -> list[list[int]]:
    return [sample.input_ids[sample.loss_mask == 1].tolist() for sample in samples]


def test_no_token_ends_a_response(target: Target):
    """Responses of different lengths: fewer and fewer requests in a batch, and no rate compares."""
    prompts = make_prompts([5, 9, 3])
    told = Told()
    on_trial = engine(target, Trial(progress=told))
    (once,) = on_trial.run(iter(prompts[:1]))
    stop = int(once.input_ids[5])  # its first token
    (short,) = engine(target, None, stop_token_ids=(stop,)).run(iter(prompts[:1]))
    assert words([short]) == [[stop]]
    samples = list(engine(target, Trial(progress=told), stop_token_ids=(stop,)).run(iter(prompts)))
    assert [len(response) for response in words(samples)] == [NEW_TOKENS] * 3
    assert words(samples)[:1] == words([once])


def test_every_token_is_told_of_when_it_is_there(target: Target):
    prompts, told = make_prompts([5, 9, 3]), Told()
    list(engine(target, Trial(progress=told)).run(iter(prompts)))
    for prompt in prompts:
        own = [(tokens, at) for id, tokens, at in told if id == prompt.id]
        assert [tokens for tokens, _ in own] == list(range(1, NEW_TOKENS + 1))
        times = [at for _, at in own]
        assert times == sorted(times)
        assert times[-1] > times[0]


def test_a_pass_over_a_prompt_alone_tells_of_one_token(target: Target):
    told = Told()
    one = np.zeros(1, np.int32)
    prompts = [Prompt(p.id, p.key, p.input_ids, one) for p in make_prompts([5, 9])]
    samples = list(engine(target, Trial(progress=told)).run(iter(prompts)))
    assert sorted(len(sample.hidden_states) for sample in samples) == [5, 9]
    assert [tokens for _, tokens, _ in told] == [1, 1]


def test_without_capture_the_same_text_is_generated_around_the_same_weights(target: Target):
    prompts = make_prompts([5, 9, 3])
    captures = engine(target, Trial(progress=Told()))
    bare = captures.uncaptured()
    with_rows, without = (list(one.run(iter(prompts))) for one in (captures, bare))
    assert words(with_rows) == words(without)
    assert {sample.hidden_states.shape[1:] for sample in with_rows} == {(2, 512)}
    assert {sample.hidden_states.shape[1:] for sample in without} == {(0, 512)}
    assert (captures.captured > 0, bare.captured) == (True, 0)
    assert not any(block._forward_hooks for block in captures._model.get_decoder().layers)


def test_memory_of_rows_that_is_given_up_comes_back_with_the_next_batch(target: Target):
    prompts = make_prompts([5, 9])
    captures = engine(target, Trial(progress=Told()))
    before = list(captures.run(iter(prompts)))
    captures.forget()
    after = list(captures.run(iter(prompts)))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.hidden_states, other.hidden_states)


def test_an_engine_made_without_capture_has_no_hooks_to_begin_with(target: Target):
    bare = engine(target, Trial(progress=Told(), captures=False))
    (sample,) = bare.run(iter(make_prompts([4])))
    assert sample.hidden_states.shape == (4 + NEW_TOKENS - 1, 0, 512)
    assert sample.counters == ()
