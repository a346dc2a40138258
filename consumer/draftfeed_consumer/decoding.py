"""Greedy decoding, with a DFlash drafter and without one.

The loop is ours and the drafter's forward pass SpecForge's: its own loop takes back rejected
tokens by cropping the cache, which a target with recurrent layers (Qwen3.5) does not allow.
"""

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Logits closer than this are one: how many tokens a pass has changes the order of additions."""


class Speculation(NamedTuple):
    """What speculative decoding made of one prompt."""

    tokens: list[int]
    """Token ids, all of the target's choice; the last one ends the text or reaches the limit."""
    yields: list[int]
    """Of these, how many each verifying pass of the target gave: accepted drafts and, unless the
    end cut it off, one of its own. Together they are all but the first token, which the pass
    over the prompt gives."""


@torch.inference_mode()
def speculate(
    drafter: Any, model: Any, prompt: Sequence[int], max_new_tokens: int, stops: Collection[int]
) -> Speculation:
    """drafter: SpecForge's DFlashDraftModel; model: transformers' causal language model, both on
    one device and of one dtype. stops: token ids that end a text."""
    target = _Verifier(model, drafter.target_layer_ids)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    drafts_cache = DynamicCache()
    logits, states = target.read(prompt)
    tokens = [int(logits[-1].argmax())]
    yields: list[int] = []
    while not _ended(tokens, max_new_tokens, stops):
        known = len(prompt) + len(tokens) - 1  # the block begins with the last token
        block = torch.full((1, drafter.block_size), drafter.mask_token_id, device=model.device)
        block[0, 0] = tokens[-1]
        first = drafts_cache.get_seq_length()
        positions = torch.arange(first, known + drafter.block_size, device=model.device)
        hidden = drafter(
            target_hidden=states,
            noise_embedding=embed(block),
            position_ids=positions[None],
            past_key_values=drafts_cache,
            use_cache=True,
            is_causal=False,
        )
        drafts_cache.crop(-drafter.block_size)
        block[0, 1:] = head(hidden[0, 1:]).argmax(dim=-1)
        logits, states = target.verify(block[0].tolist())
        choices = logits.argmax(dim=-1)
        accepted = int((block[0, 1:] == choices[:-1]).cumprod(dim=0).sum())
        target.keep(accepted + 1)
        states = states[:, : accepted + 1]
        given = choices[: accepted + 1].tolist()
        given = given[: _length(given, max_new_tokens - len(tokens), stops)]
        tokens += given
        yields.append(len(given))
    return Speculation(tokens, yields)


@torch.inference_mode()
def greedy(
    model: Any, prompt: Sequence[int], max_new_tokens: int, stops: Collection[int]
) -> list[int]:
    """The target's own: one token a pass."""
    cache = DynamicCache(config=model.config)
    tokens: list[int] = []
    fed = list(prompt)
    while not _ended(tokens, max_new_tokens, stops):
        ids = torch.tensor([fed], device=model.device)
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        fed = [int(logits[0, -1].argmax())]
        tokens += fed
    return tokens


@torch.inference_mode()
def is_greedy(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each token is the model's first choice after those before it, as far as its dtype
    tells. But for rounding, the one sequence of which this holds is what `greedy` gives."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(ids[:, :-1], logits_to_keep=len(tokens)).logits[0].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return bool((logits.amax(dim=1) - chosen <= ROUNDING[model.dtype]).all())


class _Verifier:
    """The target, one text long: passes over drafts, of which it keeps what was accepted."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self._model, self._layer_ids = model, layer_ids
        self._cache: Any = DynamicCache(config=model.config)
        # Layers with a recurrent state or a window cannot take tokens back: a copy can.
        self._crops = all(type(layer) is DynamicLayer for layer in self._cache.layers)
        self._before: Any = None
        self._block: list[int] = []

    def read(self, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits after the prompt, [1, V], and the layers' states of it, [1, p, L * H]."""
        return self._pass(prompt, logits=1)

    def verify(self, block: list[int]) -> tuple[Tensor, Tensor]:
        """Logits after each token of a block, [b, V], and the layers' states, [1, b, L * H]."""
        self._before = None if self._crops else copy.deepcopy(self._cache)
        self._block = block
        return self._pass(block, logits=len(block))

    def keep(self, tokens: int) -> None:
        """Of the block just verified, its first `tokens` are in the text."""
        rejected = len(self._block) - tokens
        if not rejected:
            return
        if self._crops:
            self._cache.crop(-rejected)
        else:
            self._cache = self._before
            self._pass(self._block[:tokens], logits=1)

    def _pass(self, tokens: Sequence[int], logits: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([list(tokens)], device=self._model.device)
        with tapped(self._model, self._layer_ids) as states:
            output = self._model(
                ids, past_key_values=self._cache, use_cache=True, logits_to_keep=logits
            )
        return output.logits[0], torch.cat([states[id] for id in self._layer_ids], dim=-1)


@contextmanager
def tapped(model: Any, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """What a forward pass makes the blocks with these ids put out, [1, n, H] each: the states
    that the stream carries, those of the last block before the final norm."""
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    blocks = model.get_decoder().layers
    hooks = [blocks[layer].register_forward_hook(keep(layer)) for layer in layer_ids]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _ended(tokens: Sequence[int], max_new_tokens: int, stops: Collection[int]) -> bool:
    return len(tokens) >= max_new_tokens or (bool(tokens) and tokens[-1] in stops)


def _length(given: Sequence[int], room: int, stops: Collection[int]) -> int:
    """How many of the tokens count: up to the limit, or the first that ends the text."""
    for length, token in enumerate(given[:room], start=1):
        if token in stops:
            return length
    return min(room, len(given))
