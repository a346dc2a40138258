"""Samples of SmolLM2: greedy responses, states from one forward pass over each sequence."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftfeed_proto.descriptor import dflash_layer_ids
from memory_stream import Item, descriptor, make_item, sample_id

LAYER_IDS = dflash_layer_ids(30)
DESCRIPTOR = descriptor(LAYER_IDS, 30, 576, 49152)
_TOPICS = (
    "the moon",
    "rain",
    "a garden",
    "honey bees",
    "prime numbers",
    "bread",
    "glaciers",
    "sleep",
)
_FORMS = (
    "Write a short poem about {}.",
    "Explain {} to a child.",
    "List five facts about {}.",
    "Write a Python function that prints a line about {}.",
)
PROMPTS = [form.format(topic) for topic in _TOPICS for form in _FORMS]


@torch.no_grad()
def make_samples(
    target: Path,
    new_tokens: int,
    prompts: list[str] = PROMPTS,
    layer_ids: tuple[int, ...] = LAYER_IDS,
) -> list[Item]:
    """With the final state after the norm, too."""
    tokenizer: Any = AutoTokenizer.from_pretrained(target, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    generated = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
    width = batch["input_ids"].shape[1]
    return [
        _sample(
            model, layer_ids, tokenizer.eos_token_id, ordinal, prompt[mask.bool()], tokens[width:]
        )
        for ordinal, (prompt, mask, tokens) in enumerate(
            zip(batch["input_ids"], batch["attention_mask"], generated, strict=True)
        )
    ]


def _sample(
    model: Any,
    layer_ids: tuple[int, ...],
    eos: int,
    ordinal: int,
    prompt: torch.Tensor,
    response: torch.Tensor,
) -> Item:
    ends = (response == eos).nonzero()
    if len(ends):
        response = response[: int(ends[0]) + 1]
    ids = torch.cat([prompt, response])
    states = forward_states(model, ids[:-1], layer_ids).bfloat16()
    final = model.model(ids[None, :-1]).last_hidden_state[0].bfloat16()
    return make_item(sample_id(ordinal), ids, len(prompt), states, final)


def forward_states(model: Any, input_ids: torch.Tensor, layer_ids: tuple[int, ...]) -> torch.Tensor:
    """[n] ids -> [n, L, H]: what each of the blocks puts out."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs[layer] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    hooks = [model.model.layers[layer].register_forward_hook(keep(layer)) for layer in layer_ids]
    model.model(input_ids[None])
    for hook in hooks:
        hook.remove()
    hidden = model.config.hidden_size
    return torch.stack([outputs[layer].reshape(-1, hidden) for layer in layer_ids], dim=1)
