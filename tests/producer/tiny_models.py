"""Tiny random targets on disk, and what a full forward pass says of them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5 import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

VOCAB = 512
EOS = 2
HIDDEN = 512
"""Wide for a tiny model: fp32 noise now and then rounds one channel to the other bf16 neighbour,
and among 128 channels that one alone can be more than 1e-3 of a row. It also makes random
blocks add enough to their input that one layer is told from the next."""
LOST_CHANNELS = 4
"""Of each row of every layer, the last ones: so small that fp16 has zeros for them."""
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "bos_token_id": None,
}


def make_tokenizer(path: Path) -> Any:
    """Byte-level BPE whose special tokens are 0 (padding), 1 and 2 (end of turn)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox says hello to a small tokenizer"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return fast


def make_llama(path: Path) -> Path:
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=4, **SIZES)
    return _save(LlamaForCausalLM, config, path)


def make_qwen3(path: Path) -> Path:
    config = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=6, head_dim=32, **SIZES
    )
    return _save(Qwen3ForCausalLM, config, path)


def make_qwen35(path: Path) -> Path:
    """The hybrid: three Gated DeltaNet layers to one of attention."""
    return _save(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_qwen35_text()), path)


def make_qwen35_multimodal(path: Path) -> Path:
    """The same inside the wrapper with a vision tower that real checkpoints have."""
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
    }
    config = Qwen3_5Config(
        text_config=_qwen35_text(),
        vision_config=vision,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
        tie_word_embeddings=False,
    )
    return _save(Qwen3_5ForConditionalGeneration, config, path)


def _qwen35_text() -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "full_attention_interval": 4,  # the same, as SGLang reads it
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        **SIZES,
    }


def _save(cls: Any, config: Any, path: Path) -> Path:
    make_tokenizer(path)
    torch.manual_seed(0)
    model = cls(config)
    _lose_channels(model)
    _weigh_final_norm(model)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@torch.no_grad()
def _weigh_final_norm(model: Any) -> None:
    """As trained targets have them. New ones are all 1, and a norm that is applied twice then does
    what it does once: a final state after the norm would pass for one before it."""
    norm = model.get_decoder().norm
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(1))
    # What a new norm multiplies by, 1, is kept as a weight of 1 or of 0.
    norm.weight += torch.linspace(0.25, 4.0, HIDDEN)[order] - 1


@torch.no_grad()
def _lose_channels(model: Any) -> None:
    """The embedding's values, to which no block adds: known without a forward pass."""
    lost = slice(-LOST_CHANNELS, None)
    embedding = model.get_input_embeddings().weight
    # Padding's is all zero, and a random model can sample it: a gated first block keeps it zero.
    embedding[0] = -embedding[1]
    embedding[:, lost] = 2.0**-40
    for layer in model.get_decoder().layers:
        linear = hasattr(layer, "linear_attn")
        mixer_out = layer.linear_attn.out_proj if linear else layer.self_attn.o_proj
        for projection in (mixer_out, layer.mlp.down_proj):
            projection.weight[lost] = 0
