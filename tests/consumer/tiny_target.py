"""A random target that is too small to be slow, and samples of it."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftfeed_consumer.trainers import TrainerRun
from memory_stream import Item, descriptor, make_item, sample_id

LAYER_IDS = (1, 2, 4)
LAYERS, HIDDEN, VOCAB = 6, 32, 128
DESCRIPTOR = descriptor(LAYER_IDS, LAYERS, HIDDEN, VOCAB)
PROMPT_TOKENS = 4


def make(directory: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
        )
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def items(count: int, rows: int = 20) -> list[Item]:
    return [item(ordinal, rows) for ordinal in range(count)]


def item(ordinal: int, rows: int = 20, prompt_tokens: int = PROMPT_TOKENS) -> Item:
    random = torch.Generator().manual_seed(ordinal)
    input_ids = torch.randint(4, VOCAB, (rows + 1,), generator=random)
    states = torch.randn(rows, len(LAYER_IDS), HIDDEN, generator=random)
    return make_item(sample_id(ordinal), input_ids, prompt_tokens, states)


def run(target: Path, output_dir: Path, **options: object) -> TrainerRun:
    settings = {"mask_token_id": 3, "num_anchors": 4, "block_size": 4, **options}
    return TrainerRun(target=target, output_dir=output_dir, options=settings)
