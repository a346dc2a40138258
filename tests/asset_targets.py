"""Model directories for the target's files: small, but made and sharded by transformers itself."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from tiny_models import make_tokenizer

VOCAB, HIDDEN, LAYERS = 512, 64, 3


def make_llama(
    directory: Path, *, tied: bool = False, shards: bool = False, vocab: int = VOCAB
) -> Path:
    """SmolLM2's architecture, in bf16; with `shards` one file for each few tensors."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    make_tokenizer(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        with torch.no_grad():
            model.model.norm.weight.uniform_(0.5, 1.5)
    size = "30KB" if shards else "5GB"
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size=size)
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All that its safetensors files hold."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                assert name not in found
                found[name] = file.get_tensor(name)
    return found
