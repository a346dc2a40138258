"""A drafter on prompts that it was not trained on: for `draftfeed evaluate`, and in the demo."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from draftfeed_consumer import drafter_files
from draftfeed_consumer import evaluate as drafters
from draftfeed_consumer.stream import to_item
from draftfeed_consumer.trainers import Item, TrainerConfig
from draftfeed_consumer.trainers.dflash import load_config
from draftfeed_consumer.trainers.specforge_checkpoints import latest_checkpoint
from draftfeed_deploy.records import Evaluation
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import TARGETLESS, TransformersConfig, make_engine
from draftfeed_producer.prompts import PromptFile, PromptsConfig, prompt_limit
from draftfeed_producer.target import TargetConfig, end_tokens, load_target

DEMO_PROMPTS = 4
DEMO_TOKENS = 32


class Setting(NamedTuple):
    """What is decoded, and on what."""

    drafter: Path
    """A checkpoint, a run's output_dir, or a drafter's Hugging Face directory."""
    target: Path
    heldout: Path
    """Prompts, as the producer takes them."""
    prompts: int | None
    """Only the first so many."""
    max_new_tokens: int
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"


class HeldOut(NamedTuple):
    prompts: dict[str, list[int]]
    """Token ids by the prompt's key, in the order of the file."""
    stops: tuple[int, ...]
    """Tokens that end a text."""


class DecodedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    new_tokens: int
    target_calls: int
    greedy: Literal["equal", "rounding", "different"]
    """Against what the target decodes alone; "rounding": they part where two tokens are as good as
    equal to the target."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What `draftfeed evaluate --json` prints."""

    drafter: str
    """Where its weights lie."""
    target: str
    heldout: str
    device: str
    dtype: str
    max_new_tokens: int
    accepted_length: float
    """Mean new tokens a target call, its own included: 1.0 when no draft was accepted."""
    acceptance_by_position: list[float]
    """Share of target calls that accepted a draft there, and with it all before it. The accepted
    length is 1 plus their sum."""
    new_tokens: int
    """Without each prompt's first: no draft comes before it."""
    target_calls: int
    """Without those over prompts."""
    same_as_greedy: bool
    prompts: list[DecodedPrompt]

    @property
    def different(self) -> list[str]:
        """Keys of the prompts of which the target alone makes something else."""
        return [prompt.key for prompt in self.prompts if prompt.greedy == "different"]


def read_prompts(setting: Setting) -> HeldOut:
    """Raises ModelError, PromptError."""
    target = load_target(TargetConfig(path=str(setting.target)))
    config = PromptsConfig(path=str(setting.heldout))
    limit = prompt_limit(config, target.max_positions, setting.max_new_tokens)
    file = PromptFile(config, target.tokenizer, limit)
    try:
        first = islice(file.prompts(), setting.prompts)
        prompts = {prompt.key: prompt.input_ids.tolist() for prompt in first}
    finally:
        file.close()
    return HeldOut(prompts, end_tokens(target))


def measure(setting: Setting, heldout: HeldOut, advance: Callable[[], object]) -> Findings:
    """advance: called after each prompt. Raises DrafterError."""
    files = drafter_files.read(setting.drafter)
    drafter_files.check_target(files, setting.target)
    drafter = drafter_files.load(files)
    model = drafters.load_target(setting.target, setting.device, setting.dtype)
    drafter.to(model.device, model.dtype)
    decoded = []
    prompts, tokens = heldout.prompts.values(), setting.max_new_tokens
    for one in drafters.decode(drafter, model, prompts, tokens, heldout.stops):
        decoded.append(one)
        advance()
    found = drafters.accepted_length(decoded, drafter.block_size)
    return Findings(
        drafter=str(files.path),
        target=str(setting.target),
        heldout=str(setting.heldout),
        device=setting.device,
        dtype=setting.dtype,
        max_new_tokens=setting.max_new_tokens,
        accepted_length=found.mean,
        acceptance_by_position=found.by_position,
        new_tokens=found.new_tokens,
        target_calls=found.target_calls,
        same_as_greedy=found.same_as_greedy,
        prompts=[
            DecodedPrompt(
                key=key,
                new_tokens=sum(one.yields),
                target_calls=len(one.yields),
                greedy=one.greedy,
            )
            for key, one in zip(heldout.prompts, decoded, strict=True)
        ],
    )


def evaluate(producer: ProducerConfig, trainer: TrainerConfig, heldout: Path) -> Evaluation:
    """The demo's drafter: its loss before and after training on all held-out prompts, and its
    accepted length on the first few of them.

    The drafter is the one that training wrote down, not one made from the configuration again.
    """
    assert trainer.target is not None
    target, drafter = trainer.target, load_config(trainer.output_dir)
    checkpoint = latest_checkpoint(trainer.output_dir)
    items = _capture(producer, heldout)
    setting = Setting(trainer.output_dir, target, heldout, DEMO_PROMPTS, DEMO_TOKENS)
    decoded = measure(setting, read_prompts(setting), lambda: None)
    return Evaluation(
        untrained_loss=drafters.heldout_loss(items, target, drafter, None),
        trained_loss=drafters.heldout_loss(items, target, drafter, checkpoint),
        vocab_size=drafter.architecture["vocab_size"],
        accepted_length=decoded.accepted_length,
        accepted_new_tokens=decoded.new_tokens,
        accepted_target_calls=decoded.target_calls,
        same_as_greedy=decoded.same_as_greedy,
    )


def _capture(producer: ProducerConfig, heldout: Path) -> list[Item]:
    """Held-out samples, in the order of the file, made as the producer makes its own: with
    transformers, for another start of SGLang would take longer than all of these."""
    target_config, _ = producer.needed()
    assert not isinstance(producer.engine, TARGETLESS)
    config = producer.engine
    if not isinstance(config, TransformersConfig):
        config = TransformersConfig(threads=1, sampling=config.sampling)
    target = load_target(target_config)
    limit = prompt_limit(
        PromptsConfig(path=str(heldout)),
        target.max_positions,
        config.sampling.max_new_tokens,
    )
    file = PromptFile(PromptsConfig(path=str(heldout)), target.tokenizer, limit)
    engine = make_engine(config, target_config)
    try:
        samples = sorted(engine.run(file.prompts()), key=lambda sample: sample.id)
        return [to_item(sample, engine.descriptor) for sample in samples]
    finally:
        engine.close()
        file.close()
