"""Makes the samples that transport.py sends: what an engine captured, and drawn ones of a wide
model's shape."""

import hashlib
import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from codec_states import fp16_of_bf16, wide_states
from draftfeed_deploy import smollm2
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import SamplingConfig, TransformersConfig
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.prompts import PromptsConfig
from draftfeed_producer.service import ProducerService
from draftfeed_producer.spool import SpoolConfig
from draftfeed_producer.target import TargetConfig
from draftfeed_proto.sample import Sample
from transport_states import exists, save

PROMPTS = Path(smollm2.__file__).parent / "data" / "prompts.jsonl"
LIMIT_SECONDS = 600.0

Say = Callable[[str], None]


class Recipe(NamedTuple):
    """Of a set: how many different samples, and how long they are."""

    samples: int
    tokens: int
    """wide: rows of each; smollm2: new tokens of each, at most."""


def prepare(name: str, recipe: Recipe, say: Say) -> Path:
    """The directory of a set, made now if it is not in the user's cache yet."""
    key = hashlib.sha256(json.dumps([name, recipe, PROMPTS.read_text()]).encode()).hexdigest()[:16]
    directory = smollm2.default_cache_dir() / "bench-transport" / f"{name}-{key}"
    if not exists(directory):
        say(f"{name}: {recipe.samples} samples are made, once")
        samples = _wide(recipe) if name == "wide" else _captured(recipe)
        save(directory, samples)
    return directory


def _wide(recipe: Recipe) -> list[np.ndarray]:
    return [fp16_of_bf16(wide_states(recipe.tokens, n)) for n in range(recipe.samples)]


def _captured(recipe: Recipe) -> list[np.ndarray]:
    """By a producer with the transformers engine, while it generates in bf16."""
    samples: list[np.ndarray] = []
    with tempfile.TemporaryDirectory(prefix="draftfeed-capture-") as directory:
        sampling = SamplingConfig(max_new_tokens=recipe.tokens)
        engine = TransformersConfig(dtype="bfloat16", sampling=sampling)
        config = ProducerConfig(
            engine=engine,
            target=TargetConfig(path=str(smollm2.prepare())),
            prompts=PromptsConfig(path=str(PROMPTS)),
            spool=SpoolConfig(dir=Path(directory), fsync="never"),
            server=ServerConfig(bind="tcp://127.0.0.1:*"),
        )

        def keep(sample: Sample) -> None:
            if len(samples) < recipe.samples:
                samples.append(np.ascontiguousarray(sample.hidden_states))
            if len(samples) == recipe.samples:
                service.stop()

        service = ProducerService(config, keep)
        limit = threading.Timer(LIMIT_SECONDS, service.stop)
        limit.start()
        try:
            service.run()
        finally:
            limit.cancel()
    if len(samples) < recipe.samples:
        raise SystemExit(f"the engine made {len(samples)} of {recipe.samples} samples")
    return samples
