"""What SpecForge trains, DFlash or EAGLE-3: which tensors of a sample it wants, and its models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from draftfeed_consumer.trainers import Item
from draftfeed_consumer.trainers.dflash import DraftConfig
from draftfeed_consumer.trainers.dflash import build_training_model as build_dflash
from draftfeed_consumer.trainers.eagle3 import Eagle3Config
from draftfeed_consumer.trainers.eagle3 import build_training_model as build_eagle3
from draftfeed_consumer.trainers.exports import has_label
from draftfeed_consumer.trainers.specforge_options import AlgorithmName

Tensors = dict[str, torch.Tensor]


class Algorithm(Protocol):
    strategy: AlgorithmName
    """SpecForge's name for it."""
    features: tuple[str, ...]
    """Of the tensors that `tensors` makes."""
    target_repr: str | None
    """SpecForge's name for what its `target` is made from."""

    @property
    def config(self) -> DraftConfig | Eagle3Config: ...
    def registration(self) -> Any: ...
    def build(self, target: Path, device: str) -> tuple[Any, Any]:
        """(the training model, with the drafter in `draft_model`; the target's head or None)"""
        ...

    def fault(self, item: Item) -> str:
        """Why the sample cannot be trained on, or nothing."""
        ...

    def tensors(self, item: Item) -> Tensors:
        """Copies, with a leading 1 and n tokens. The last id has no row (it was sampled and never
        fed), so ids and mask are cut to the rows."""
        ...

    def collate(self, samples: Sequence[Tensors]) -> Mapping[str, torch.Tensor]: ...
    def resume_contract(self, registration: Any, model: Any) -> dict[str, Any]:
        """What must be the same when a checkpoint is resumed."""
        ...

    def unsaved(self, model: Any) -> frozenset[str]:
        """Weights that no checkpoint has, because they are the target's."""
        ...


class DFlash:
    strategy: AlgorithmName = "dflash"
    features: tuple[str, ...] = ("input_ids", "loss_mask", "hidden_states")
    target_repr: str | None = None

    def __init__(self, config: DraftConfig) -> None:
        self.config = config

    def registration(self) -> Any:
        from specforge.algorithms.dflash.providers import create_registration

        return create_registration()

    def build(self, target: Path, device: str) -> tuple[Any, Any]:
        return build_dflash(self.config, target, device), None

    def fault(self, item: Item) -> str:
        if has_label(item):
            return ""
        return "no two adjacent response tokens have rows, and DFlash needs one such pair"

    def tensors(self, item: Item) -> Tensors:
        """input_ids, loss_mask int64[1, n]; hidden_states [1, n, L*H] as on the wire"""
        return dflash_tensors(item)

    def collate(self, samples: Sequence[Tensors]) -> Mapping[str, torch.Tensor]:
        from specforge.algorithms.common.dflash_family_data import build_collator

        collated: Mapping[str, torch.Tensor] = build_collator()(samples)
        return collated

    def resume_contract(self, registration: Any, model: Any) -> dict[str, Any]:
        contract = registration.providers.step.resume_contract(None, model.draft_model, model)
        return dict(contract)

    def unsaved(self, model: Any) -> frozenset[str]:
        return frozenset()


class Eagle3:
    strategy: AlgorithmName = "eagle3"
    features: tuple[str, ...] = (
        "input_ids",
        "attention_mask",
        "loss_mask",
        "hidden_state",
        "target",
    )
    target_repr: str | None = "hidden_state"

    def __init__(self, config: Eagle3Config) -> None:
        self.config = config

    def registration(self) -> Any:
        from specforge.algorithms.eagle3.providers import create_registration

        return create_registration()

    def build(self, target: Path, device: str) -> tuple[Any, Any]:
        return build_eagle3(self.config, target, device)

    def fault(self, item: Item) -> str:
        if item["loss_mask"][: len(item["hidden_states"]) - 1].any():
            return ""
        return "no response token has a row and a successor with one, and EAGLE-3 needs one"

    def tensors(self, item: Item) -> Tensors:
        """input_ids, loss_mask, attention_mask int64[1, n]; hidden_state [1, n, 3*H], target
        [1, n, H] as on the wire.

        Row t learns what the target said at t+1, which the last row has no t+1 for.
        """
        tensors = dflash_tensors(item)
        tensors["loss_mask"][:, -1] = 0
        return {
            "input_ids": tensors["input_ids"],
            "attention_mask": torch.ones_like(tensors["input_ids"]),
            "loss_mask": tensors["loss_mask"],
            "hidden_state": tensors["hidden_states"],
            "target": item["final_states"][None].clone(),
        }

    def collate(self, samples: Sequence[Tensors]) -> Mapping[str, torch.Tensor]:
        """SpecForge's own only takes samples of one length."""
        from specforge.algorithms.common.collation import pad_and_concatenate_features

        collated: Mapping[str, torch.Tensor] = pad_and_concatenate_features(
            samples,
            sequence_axes=dict.fromkeys(self.features, 1),
            required_keys=self.features,
        )
        return collated

    def resume_contract(self, registration: Any, model: Any) -> dict[str, Any]:
        training = SimpleNamespace(compact_teacher=False, compact_teacher_chunk_size=None)
        config = SimpleNamespace(training=training)
        step = registration.providers.step
        return dict(step.resume_contract(config, model.draft_model, model))

    def unsaved(self, model: Any) -> frozenset[str]:
        return frozenset(name for name in model.draft_model.state_dict() if "embed" in name)


def make(config: DraftConfig | Eagle3Config) -> Algorithm:
    return DFlash(config) if isinstance(config, DraftConfig) else Eagle3(config)


def dflash_tensors(item: Item) -> Tensors:
    """See `DFlash.tensors`."""
    rows = item["hidden_states"].shape[0]
    return {
        "input_ids": item["input_ids"][:rows].long()[None],
        "loss_mask": item["loss_mask"][:rows].long()[None],
        "hidden_states": item["hidden_states"].flatten(1)[None].clone(),
    }
