"""speculators 0.9.0 reads an export: its hidden-states backend `draftfeed`.

Registered when this is imported, which must be before speculators reads its arguments:
`python -m draftfeed_consumer.trainers.speculators` sees to it. Needs the `speculators` extra.

Samples are taken by index, as often as speculators likes. It says neither which of them an
optimizer step has used nor which checkpoint contains them, so nothing is committed to any
producer: each sample trained exactly once is what a stream promises, not an export.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftfeed_consumer.errors import ExportError
from draftfeed_consumer.trainers.exports import Note, read_note, speculators_file
from draftfeed_proto.descriptor import Descriptor

NAME = "draftfeed"
CONFIGURED_LAYERS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
"""Of a drafter that exists: in its config.json, by kind."""


class ExportTransfer(HiddenStatesTransfer):  # type: ignore[misc]  # speculators is untyped
    """Goes to the loader's processes by pickle: it holds a path and no open file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        """token_ids int64[n], hidden_states [n, layers + 1, H], the final state last.

        Raises ExportError: a finished export has every file. None would have vLLM asked for it.
        """
        path = self._directory / speculators_file(int(file_idx))
        try:
            tensors: dict[str, torch.Tensor] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{path} cannot be read: {error}") from error
        return tensors

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        raise ExportError(_NO_SERVER)


@HiddenStatesBackend.register(NAME)
class DraftfeedBackend(HiddenStatesBackend):  # type: ignore[misc]
    """`--data-path` names the export; there are no arguments of its own."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """None."""

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """None."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> ExportTransfer:
        """Raises ExportError when the export is of other layers than the drafter's, or of another
        target than the verifier: all of that could have the same shape."""
        directory = Path(data_path)
        note = read_note(directory, "speculators")
        _check_verifier(args, note.descriptor, directory)
        if args.speculator_type != "mtp":  # it sees the final state alone
            _check_layers(args, note, directory)
        return ExportTransfer(directory)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        raise ExportError(_NO_SERVER)


_NO_SERVER = f"the backend {NAME!r} reads an export: no server makes hidden states for it"


def _check_layers(args: argparse.Namespace, note: Note, directory: Path) -> None:
    asked = args.target_layer_ids
    if args.from_pretrained:
        from transformers import PretrainedConfig

        config, _ = PretrainedConfig.get_config_dict(args.from_pretrained)
        asked = next(filter(None, map(config.get, CONFIGURED_LAYERS)), None)
    if asked is None or tuple(asked) != note.layer_ids:
        wanted = "those of no layers" if asked is None else f"layers {' '.join(map(str, asked))}"
        has = " ".join(map(str, note.layer_ids))
        raise ExportError(
            f"the drafter is to read {wanted}, and {directory} has --target-layer-ids {has} "
            "(draftfeed's ids are one less)"
        )


def _check_verifier(args: argparse.Namespace, served: Descriptor, directory: Path) -> None:
    from speculators.models.utils import get_verifier_config

    config = get_verifier_config(args.verifier_name_or_path, args.trust_remote_code)
    for key, value in (
        ("num_hidden_layers", served.num_layers),
        ("hidden_size", served.hidden_size),
        ("vocab_size", served.vocab_size),
    ):
        if getattr(config, key) != value:
            raise ExportError(
                f"{args.verifier_name_or_path} has {key} {getattr(config, key)}, and {directory} "
                f"is of {served.model}, which has {value}"
            )
