"""How good a drafter is: its loss on held-out samples, and what it saves in decoding.

Both run the drafter through SpecForge's own code, on the CPU in fp32.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from draftfeed_consumer.trainers.dflash import (
    DraftConfig,
    build_drafter,
    build_training_model,
    load_weights,
)
from draftfeed_consumer.trainers.specforge_hooks import has_supervised_pair, to_tensors

logger = logging.getLogger(__name__)

TIE = 1e-3
"""Logits closer than this are one: batching changes the order of additions."""


class AcceptedLength(NamedTuple):
    mean: float
    """New tokens per target call, the target's own included: 1.0 when no draft is accepted."""
    new_tokens: int
    """Of all prompts, each prompt's first one left out: no draft comes before it."""
    target_calls: int
    """Verifying forward passes of the target, the one over a prompt left out."""
    same_as_greedy: bool
    """Whether every new token is the target's first choice given all tokens before it."""


def heldout_loss(
    samples: Iterable[dict[str, Any]],
    target: Path,
    draft_config: DraftConfig,
    checkpoint: Path | None,
) -> float:
    """DFlash loss per label, in nats, weighted as in training, over all labels of all samples.

    checkpoint: None for the untrained drafter that training starts from. Anchors depend on the
    seed and on a sample's place in `samples` only, so two drafters see the same blocks. Samples
    on which DFlash has no label are left out. Raises ValueError when none is left.
    """
    model = build_training_model(msgspec.structs.replace(draft_config, dtype="float32"), target)
    if checkpoint is not None:
        load_weights(model.draft_model, checkpoint)
    model.eval()
    total = weight = 0.0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for position, sample in enumerate(samples):
            if not has_supervised_pair(sample):
                continue
            torch.manual_seed(draft_config.seed + position)
            tensors = to_tensors(sample)
            tensors["hidden_states"] = tensors["hidden_states"].float()
            _, _, metrics = model(**tensors)
            numerator, denominator = metrics["loss_terms"]
            total += numerator.item()
            weight += denominator.item()
    if not weight:
        raise ValueError("no sample has a label: held-out responses need at least 3 tokens")
    return total / weight


def accepted_length(
    prompts: Iterable[Sequence[int]],
    target: Path,
    draft_config: DraftConfig,
    checkpoint: Path | None,
    max_new_tokens: int,
) -> AcceptedLength:
    """Greedy speculative decoding of token ids, one prompt at a time.

    The mean is (all new tokens) / (all target calls), not a mean of means. Tokens beyond
    `max_new_tokens` or the end of the text count for nothing, and neither do calls that give no
    others. Raises ValueError when there is nothing to count.
    """
    drafter = build_drafter(draft_config, target)
    if checkpoint is not None:
        load_weights(drafter, checkpoint)
    drafter.eval()
    new_tokens = calls = 0
    same = True
    with _quiet_transformers():
        model = _load_target(target)
        for prompt in prompts:
            prompt_ids = torch.tensor([list(prompt)], dtype=torch.long)
            with _watched(model, draft_config.layer_ids) as yields:
                output = _generate(drafter, model, prompt_ids, max_new_tokens)
            decoded = output.shape[1] - prompt_ids.shape[1] - 1
            new_tokens += decoded
            calls += sum(before < decoded for before in accumulate(yields[:-1], initial=0))
            same &= is_greedy(model, output, prompt_ids.shape[1])
    if not calls:
        raise ValueError("nothing was decoded: no prompts, or max_new_tokens below 2")
    return AcceptedLength(new_tokens / calls, new_tokens, calls, same)


@torch.no_grad()
def is_greedy(model: Any, output: torch.Tensor, prompt_tokens: int) -> bool:
    """Whether each new token of [1, t] ids is the model's first choice after those before it.

    The one sequence of which this holds is what greedy decoding prints.
    """
    logits = model(output[:, :-1]).logits[0, prompt_tokens - 1 :].float()
    chosen = logits.gather(1, output[0, prompt_tokens:, None])[:, 0]
    return bool((logits.amax(dim=1) - chosen <= TIE).all())


def _load_target(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without its progress bar, and its advice on how SpecForge should call it."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _generate(drafter: Any, model: Any, prompt: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
    eos = model.generation_config.eos_token_id
    stops = eos if isinstance(eos, list) else [eos]
    output = drafter.spec_generate(model, prompt, max_new_tokens, stops, temperature=0.0)
    assert isinstance(output, torch.Tensor)
    return output


@contextmanager
def _watched(model: Any, layer_ids: tuple[int, ...]) -> Iterator[list[int]]:
    """Tokens that each verifying pass of the target yields: accepted drafts and its own.

    Where the last block is among the layers, its output is given as it is in the stream: the last
    of transformers' hidden states is behind the final norm.
    """
    blocks = model.model.layers
    last_output: list[torch.Tensor] = []
    yields: list[int] = []
    prompt_seen: list[bool] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        last_output[:] = [output[0] if isinstance(output, tuple) else output]

    def after(module: Any, inputs: Any, output: Any) -> None:
        if len(blocks) - 1 in layer_ids:
            output.hidden_states = (*output.hidden_states[:-1], last_output[0])
        if prompt_seen:  # the pass over the prompt verifies nothing
            yields.append(_yielded(inputs[0], output.logits))
        prompt_seen.append(True)

    hooks = [blocks[-1].register_forward_hook(keep), model.register_forward_hook(after)]
    try:
        yield yields
    finally:
        for hook in hooks:
            hook.remove()


def _yielded(block: torch.Tensor, logits: torch.Tensor) -> int:
    """[1, b] ids, of which the first is certain, and the target's logits after each of them."""
    agrees = block[0, 1:] == logits[0, :-1].argmax(dim=-1)
    return int(agrees.cumprod(dim=0).sum()) + 1
