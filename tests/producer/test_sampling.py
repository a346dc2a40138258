import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftfeed_producer.engines import SamplingConfig
from draftfeed_producer.engines.sampling import draw

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.9, "top_p": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
]


def transformers_probabilities(scores: torch.Tensor, config: SamplingConfig) -> torch.Tensor:
    ids = torch.zeros(len(scores), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(config.temperature)(ids, scores)  # type: ignore[arg-type]
    if config.top_k:
        scores = TopKLogitsWarper(config.top_k)(ids, scores)  # type: ignore[arg-type]
    if config.top_p < 1:
        scores = TopPLogitsWarper(config.top_p)(ids, scores)  # type: ignore[arg-type]
    return scores.softmax(-1)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_tokens_are_drawn_with_the_probabilities_transformers_gives(settings, vocabulary: int):
    config = SamplingConfig(**settings)
    scores = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(4))
    draws = 4000
    # Evenly spread numbers instead of random ones: the shares then have no noise of their own.
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    token = draw(scores.expand(draws, -1), uniform, config)
    share = torch.bincount(token, minlength=vocabulary) / draws
    want = transformers_probabilities(scores[None], config)[0]
    assert (share - want).abs().max() <= 1.5 / draws
    assert not (share[want == 0] > 0).any()


def test_the_ends_of_the_unit_interval_draw_tokens_that_are_allowed():
    scores = torch.zeros(2, 1000)
    scores[:, 17] = 5.0
    ends = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    config = SamplingConfig(temperature=1.0, top_p=0.1)
    assert draw(scores, ends, config).tolist() == [17, 17]


@pytest.mark.parametrize(
    "bad", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}]
)
def test_config_refuses_impossible_numbers(bad: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingConfig(**bad)  # type: ignore[arg-type]
