"""The DFlash drafter: its shape from the target's, its first weights, its training model.

SpecForge's classes, built the same way for training and for evaluation. This module needs the
`specforge` extra; `specforge.check` says so in one line before anything here is imported.
"""

import json
import pickle
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.trainers.specforge_checkpoints import STATE_FILE
from draftfeed_consumer.trainers.target_weights import (
    TargetWeights,
    attention_on,
    frozen_parts,
    read_config,
)

with warnings.catch_warnings():
    # SpecForge misses flash_attn in a module that is not used here.
    warnings.simplefilter("ignore")
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.training.model_loading import load_draft_config_source

Init = Literal["random", "target"]
PLAIN_TARGETS = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types whose norms multiply by w and whose blocks are the drafter's. Others (Gemma,
Qwen3.5) multiply by 1 + w: their weights mean something else here."""


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True, tag="dflash"):
    """Everything that decides what the drafter is, and what its weights are before training."""

    layer_ids: tuple[int, ...]
    """Of the stream. SpecForge's `target_layer_ids` are the same numbers: id k is the output of
    block k, which its inference reads from `hidden_states[k + 1]`."""
    num_target_layers: int
    architecture: dict[str, Any]
    """Qwen3 configuration of the drafter's blocks, copied from the target's."""
    num_layers: int
    block_size: int
    mask_token_id: int
    num_anchors: int
    gamma: float
    objective_chunk_blocks: int
    init: Init
    seed: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def to_specforge(self) -> dict[str, Any]:
        """config.json of the drafter, as z-lab publishes its own, and SpecForge, SGLang and
        speculators read it."""
        return {
            **self.architecture,
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.layer_ids),
            },
            "num_hidden_layers": self.num_layers,
            "num_target_layers": self.num_target_layers,
            "layer_types": ["full_attention"] * self.num_layers,
            "max_window_layers": self.num_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "dtype": self.dtype,
        }


def read_architecture(target: Path) -> tuple[dict[str, Any], int]:
    """(what a drafter's blocks take over from the target's config.json, number of its blocks)

    Raises TrainerError.
    """
    config = read_config(target)
    config = config.get("text_config", config)
    try:
        return _architecture(config), config["num_hidden_layers"]
    except KeyError as error:
        raise TrainerError(f"target {target}: its config.json has no {error}") from None


def _architecture(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return {
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        "hidden_act": config.get("hidden_act", "silu"),
        "initializer_range": config.get("initializer_range", 0.02),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
    }


def pick_mask_token(target: Path) -> int:
    """The last special token of the tokenizer that neither begins, ends nor pads a text.

    It stands for "not known yet" in a block, so it must be one that is never generated.
    """
    config = read_config(target)
    used = {config.get(f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
    path = target / "tokenizer.json"
    added = json.loads(path.read_text()).get("added_tokens", []) if path.is_file() else []
    spare = [token for token in added if token["special"] and token["id"] not in used]
    free: list[int] = [token["id"] for token in spare]
    if not free:
        raise TrainerError(
            f"options.mask_token_id is needed: the tokenizer in {target} has no spare special token"
        )
    return max(free)


def build_drafter(config: DraftConfig, target: Path, attention: str = "sdpa") -> Any:
    """The untrained drafter, in fp32. The same config and target always give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        drafter = make_drafter(config.to_specforge(), attention)
        if config.init == "target":
            _start_from_target(drafter, config, target)
    return drafter


