"""Samples as the files that other trainers read, and the note that lies beside them.

    specforge       EPOCH-SHARD-LINE.ckpt, read by SpecForge 0.2.0's offline DFlash
    speculators     hidden_states/hs_INDEX.safetensors and an Arrow data set, read by 0.9.0

Both want as many ids as rows. The last id of a sample was sampled and never fed, so no row is its
own: it is left out, and with it one label. Every other row keeps the id that it was computed from.

Nothing in such a file says which layers its rows are of, and a wrong guess has the right shape.
The note, draftfeed.json, does: in the trainer's own numbers.
"""

from pathlib import Path
from typing import Literal

import msgspec
import torch

from draftfeed_consumer.errors import ExportError, FinalNormError
from draftfeed_consumer.final_norm import FinalNorm
from draftfeed_consumer.trainers import Item
from draftfeed_proto.descriptor import Descriptor

Format = Literal["specforge", "speculators"]
NOTE = "draftfeed.json"


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of an export are."""

    format: Format
    layer_ids: tuple[int, ...]
    """Of the drafter's inputs, as the trainer counts."""
    samples: int
    left_out: dict[str, int]
    """How many, by reason."""
    descriptor: Descriptor
    """Of the stream they were captured from."""


def specforge_layers(descriptor: Descriptor) -> tuple[int, ...]:
    """SpecForge's `target_layer_ids`, which count as we do."""
    return descriptor.layer_ids


def speculators_layers(descriptor: Descriptor) -> tuple[int, ...]:
    """speculators' `--target-layer-ids`: ours + 1, but for the last block.

    Its labels, for every kind of drafter, are what the target's norm and head make of the final
    state: of the last block's output before the norm, which it takes from the last layer of a
    file. Raises ExportError for a stream without it.
    """
    *others, last = descriptor.layer_ids
    last_block = descriptor.num_layers - 1
    inputs = others if last == last_block else descriptor.layer_ids
    if last != last_block and descriptor.final == "none":
        raise ExportError(
            f"speculators computes its labels from the output of the last block, layer "
            f"{last_block} here, and the stream has neither that nor the final state; capture with "
            '[target] final = "prenorm", or with "postnorm", which SGLang can give, too'
        )
    if not inputs:
        raise ExportError(
            f"the stream has no layer but the last one, {last_block}, and speculators takes that "
            "one for its labels: there is nothing for a drafter to see"
        )
    return tuple(layer + 1 for layer in inputs)


def needs_norm(descriptor: Descriptor) -> bool:
    """Whether the last block's output must be computed from what the final norm made of it."""
    return descriptor.final == "postnorm" and not _has_last_block(descriptor)


def _has_last_block(descriptor: Descriptor) -> bool:
    """As a tapped layer, before the norm."""
    return descriptor.layer_ids[-1] == descriptor.num_layers - 1


def specforge_tensors(item: Item) -> dict[str, torch.Tensor]:
    """input_ids, loss_mask int64[n]; hidden_states bf16[n, L*H].

    SpecForge casts no file to the dtype that it trains in, bf16 unless configured. Values that
    were bf16 in the target come back bit for bit, but for the few that fp16 cannot hold: the
    sample's counters have them, as saturated or inexact.
    """
    states = item["hidden_states"].to(torch.bfloat16).flatten(1)
    # A view would be saved with all that it is a view of.
    return {**_trimmed(item), "hidden_states": states.contiguous()}


def speculators_tensors(
    item: Item, descriptor: Descriptor, norm: FinalNorm | None = None
) -> dict[str, torch.Tensor]:
    """token_ids, loss_mask int64[n]; hidden_states [n, L, H] in the stream's dtype, the last layer
    the last block's output, or what stands for it.

    norm: the target's, which must be there where `needs_norm`. Elsewhere a final state is checked
    with it. Raises ExportError for a final state that is not what the descriptor says.
    """
    trimmed = _trimmed(item)
    states = item["hidden_states"]
    if not _has_last_block(descriptor):
        states = torch.cat([states, _before_norm(item, descriptor, norm)[:, None]], dim=1)
    return {
        "token_ids": trimmed["input_ids"],
        "loss_mask": trimmed["loss_mask"],
        "hidden_states": states.contiguous(),
    }


def _before_norm(item: Item, descriptor: Descriptor, norm: FinalNorm | None) -> torch.Tensor:
    """[n, H] in the stream's dtype."""
    final: torch.Tensor = item["final_states"]
    if descriptor.final == "postnorm":
        assert norm is not None
        try:
            return norm.undone(final)
        except FinalNormError as error:
            raise ExportError(f"sample {item['id']}: {error}") from None
    if norm is not None and norm.puts_out(final):
        raise ExportError(
            f"sample {item['id']}: the stream says prenorm, and its final state is what the norm "
            "puts out: norm and head would be applied to that a second time"
        )
    return final


def speculators_file(index: int) -> str:
    """Of a sample's states, by its row in the data set; where speculators itself looks."""
    return f"hidden_states/hs_{index}.safetensors"


def has_label(item: Item) -> bool:
    """Whether two adjacent tokens with rows are supervised. DFlash begins a block at such a token
    and takes the next for its first label; SpecForge ends a run at a sample that has none."""
    mask = _trimmed(item)["loss_mask"]
    return bool((mask[:-1] & mask[1:]).any())


def read_note(directory: Path, format: Format) -> Note:
    """Raises ExportError when that is no finished export in this format."""
    path = directory / NOTE
    if not path.is_file():
        raise ExportError(f"{directory} is not what `draftfeed export` makes: it has no {NOTE}")
    try:
        note = msgspec.json.decode(path.read_bytes(), type=Note)
    except msgspec.DecodeError as error:
        raise ExportError(f"{path} is damaged: {error}") from None
    if note.format != format:
        raise ExportError(f"{directory} was exported for {note.format}, not for {format}")
    return note


def _trimmed(item: Item) -> dict[str, torch.Tensor]:
    rows = item["hidden_states"].shape[0]
    return {
        "input_ids": item["input_ids"][:rows].long(),
        "loss_mask": item["loss_mask"][:rows].long(),
    }
