"""The target's final norm, undone: a state before it that does what the true one does.

Some trainers apply the norm themselves and want the state before it; SGLang gives out the state
after. An RMSNorm (Zhang and Sennrich, arXiv 1910.07467) makes of x [H]

    y = g * x / sqrt(mean(x**2) + eps)

and of c * x the same y, for any c > 0 and while mean(x**2) is large against eps. How long x was is
lost in y, and does not matter: norm and head make of y / g what they make of x. g is the norm's
weight, or 1 + weight: which of the two, the architecture says, and nothing in the files does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from draftfeed_consumer.errors import FinalNormError

ADDED = {"llama": 0.0, "qwen3": 0.0, "qwen3_5": 1.0, "qwen3_5_text": 1.0}
"""By `model_type` of config.json, what g has over the weight. Only architectures of which a test
has proved it: with the wrong one everything has the right shape, and labels are wrong."""
WEIGHTS = (
    "model.norm.weight",
    "model.language_model.norm.weight",
    "language_model.model.norm.weight",
)
TOLERANCE = 0.02
"""Of the mean square of y / g, which is 1. A target in bf16 rounds twice, and is 0.008 off at the
most, when one channel outweighs all others. Logits are off by half as much."""
_BLOCK_ROWS = 1024


class FinalNorm:
    """What the final norm of one target multiplies by."""

    def __init__(self, path: Path, scale: torch.Tensor) -> None:
        """path: of the target, for people. scale: float32 [H], g. Raises FinalNormError."""
        self._path, self.scale = path, scale
        lost = int((scale == 0).sum())
        if not bool(scale.isfinite().all()):
            raise FinalNormError(f"{path}: the weight of its final norm is not finite")
        if lost:
            raise FinalNormError(
                f"{path}: its final norm multiplies {lost} of {len(scale)} channels by 0: what "
                "they held before is not in the state after it"
            )

    def undone(self, final_states: torch.Tensor) -> torch.Tensor:
        """States before the norm, values up to sqrt(H), for states after it.

        final_states: fp16, bf16 or fp32 [n, H]; what is returned, too. Computed in fp32 and rounded
        once. Where g is tiny, rounding of y is large in y / g, and as small as before in what the
        norm makes of that.

        Raises FinalNormError for states that this norm did not put out, those before it among them,
        and for such of a target that are so small that eps counts.
        """
        if final_states.shape[-1] != len(self.scale):
            raise FinalNormError(
                f"{self._path} has a hidden size of {len(self.scale)}, and the states have "
                f"{final_states.shape[-1]}"
            )
        out = torch.empty_like(final_states, memory_format=torch.contiguous_format)
        for first, rows in self._divided(final_states):
            mean_squares = rows.square().mean(-1)
            if not bool(_about_one(mean_squares).all()):
                row = int(_about_one(mean_squares).int().argmin())
                raise FinalNormError(
                    f"row {first + row} of the final state is not what the norm of {self._path} "
                    f"puts out: divided by its weights it has a mean square of "
                    f"{mean_squares[row]:.3g}, not 1; it is of another target, or the state before "
                    "the norm"
                )
            out[first : first + len(rows)] = rows
        return out

    def puts_out(self, states: torch.Tensor) -> bool:
        """Whether these states [n, H] could all be what the norm puts out."""
        parts = self._divided(states)
        return all(bool(_about_one(rows.square().mean(-1)).all()) for _, rows in parts)

    def _divided(self, states: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, float32 rows / g), a block at a time: long samples are gigabytes."""
        for first in range(0, len(states), _BLOCK_ROWS):
            yield first, states[first : first + _BLOCK_ROWS].float() / self.scale


def _about_one(mean_squares: torch.Tensor) -> torch.Tensor:
    """Not a number that is none."""
    return (mean_squares - 1).abs() <= TOLERANCE


def read_final_norm(target: Path) -> FinalNorm:
    """From a Hugging Face model directory: config.json, and one tensor of its safetensors.

    Raises FinalNormError, also for an architecture that nobody has proved this of.
    """
    kind = _model_type(target)
    if kind not in ADDED:
        raise FinalNormError(
            f"{target} is a {kind}: whether its final norm multiplies by its weight or by 1 + that "
            f"was proved for {', '.join(sorted(ADDED))} only"
        )
    return FinalNorm(target, _weight(target).float() + ADDED[kind])


def _model_type(target: Path) -> str:
    """Of the language model, which multimodal ones wrap."""
    path = target / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise FinalNormError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise FinalNormError(f"{path} is no model's config: {error}") from None
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    return str(inner.get("model_type") or config.get("model_type"))


def _weight(target: Path) -> torch.Tensor:
    """[H]"""
    for path in sorted(target.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                names = file.keys()
                if found := [name for name in WEIGHTS if name in names]:
                    weight: torch.Tensor = file.get_tensor(found[0])
                    break
        except (OSError, SafetensorError) as error:
            raise FinalNormError(f"{path} cannot be read: {error}") from None
    else:
        raise FinalNormError(f"{target} has no weight of a final norm in its *.safetensors")
    if weight.ndim != 1:
        raise FinalNormError(f"{path}: the weight of the final norm is {list(weight.shape)}")
    return weight
