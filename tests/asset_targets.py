"""Model directories for the target's files: small, but made and sharded by transformers itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
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


def make_plain(directory: Path, vocab: int = 1 << 16, hidden: int = HIDDEN, seed: int = 0) -> Path:
    """No model, but the ends of one, as fp16: by default 16 MiB, five pieces."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    shape = (vocab, hidden)
    values = {name: random.integers(0, 1 << 14, shape, np.uint16) for name in ("embed", "head")}
    save_file(
        {
            "model.embed_tokens.weight": values["embed"].view(np.float16),
            "lm_head.weight": values["head"].view(np.float16),
            "model.norm.weight": np.ones(hidden, np.float16),
        },
        directory / "model.safetensors",
    )
    config = {"vocab_size": vocab, "hidden_size": hidden, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
