"""A tiny target, and a spool with samples that the real engine made of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tiny_models
from draftfeed_producer.engines import SamplingConfig, TransformersConfig
from draftfeed_producer.engines.transformers import TransformersEngine
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_producer.target import TargetConfig, load_target
from draftfeed_proto.descriptor import Final
from draftfeed_proto.ids import SampleId, Shards
from draftfeed_proto.sample import Sample

DATASET = "f" * 16
LAYER_IDS = (0, 2, 3, 5)
"""The last one is the target's last block."""
LAYERS = 6


def make_qwen3(directory: Path) -> Path:
    tiny_models.make_tokenizer(directory)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        head_dim=16,
        **tiny_models.SIZES,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_target(directory: Path, make: Callable[[Path], Path] = make_qwen3) -> Path:
    """Its final norm has weights of its own: with all ones, a norm that is applied twice does what
    it does once, and a state after the norm would pass for one before it. Its head, which drafters
    take over as it is, is one that can tell tokens apart."""
    path = make(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.no_grad():
        norm = model.get_decoder().norm.weight
        norm.copy_(torch.linspace(0.25, 4.0, len(norm))[torch.randperm(len(norm))])
        model.get_output_embeddings().weight.mul_(8)
    model.save_pretrained(path)
    return path


def fill(
    directory: Path,
    target: Path,
    layer_ids: tuple[int, ...],
    count: int,
    new_tokens: int = 24,
    texts: list[str] | None = None,
    final: Final = "none",
) -> list[Sample]:
    """The samples, in the order in which the spool has them.

    texts: what the user says, of which the first `count` are taken; None: random tokens.
    """
    config = TransformersConfig(
        dtype="float32",
        batch_size=16,
        threads=1,
        sampling=SamplingConfig(max_new_tokens=new_tokens),
    )
    loaded = load_target(TargetConfig(path=str(target)))
    engine = TransformersEngine(config, loaded, layer_ids, final=final)
    spool = Spool(SpoolConfig(dir=directory), engine.descriptor, Shards(DATASET, 0, (0, 1)))
    prompts = _prompts(count) if texts is None else _chats(loaded.tokenizer, texts[:count])
    samples = list(engine.run(iter(prompts)))
    for sample in samples:
        spool.append(sample)
    spool.close()
    engine.close()
    return samples


def _prompts(count: int) -> list[Prompt]:
    rng = np.random.default_rng(5)
    lengths = rng.integers(3, 12, count)
    ids = [rng.integers(3, 400, length).astype(np.int32) for length in lengths]
    return [Prompt(SampleId(DATASET, 0, 0, i), f"p{i}", x) for i, x in enumerate(ids)]


def _chats(tokenizer: Any, texts: list[str]) -> list[Prompt]:
    return [
        Prompt(SampleId(DATASET, 0, 0, i), f"p{i}", np.array(ids, np.int32))
        for i, ids in enumerate(
            tokenizer.apply_chat_template(
                [[{"role": "user", "content": text}] for text in texts],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
    ]
