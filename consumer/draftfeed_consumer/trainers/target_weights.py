"""What trainers take over from a target's directory: its config, embedding, head, single tensors.

SpecForge has a loader, too. It knows the names of plain language models only (in a multimodal one,
Qwen3.5 and 3.6 among them, the embedding has another), wants an index beside several files, and
takes the head for tied where the config of a text model inside another does not say otherwise.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from draftfeed_consumer.errors import TrainerError

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""Of the text model, in a checkpoint of its own and inside a multimodal one."""
_EMBEDDINGS = tuple(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


class FrozenParts(NamedTuple):
    """On the CPU, in evaluation mode, without gradients."""

    embed_tokens: torch.nn.Embedding
    """[vocabulary, H]"""
    lm_head: torch.nn.Linear
    """The same weight where the target has no head of its own."""


def read_config(target: Path) -> dict[str, Any]:
    """Raises TrainerError."""
    try:
        config = json.loads((target / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise TrainerError(f"target {target}: its config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise TrainerError(f"target {target}: its config.json is not a mapping")
    return config


class TargetWeights:
    """Single tensors out of a target's safetensors files."""

    def __init__(self, target: Path) -> None:
        """Reads the names. Raises TrainerError."""
        self._target = target
        self.config = read_config(target)
        self._file_of: dict[str, Path] = {}
        for path in sorted(target.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._file_of.update(dict.fromkeys(file.keys(), path))
            except (OSError, SafetensorError) as error:
                reason = str(error).partition("\n")[0]
                raise TrainerError(
                    f"target {target}: {path.name} cannot be read: {reason}"
                ) from None

    def first(self, names: Iterable[str]) -> str | None:
        """Of these the first that there is."""
        return next((name for name in names if name in self._file_of), None)

    def tensor(self, name: str) -> torch.Tensor:
        """Raises KeyError."""
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._file_of[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def copy_into(self, module: torch.nn.Module, name: str) -> None:
        """Every parameter of the module that `model.<name>` has in the same shape."""
        for key, parameter in module.named_parameters():
            full = f"model.{name}.{key}"
            if full in self._file_of and self.shape(full) == tuple(parameter.shape):
                parameter.copy_(self.tensor(full).float())


def check_frozen(target: Path, hidden: int, vocabulary: int) -> tuple[TargetWeights, str, str]:
    """(weights, name of the embedding, name of the head: the embedding's when it is tied), looked
    at and not loaded. Raises TrainerError."""
    weights = TargetWeights(target)
    embedding, head = weights.first(_EMBEDDINGS), weights.first(_HEADS)
    if embedding is None:
        looked_for = " or ".join(_EMBEDDINGS)
        raise TrainerError(f"target {target}: there is no {looked_for} in *.safetensors")
    tied = _tied(weights.config)
    if head is None and tied is False:
        raise TrainerError(f"target {target}: there is no {' or '.join(_HEADS)} in *.safetensors")
    head = embedding if head is None or tied else head
    for name in (embedding, head):
        rows, *others = weights.shape(name)
        if others != [hidden] or rows < vocabulary:
            raise TrainerError(
                f"target {target}: {name} has shape {[rows, *others]}, and config.json says "
                f"vocab_size {vocabulary} and hidden_size {hidden}"
            )
    return weights, embedding, head


def _tied(config: dict[str, Any]) -> bool | None:
    """What it says itself and in its text model's part; None when it says nothing."""
    parts = (config, config.get("text_config"))
    said = [part["tie_word_embeddings"] for part in parts if part and "tie_word_embeddings" in part]
    return all(said) if said else None


def frozen_parts(target: Path, hidden: int, vocabulary: int, dtype: torch.dtype) -> FrozenParts:
    """Raises TrainerError."""
    weights, embedding, head = check_frozen(target, hidden, vocabulary)
    matrices = {name: weights.tensor(name)[:vocabulary].to(dtype) for name in {embedding, head}}
    embed_tokens = torch.nn.Embedding(vocabulary, hidden, device="meta")
    lm_head = torch.nn.Linear(hidden, vocabulary, bias=False, device="meta")
    embed_tokens.weight = torch.nn.Parameter(matrices[embedding], requires_grad=False)
    lm_head.weight = torch.nn.Parameter(matrices[head], requires_grad=False)
    return FrozenParts(embed_tokens.eval(), lm_head.eval())


def attention_on(device: str) -> str:
    """SpecForge's attention for a device. Its masks of blocks and their contexts are sparse, which
    flex_attention makes use of, once it is compiled for a GPU."""
    return "flex_attention" if device.startswith("cuda") else "sdpa"
