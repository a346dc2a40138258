"""`[trainer.options]` of kind = "specforge". Needs nothing but this package."""

import difflib
import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from draftfeed_consumer.errors import TrainerError

AlgorithmName = Literal["dflash", "eagle3"]
_OF_ONE_ALGORITHM: dict[str, AlgorithmName] = {
    "num_layers": "dflash",
    "block_size": "dflash",
    "mask_token_id": "dflash",
    "num_anchors": "dflash",
    "gamma": "dflash",
    "init": "dflash",
    "objective_chunk_blocks": "dflash",
    "ttt_length": "eagle3",
}


class SpecForgeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    algorithm: AlgorithmName = "dflash"
    """"eagle3" needs a stream of three layers and the target's final state after its norm."""
    num_layers: int = 1
    block_size: int = 8
    mask_token_id: int | None = None
    """Default: the last spare special token of the target's tokenizer."""
    num_anchors: int = 16
    """Blocks a sample is trained on. The cost of a step is proportional to anchors x block."""
    gamma: float = 4.0
    """Label k of a block weighs exp(-(k-1)/gamma)."""
    init: Literal["random", "target"] = "random"
    """"target" starts from copies of the target's last blocks and norm."""
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    batch_size: int = 1
    accumulation_steps: int = 1
    save_interval_steps: int = 100
    max_checkpoints: int = 2
    log_interval_steps: int = 10
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" is a GPU where torch sees one."""
    objective_chunk_blocks: int = 0
    """Blocks whose logits exist at a time; each part is computed twice. 0: all, once."""
    ttt_length: int = 7
    """EAGLE-3's: how many of its own steps a drafter is trained through."""
    resume_from: str | None = None
    """A checkpoint directory, or "latest": the newest one in output_dir, if there is one."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "num_anchors",
            "ttt_length",
            "batch_size",
            "accumulation_steps",
            "save_interval_steps",
            "max_checkpoints",
            "log_interval_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.block_size < 2:
            raise ValueError("block_size must be at least 2: its first token is given")

    @property
    def window(self) -> int:
        """Samples of one optimizer step."""
        return self.batch_size * self.accumulation_steps


def parse_options(options: dict[str, Any]) -> SpecForgeOptions:
    """Raises TrainerError, which names the option."""
    known = SpecForgeOptions.__struct_fields__
    for key in options.keys() - set(known):
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        raise TrainerError(f"unknown key 'options.{key}'; {hint}")
    _check_choices(options)
    try:
        parsed = msgspec.convert(options, SpecForgeOptions)
    except msgspec.ValidationError as error:
        raise TrainerError(re.sub(r"`\$\.?([^`]*)`", r"options.\1", str(error))) from None
    for key in options:
        owner = _OF_ONE_ALGORITHM.get(key, parsed.algorithm)
        if owner != parsed.algorithm:
            raise TrainerError(
                f"options.{key} is for algorithm = {owner!r}, and algorithm is {parsed.algorithm!r}"
            )
    return parsed


def _check_choices(options: dict[str, Any]) -> None:
    for key, kind in get_type_hints(SpecForgeOptions).items():
        if key in options and get_origin(kind) is Literal and options[key] not in get_args(kind):
            choices = ", ".join(map(repr, get_args(kind)))
            raise TrainerError(f"options.{key} must be one of {choices}, not {options[key]!r}")
