"""The demo's drafter, before and after training, on prompts that it was not trained on."""

from pathlib import Path

from draftfeed_consumer.evaluate import accepted_length, heldout_loss
from draftfeed_consumer.stream import to_item
from draftfeed_consumer.trainers import TrainerConfig
from draftfeed_consumer.trainers.dflash import load_config
from draftfeed_consumer.trainers.specforge_checkpoints import latest_checkpoint
from draftfeed_deploy.records import Evaluation
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import SyntheticConfig, TransformersConfig, make_engine
from draftfeed_producer.prompts import PromptFile, PromptsConfig, prompt_limit
from draftfeed_producer.target import load_target
from draftfeed_proto.sample import Sample

DECODED_PROMPTS = 4
DECODED_TOKENS = 32


def evaluate(producer: ProducerConfig, trainer: TrainerConfig, heldout: Path) -> Evaluation:
    """Loss on all held-out prompts, accepted length on the first few of them.

    The drafter is the one that training wrote down, not one made from the configuration again.
    """
    assert trainer.target is not None
    target, drafter = trainer.target, load_config(trainer.output_dir)
    checkpoint = latest_checkpoint(trainer.output_dir)
    samples = _capture(producer, heldout)
    items = [to_item(sample) for sample in samples]
    prompts = [_prompt(sample) for sample in samples[:DECODED_PROMPTS]]
    decoded = accepted_length(prompts, target, drafter, checkpoint, DECODED_TOKENS)
    return Evaluation(
        untrained_loss=heldout_loss(items, target, drafter, None),
        trained_loss=heldout_loss(items, target, drafter, checkpoint),
        vocab_size=drafter.architecture["vocab_size"],
        accepted_length=decoded.mean,
        accepted_new_tokens=decoded.new_tokens,
        accepted_target_calls=decoded.target_calls,
        same_as_greedy=decoded.same_as_greedy,
    )


def _capture(producer: ProducerConfig, heldout: Path) -> list[Sample]:
    """Held-out samples, in the order of the file, made as the producer makes its own: with
    transformers, for another start of SGLang would take longer than all of these."""
    target_config, _ = producer.needed()
    assert not isinstance(producer.engine, SyntheticConfig)
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
        return sorted(engine.run(file.prompts()), key=lambda sample: sample.id)
    finally:
        engine.close()
        file.close()


def _prompt(sample: Sample) -> list[int]:
    ids: list[int] = sample.input_ids[sample.loss_mask == 0].tolist()
    return ids
