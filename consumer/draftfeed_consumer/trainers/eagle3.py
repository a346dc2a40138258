"""The EAGLE-3 drafter: its shape from the target's, its first weights, its training model.

SpecForge's classes. The drafter reads three layers of the target, and learns the target's own
distribution, which is the target's head over its final state after the norm. Its vocabulary is the
whole of the target's: a smaller one would have to be counted from samples that are yet to come.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch

from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.trainers.target_weights import attention_on, frozen_parts
from draftfeed_proto.descriptor import Descriptor

LAYERS = 3


class Eagle3Config(msgspec.Struct, frozen=True, kw_only=True, tag="eagle3"):
    """Everything that decides what the drafter is, and what its weights are before training."""

    layer_ids: tuple[int, ...]
    """Of the stream: id k is the output of block k. SGLang adds one, since it captures before a
    block."""
    num_target_layers: int
    architecture: dict[str, Any]
    """Llama configuration of the drafter's one block, copied from the target's."""
    ttt_length: int
    seed: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def to_specforge(self) -> dict[str, Any]:
        """config.json of the drafter, as SpecForge writes it and SGLang reads it."""
        return {
            **self.architecture,
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": self.architecture["vocab_size"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.layer_ids),
                "use_aux_hidden_state": True,
            },
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "dtype": self.dtype,
        }


def check_stream(descriptor: Descriptor) -> None:
    """Raises TrainerError for a stream that EAGLE-3 cannot be trained on."""
    check_layers(descriptor.layer_ids, descriptor.num_layers)
    if descriptor.final != "postnorm":
        raise TrainerError(
            'algorithm = "eagle3" learns from the target\'s final state after its norm, and the '
            f'stream has final = {descriptor.final!r}; set final = "postnorm" in producer.toml'
        )


def check_layers(layer_ids: tuple[int, ...], blocks: int) -> None:
    """Raises TrainerError. blocks: of the target."""
    if len(layer_ids) == LAYERS:
        return
    usual = [1, blocks // 2 - 1, blocks - 4]
    hint = f"; EAGLE-3 usually takes {usual}" if usual == sorted(set(usual)) else ""
    raise TrainerError(
        f'algorithm = "eagle3" reads {LAYERS} layers, and these are {list(layer_ids)}{hint}: set '
        "[target] layer_ids in producer.toml"
    )


def build_drafter(config: Eagle3Config, attention: str = "sdpa") -> Any:
    """SpecForge's drafter with random weights, in fp32; the same for the same config."""
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        make: Any = LlamaForCausalLMEagle3
        return make(LlamaConfig(**config.to_specforge()), attention_backend=attention).float()


def build_training_model(
    config: Eagle3Config, target: Path, device: str = "cpu"
) -> tuple[Any, Any]:
    """(SpecForge's model around the drafter, the target's frozen head). The drafter's embedding is
    the target's, and stays so."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model

    attention = attention_on(device)
    drafter = build_drafter(config, attention)
    shape = config.architecture
    frozen = frozen_parts(target, shape["hidden_size"], shape["vocab_size"], config.torch_dtype)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(frozen.embed_tokens.weight)
    drafter.freeze_embedding()
    model = OnlineEagle3Model(
        draft_model=drafter.to(config.torch_dtype),
        length=config.ttt_length,
        attention_backend=attention,
    )
    return model.to(device), _head(frozen.lm_head).to(device)


def _head(lm_head: torch.nn.Module) -> Any:
    """SpecForge's target head around weights that are here. Its own loader takes a directory with
    an index of several files and an untied head, and makes bfloat16 of what it finds."""
    from specforge.modeling.target.target_head import TargetHead

    class Head(TargetHead):  # type: ignore[misc]  # SpecForge is untyped
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.fc = lm_head

    return Head()
