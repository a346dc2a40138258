"""Draws tokens so that a sample's random numbers are its own, whatever batch it is in."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftfeed_producer.engines.config import SamplingConfig
from draftfeed_producer.engines.seeds import sample_seed
from draftfeed_proto.ids import SampleId

_LIKELY = 512


class SeededSampler:
    """A logits processor that leaves one token per sequence, which greedy decoding then takes.

    Step s of a sample uses number s of a stream seeded by (seed, sample id). The same prompts in
    the same batches give the same tokens again; in another batch, a token can change only where
    rounding in the model moves a probability across the number drawn.
    """

    def __init__(self, config: SamplingConfig, ids: Sequence[SampleId]) -> None:
        self._config = config
        draws = [_uniforms(config.seed, id, config.max_new_tokens) for id in ids]
        self._uniforms = torch.from_numpy(np.stack(draws))
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = self._uniforms[:, self._step].to(scores.device)
        self._step += 1
        token = draw(scores, uniform, self._config)
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)


def draw(scores: Tensor, uniform: Tensor, config: SamplingConfig) -> Tensor:
    """int64[B] from scores [B, V] by inverting the distribution at `uniform` [B] in [0, 1).

    temperature, then top_k, then top_p, as transformers' own processors do.
    """
    probability, order = _candidates(scores.float() / config.temperature, config)
    probability = probability.double()
    if config.top_p < 1:
        before = probability.cumsum(-1) - probability
        probability = probability.masked_fill(before >= config.top_p, 0)
    cumulative = probability.cumsum(-1)
    # Just below the total, or rounding could choose a token that was cut off.
    at = (uniform[:, None] * cumulative[:, -1:]).minimum(cumulative[:, -1:] * (1 - 1e-12))
    picked = torch.searchsorted(cumulative, at, right=True)
    return (picked if order is None else order.gather(1, picked))[:, 0]


def _candidates(logits: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor | None]:
    """Probabilities, likeliest first where top_k or top_p needs it, and the tokens they are of."""
    if config.top_k:
        logits, order = logits.topk(min(config.top_k, logits.shape[-1]))
        return logits.softmax(-1), order
    probability = logits.softmax(-1)
    if config.top_p == 1:
        return probability, None
    # Sorting a whole vocabulary costs as much as half a step of a small model.
    likely, order = probability.topk(min(_LIKELY, probability.shape[-1]))
    if bool((likely.sum(-1) < config.top_p).any()):
        likely, order = probability.sort(descending=True)
    return likely, order


def _uniforms(seed: int, id: SampleId, count: int) -> np.ndarray:
    philox = np.random.Philox(key=sample_seed(seed, id))
    return np.random.Generator(philox).random(count)
