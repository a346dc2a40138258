"""The demo's drafter, before and after training, on prompts that it was not trained on."""

from pathlib import Path

from draftfeed_consumer.config import ConsumerConfig
from draftfeed_consumer.evaluate import accepted_length, heldout_loss
from draftfeed_consumer.stream import to_item
from draftfeed_consumer.trainers import load as load_trainer
from draftfeed_consumer.trainers.specforge import draft_config
from draftfeed_consumer.trainers.specforge_hooks import latest_checkpoint
from draftfeed_deploy.report_records import Evaluation
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import TransformersConfig, make_engine
from draftfeed_producer.prompts import PromptFile, PromptsConfig, prompt_limit
from draftfeed_producer.target import load_target
from draftfeed_proto.sample import Sample

DECODED_PROMPTS = 4
DECODED_TOKENS = 32


def evaluate(producer: ProducerConfig, consumer: ConsumerConfig, heldout: Path) -> Evaluation:
    """Loss on all held-out prompts, accepted length on the first few of them."""
    samples = _capture(producer, heldout)
    _, run = load_trainer(consumer.trainer)
    layer_ids = tuple(load_target(producer.needed()[0]).descriptor().layer_ids)
    drafter = draft_config(run, layer_ids)
    checkpoint = latest_checkpoint(run.output_dir)
    items = [to_item(sample) for sample in samples]
    prompts = [_prompt(sample) for sample in samples[:DECODED_PROMPTS]]
    decoded = accepted_length(prompts, run.target_dir, drafter, checkpoint, DECODED_TOKENS)
    return Evaluation(
        untrained_loss=heldout_loss(items, run.target_dir, drafter, None),
        trained_loss=heldout_loss(items, run.target_dir, drafter, checkpoint),
        accepted_length=decoded.mean,
        accepted_new_tokens=decoded.new_tokens,
        accepted_target_calls=decoded.target_calls,
        same_as_greedy=decoded.same_as_greedy,
    )


def _capture(producer: ProducerConfig, heldout: Path) -> list[Sample]:
    """Held-out samples, in the order of the file, made as the producer makes its own."""
    target_config, _ = producer.needed()
    assert isinstance(producer.engine, TransformersConfig)
    target = load_target(target_config)
    limit = prompt_limit(
        PromptsConfig(path=str(heldout)),
        target.max_positions,
        producer.engine.sampling.max_new_tokens,
    )
    file = PromptFile(PromptsConfig(path=str(heldout)), target.tokenizer, limit)
    engine = make_engine(producer.engine, target_config)
    try:
        return sorted(engine.run(file.prompts()), key=lambda sample: sample.id)
    finally:
        engine.close()
        file.close()


def _prompt(sample: Sample) -> list[int]:
    ids: list[int] = sample.input_ids[sample.loss_mask == 0].tolist()
    return ids
