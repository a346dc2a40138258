"""What SGLang is told with each request. It is not started here."""

from pathlib import Path

import numpy as np

from draftfeed_producer.engines import SamplingConfig, SGLangConfig
from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.target import TargetConfig, load_target
from draftfeed_proto.ids import SampleId

DETERMINISTIC = {"enable_deterministic_inference": True}


def make(path: Path, seed: int = 7, **args: bool) -> SGLangEngine:
    sampling = SamplingConfig(seed=seed, temperature=1.0)
    config = SGLangConfig(sampling=sampling, args=args)
    return SGLangEngine(config, load_target(TargetConfig(path=str(path))), (1, 3, 4))


def prompt(ordinal: int, response: list[int] | None = None) -> Prompt:
    ids = np.array([1, 5, 9], np.int32)
    given = None if response is None else np.array(response, np.int32)
    return Prompt(SampleId("f" * 16, 0, 0, ordinal), "q", ids, given)


def test_prompts_that_are_alike_do_not_get_the_same_response_again_and_again(tiny_qwen3: Path):
    engine = make(tiny_qwen3, **DETERMINISTIC)
    seeds = [engine._sampling_of(prompt(n))["sampling_seed"] for n in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)  # SGLang refuses others
    assert engine._sampling_of(prompt(3))["sampling_seed"] == seeds[3]


def test_another_seed_draws_others(tiny_qwen3: Path):
    drawn = [make(tiny_qwen3, seed, **DETERMINISTIC)._sampling_of(prompt(0)) for seed in (7, 8)]
    assert drawn[0]["sampling_seed"] != drawn[1]["sampling_seed"]


def test_a_seed_that_sglang_would_not_look_at_is_not_sent(tiny_qwen3: Path):
    engine = make(tiny_qwen3)
    assert "sampling_seed" not in engine._sampling_of(prompt(0))
    assert engine._arguments(load_target(TargetConfig(path=str(tiny_qwen3))))["random_seed"] == 7


def test_nothing_is_drawn_where_the_response_is_given(tiny_qwen3: Path):
    engine = make(tiny_qwen3, **DETERMINISTIC)
    assert "sampling_seed" not in engine._sampling_of(prompt(0, response=[4, 2]))