def make_drafter(config: dict[str, Any], attention: str = "sdpa") -> Any:
    """SpecForge's DFlashDraftModel of a drafter's config.json, in fp32, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        hf_config = load_draft_config_source(str(path))
    hf_config._attn_implementation = attention
    make: Any = DFlashDraftModel  # what its registration decorator returns has no usable type
    return make(hf_config).float()


@torch.no_grad()
def _start_from_target(drafter: Any, config: DraftConfig, target: Path) -> None:
    """Blocks and norm from the target's last ones, `fc` close to the mean over the tapped layers.

    A residual stream has a few channels far larger than the rest. A random `fc` mixes
    them into every output, so that all tokens look alike to a drafter which has just begun.
    """
    weights = TargetWeights(target)
    model_type = weights.config["model_type"]
    if model_type not in PLAIN_TARGETS:
        raise TrainerError(
            f'options.init = "target" is for {", ".join(PLAIN_TARGETS)}, and this target is '
            f'{model_type!r}; use init = "random"'
        )
    layers = len(config.layer_ids)
    mean = torch.eye(config.architecture["hidden_size"]).repeat(1, layers) / layers
    drafter.fc.weight.copy_(mean + 0.01 * torch.randn_like(drafter.fc.weight))
    weights.copy_into(drafter.norm, "norm")
    first = config.num_target_layers - config.num_layers
    for position, block in enumerate(drafter.layers):
        weights.copy_into(block, f"layers.{first + position}")


def build_training_model(
    config: DraftConfig, target: Path, device: str = "cpu"
) -> OnlineDFlashModel:
    """Drafter, target's embedding and head (frozen), and the DFlash loss over them."""
    attention = attention_on(device)
    drafter = build_drafter(config, target, attention)
    shape = config.architecture
    frozen = frozen_parts(target, shape["hidden_size"], shape["vocab_size"], config.torch_dtype)
    return OnlineDFlashModel(
        draft_model=drafter.to(config.torch_dtype),
        target_lm_head=frozen.lm_head,
        target_embed_tokens=frozen.embed_tokens,
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
        attention_backend=attention,
        num_anchors=config.num_anchors,
        loss_decay_gamma=config.gamma,
        objective_chunk_blocks=config.objective_chunk_blocks,
    ).to(device)


def load_weights(drafter: torch.nn.Module, checkpoint: Path) -> None:
    """A checkpoint's weights into a drafter. Raises TrainerError when they do not fit it."""
    state = read_state(checkpoint)["draft_state_dict"]
    try:
        drafter.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    except RuntimeError as error:
        raise TrainerError(f"{checkpoint} holds another drafter: {misfit(error)}") from error


def misfit(error: RuntimeError) -> str:
    """The first of the many lines that torch has to say of weights that do not fit."""
    lines = [line.strip() for line in str(error).splitlines()]
    return lines[1] if len(lines) > 1 else lines[0]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What rank 0 saved. Raises TrainerError."""
    path = checkpoint / STATE_FILE
    if not path.is_file():
        raise TrainerError(f"{checkpoint} is not a checkpoint: it has no {STATE_FILE}")
    # Only mappings, numbers and tensors are in there, but SpecForge saves tuples of its own too.
    try:
        state = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        first_line = str(error).partition("\n")[0]
        raise TrainerError(f"{path} cannot be read as a checkpoint: {first_line}") from error
    assert isinstance(state, dict)
    return state


def save_config(config: Any, output_dir: Path) -> None:
    """`config.json` for those who serve the drafter, `drafter.json` for our own evaluation."""
    (output_dir / "config.json").write_text(json.dumps(config.to_specforge(), indent=2))
    (output_dir / "drafter.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))


class _Tagged(msgspec.Struct):
    type: str


def load_config(output_dir: Path) -> DraftConfig:
    """The DFlash drafter that a run in this directory trains. Raises TrainerError."""
    path = output_dir / "drafter.json"
    if not path.is_file():
        raise TrainerError(f"{output_dir} has no drafter.json: nothing was trained there")
    data = path.read_bytes()
    try:
        if msgspec.json.decode(data, type=_Tagged).type == "eagle3":
            raise TrainerError(
                f"{output_dir} trains an EAGLE-3 drafter; this is for DFlash drafters"
            )
        return msgspec.json.decode(data, type=DraftConfig)
    except msgspec.DecodeError as error:
        raise TrainerError(f"{path} is damaged: {error}") from None
