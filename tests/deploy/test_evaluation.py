"""The drafter is judged as it was trained, whatever a configuration would make today."""

import math
from pathlib import Path

import pytest

from draftfeed_consumer.stream import to_item
from draftfeed_consumer.trainers import TrainerConfig, TrainerRun
from draftfeed_consumer.trainers.specforge import train
from draftfeed_deploy.evaluation import evaluate
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import SamplingConfig, TransformersConfig, make_engine
from draftfeed_producer.prompts import PromptFile, PromptsConfig
from draftfeed_producer.spool import SpoolConfig
from draftfeed_producer.target import TargetConfig, load_target
from memory_stream import MemoryStream
from tiny_models import make_qwen3

LAYER_IDS = (1, 3)


@pytest.mark.timeout(300)
def test_layers_and_options_come_from_what_training_wrote_down(tmp_path: Path) -> None:
    model = make_qwen3(tmp_path / "qwen3")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "the fox {n}"}}\n' for n in range(6)))
    target = TargetConfig(path=str(model), layer_ids=LAYER_IDS)
    sampling = SamplingConfig(max_new_tokens=8)
    engine_config = TransformersConfig(dtype="float32", sampling=sampling)
    loaded = load_target(target)
    engine = make_engine(engine_config, target)
    file = PromptFile(PromptsConfig(path=str(prompts)), loaded.tokenizer, 100)
    descriptor = engine.descriptor
    items = [to_item(sample, descriptor) for sample in engine.run(file.prompts())]
    engine.close()
    file.close()
    options = {"mask_token_id": 3, "num_anchors": 4, "block_size": 4, "num_layers": 2}
    run = TrainerRun(target=model, output_dir=tmp_path / "out", options=options)
    train(MemoryStream(descriptor, items), run)

    producer = ProducerConfig(
        engine=engine_config,
        target=target,
        prompts=PromptsConfig(path=str(prompts)),
        spool=SpoolConfig(dir=tmp_path / "spool"),
    )
    today = TrainerConfig(kind="specforge", target=model, output_dir=tmp_path / "out")
    found = evaluate(producer, today, prompts)
    assert found.vocab_size == descriptor.vocab_size
    assert found.uniform_loss == pytest.approx(math.log(found.vocab_size))
    assert found.trained_loss != found.untrained_loss
    assert found.same_as_greedy
