"""Targets of which only tokenizer, chat template and config matter."""

import json
from pathlib import Path
from typing import Any

import tiny_models

CONTEXT = 4096
THINKING = ["<think>", "</think>"]
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% if loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""Thinks unless told not to; an answer without thinking gets an empty block."""
OPENING = QWEN3.replace(
    "<|im_start|>assistant\n{% if enable",
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% endif %}{% if enable",
)
"""Its prompts begin the thinking, as those of Qwen3.6 do."""
DROPPING = QWEN3.replace("{{ m.reasoning_content or '' }}", "")
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Knows no thinking."""
CLOSED = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
"""Its prompts end the thinking, whatever is asked for."""


def make_target(path: Path, template: str, **config_fields: Any) -> Path:
    """A directory that `load_target` takes; its weights are none."""
    tokenizer: Any = tiny_models.make_tokenizer(path)
    tokenizer.add_special_tokens({"additional_special_tokens": THINKING})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "head_dim": 16,
        **tiny_models.SIZES,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        **config_fields,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path
