"""A drafter on disk: what a run saves, and the Hugging Face directory that others load.

    CHECKPOINT                      output_dir/drafter-3.17-step4200, with the run's drafter.json
                                    beside it
    output_dir                      of a run: its newest checkpoint
    config.json, model.safetensors  as z-lab publishes its drafters, and `export` writes ours

`dflash_config.target_layer_ids` are the stream's layer ids: k is the output of block k. The tools
that read the directory add one where they count otherwise (SpecForge and SGLang themselves,
speculators when it converts).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftfeed_consumer.errors import DrafterError, TrainerError
from draftfeed_consumer.trainers.dflash import (
    load_config,
    make_drafter,
    misfit,
    read_architecture,
    read_state,
)
from draftfeed_consumer.trainers.specforge_checkpoints import STATE_FILE, latest_checkpoint

ARCHITECTURE = "DFlashDraftModel"
_NEEDED = ("block_size", "num_hidden_layers", "num_target_layers", "hidden_size", "vocab_size")


class DrafterFiles(NamedTuple):
    config: dict[str, Any]
    """config.json"""
    weights: dict[str, torch.Tensor]
    path: Path
    """Where they lie."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self.config["dflash_config"]["target_layer_ids"])


def read(path: Path) -> DrafterFiles:
    """Raises DrafterError, in one line."""
    try:
        if (path / STATE_FILE).is_file():
            return _read_checkpoint(path, path.parent)
        if (path / "drafter.json").is_file():
            newest = latest_checkpoint(path)
            if newest is None:
                raise DrafterError(f"{path} has no complete checkpoint yet")
            return _read_checkpoint(newest, path)
    except TrainerError as error:
        raise DrafterError(error.reason) from None
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return _read_directory(path)
    raise DrafterError(
        f"{path} is no drafter: neither a checkpoint, nor a run's output_dir, nor a directory with "
        "config.json and *.safetensors"
    )


def check_target(drafter: DrafterFiles, target: Path) -> None:
    """Raises DrafterError when the drafter cannot be of this target: its shape is another.

    The layers' ids are compared too; that the weights are those it was trained on cannot be seen.
    """
    try:
        architecture, blocks = read_architecture(target)
    except TrainerError as error:
        raise DrafterError(error.reason) from None
    theirs = {**architecture, "num_target_layers": blocks}
    for name in ("hidden_size", "vocab_size", "num_target_layers"):
        if drafter.config[name] != theirs[name]:
            raise DrafterError(
                f"{drafter.path} is of another target: its {name} is {drafter.config[name]}, "
                f"that of {target} is {theirs[name]}"
            )
    if not all(0 <= layer < blocks for layer in drafter.layer_ids):
        raise DrafterError(
            f"{drafter.path} reads layers {drafter.layer_ids}, and {target} has {blocks}"
        )


def load(drafter: DrafterFiles) -> Any:
    """SpecForge's DFlashDraftModel, in fp32 on the CPU. Raises DrafterError."""
    try:
        model = make_drafter(drafter.config)
    # SpecForge and transformers raise almost anything on a config that is not theirs.
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DrafterError(f"{drafter.path}: SpecForge cannot use its config: {reason}") from None
    try:
        model.load_state_dict({name: tensor.float() for name, tensor in drafter.weights.items()})
    except RuntimeError as error:
        reason = misfit(error)
        raise DrafterError(f"{drafter.path}: its weights do not fit its config: {reason}") from None
    return model.eval()


def export(drafter: DrafterFiles, out: Path, dtype: str) -> None:
    """Write the Hugging Face directory `out`, which must exist and be empty.

    dtype: of the weights, by torch's name. config.json comes last: without it the directory is no
    drafter. Raises OSError.
    """
    config = {**drafter.config, "dtype": dtype}
    torch_dtype = getattr(torch, dtype)
    weights = {name: tensor.to(torch_dtype) for name, tensor in drafter.weights.items()}
    file = out / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # it may be another user who serves it, and safetensors thinks not
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _read_checkpoint(checkpoint: Path, output_dir: Path) -> DrafterFiles:
    config = load_config(output_dir).to_specforge()
    state = read_state(checkpoint)
    if "draft_state_dict" not in state:
        raise DrafterError(f"{checkpoint / STATE_FILE} has no drafter in it")
    return DrafterFiles(config, state["draft_state_dict"], checkpoint)


def _read_directory(path: Path) -> DrafterFiles:
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise DrafterError(f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("architectures") != [ARCHITECTURE]:
        raise DrafterError(f"{path / 'config.json'} is not of a {ARCHITECTURE}")
    inner = config.get("dflash_config") or {}
    # Newer drafters of z-lab's have it in there.
    config.setdefault("block_size", inner.get("block_size"))
    missing = [name for name in _NEEDED if config.get(name) is None]
    missing += [name for name in ("target_layer_ids", "mask_token_id") if inner.get(name) is None]
    if missing:
        raise DrafterError(f"{path / 'config.json'} has no {missing[0]}")
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise DrafterError(f"{file} cannot be read: {error}") from None
    return DrafterFiles(config, weights, path)
