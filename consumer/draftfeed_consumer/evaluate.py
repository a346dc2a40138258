"""How good a drafter is: its loss on held-out samples, and what it saves in decoding."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from draftfeed_consumer.decoding import greedy, is_greedy, speculate
from draftfeed_consumer.errors import DrafterError
from draftfeed_consumer.trainers.dflash import DraftConfig, build_training_model, load_weights
from draftfeed_consumer.trainers.exports import has_label
from draftfeed_consumer.trainers.specforge_algorithms import dflash_tensors


class Decoded(NamedTuple):
    """One prompt, decoded with the drafter and by the target alone."""

    yields: list[int]
    """New tokens of each verifying target call: accepted drafts and one of its own."""
    greedy: Literal["equal", "rounding", "different"]
    """Whether both gave the same tokens; "rounding": they part where the target's first choices
    are as good as equal in its dtype."""


class AcceptedLength(NamedTuple):
    mean: float
    """New tokens per target call, the target's own included: 1.0 when no draft is accepted."""
    by_position: list[float]
    """Share of the calls that accepted a draft in this place of the block, and with it all before
    it: block_size - 1 of them. `mean` is 1 plus their sum."""
    new_tokens: int
    """Of all prompts, each prompt's first one left out: no draft comes before it."""
    target_calls: int
    """Verifying forward passes of the target, the one over a prompt left out."""
    same_as_greedy: bool
    """Whether every prompt's tokens are what the target decodes greedily, but for rounding."""


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
            if not has_label(sample):
                continue
            torch.manual_seed(draft_config.seed + position)
            tensors = dflash_tensors(sample)
            tensors["hidden_states"] = tensors["hidden_states"].float()
            _, _, metrics = model(**tensors)
            numerator, denominator = metrics["loss_terms"]
            total += numerator.item()
            weight += denominator.item()
    if not weight:
        raise ValueError("no sample has a label: held-out responses need at least 3 tokens")
    return total / weight


def decode(
    drafter: Any,
    model: Any,
    prompts: Iterable[Sequence[int]],
    max_new_tokens: int,
    stops: Collection[int],
) -> Iterator[Decoded]:
    """Decode token ids, one prompt at a time, with the drafter and without it.

    drafter: SpecForge's DFlashDraftModel; model: transformers' causal language model, both on one
    device and of one dtype. stops: token ids that end a text. Tokens beyond it, or beyond
    `max_new_tokens`, count for nothing.
    """
    for prompt in prompts:
        tokens, yields = speculate(drafter, model, prompt, max_new_tokens, stops)
        if tokens == greedy(model, prompt, max_new_tokens, stops):
            yield Decoded(yields, "equal")
        else:
            same = is_greedy(model, prompt, tokens)
            yield Decoded(yields, "rounding" if same else "different")


def accepted_length(decoded: Sequence[Decoded], block_size: int) -> AcceptedLength:
    """The mean is (all new tokens) / (all target calls), not a mean of means.

    Raises DrafterError when there is nothing to count.
    """
    yields = [count for one in decoded for count in one.yields]
    if not yields:
        raise DrafterError(
            "nothing was decoded that a draft could come before: every text ended with its first "
            "token"
        )
    return AcceptedLength(
        mean=sum(yields) / len(yields),
        by_position=[
            sum(count > position for count in yields) / len(yields)
            for position in range(1, block_size)
        ],
        new_tokens=sum(yields),
        target_calls=len(yields),
        same_as_greedy=all(one.greedy != "different" for one in decoded),
    )


def load_target(target: Path, device: str = "cpu", dtype: str = "float32") -> Any:
    """The target's model. Raises DrafterError when it cannot be loaded."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with _no_progress_bar():
            model = load(target, dtype=getattr(torch, dtype), local_files_only=True).to(device)
    # transformers raises almost anything on broken weights; the user needs the one line of it.
    except Exception as error:  # noqa: BLE001
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DrafterError(f"target {target}: its weights cannot be loaded: {lines[0]}") from None
    return model.eval().requires_grad_(False)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
