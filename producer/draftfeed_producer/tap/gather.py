"""The gather that engines call: a Triton kernel on a GPU, the torch reference on a CPU.

What a kernel is given wrongly it reads wrongly, without an error. So everything that can be told
without waiting for the device is checked first, alike for both.
"""

import torch
from torch import Tensor

from draftfeed_producer.errors import TapLayoutError
from draftfeed_producer.tap import reference
from draftfeed_producer.tap.reference import COUNTERS

_ALIGNMENT_BYTES = 16
_VECTOR = 8
"""bf16 elements in 16 bytes, which is what one lane reads and writes at once."""


def gather_packed(
    packed_TLH: Tensor, row_map: Tensor, rows_SLH: Tensor, counters_SL4: Tensor
) -> None:
    """Writes token t of `packed_TLH` to slot `row_map[t]`, see `reference.to_wire`.

    packed_TLH    bf16 [T, L*H], the tapped layers side by side; rows may lie further apart
    row_map       int32 [T], negative = skip (padding, finished sequences)
    rows_SLH      fp16 or bf16 [slots, L, H], H divisible by 8; other slots keep what they held
    counters_SL4  int32 [slots, L, 4]

    That no slot is named twice, or is `slots` or more, is the caller's duty: reading the map of a
    GPU would stall its stream. There, a slot too high is skipped, and of two tokens for one slot
    either may win. Raises TapLayoutError.
    """
    _, layers, _ = _check_outputs(rows_SLH, counters_SL4)
    _gather_first(packed_TLH, layers, row_map, rows_SLH, counters_SL4)


def gather_with_final(
    packed_TLH: Tensor,
    final_TH: Tensor,
    row_map: Tensor,
    rows_SLH: Tensor,
    counters_SL4: Tensor,
) -> None:
    """The same where the final state lies elsewhere: it becomes the last of the L layers.

    packed_TLH  bf16 [T, (L-1)*H]
    final_TH    bf16 [T, H]
    """
    _, layers, hidden = _check_outputs(rows_SLH, counters_SL4)
    assert layers > 1, layers
    _check_row_map(row_map, rows_SLH)
    _check_input("final_TH", final_TH, (len(row_map), hidden), rows_SLH)
    _gather_first(packed_TLH, layers - 1, row_map, rows_SLH, counters_SL4)
    gather_layer(final_TH, None, layers - 1, row_map, rows_SLH, counters_SL4)


def _gather_first(
    packed_TLH: Tensor, layers: int, row_map: Tensor, rows_SLH: Tensor, counters_SL4: Tensor
) -> None:
    """Into the first so many layers of a slot."""
    width = layers * rows_SLH.shape[2]
    _check_row_map(row_map, rows_SLH)
    _check_input("packed_TLH", packed_TLH, (len(row_map), width), rows_SLH)
    if not rows_SLH.is_cuda:
        reference.gather_packed(packed_TLH, row_map, rows_SLH, counters_SL4)
    elif len(row_map):
        from draftfeed_producer.tap.launch import launch_packed

        with torch.cuda.device(rows_SLH.device):
            launch_packed(packed_TLH, row_map, rows_SLH, counters_SL4)


def gather_layer(
    hidden_TH: Tensor,
    residual_TH: Tensor | None,
    layer: int,
    row_map: Tensor,
    rows_SLH: Tensor,
    counters_SL4: Tensor,
) -> None:
    """The same for one layer: writes hidden + residual to `rows_SLH[row_map[t], layer]`.

    hidden_TH, residual_TH  bf16 [T, H], added in fp32 and rounded to bf16 (nearest even)
    layer                   index among the L tapped layers
    """
    _, layers, hidden = _check_outputs(rows_SLH, counters_SL4)
    if not 0 <= layer < layers:
        raise TapLayoutError("layer", str(layer), f"an index below {layers}, the layers of a slot")
    _check_row_map(row_map, rows_SLH)
    _check_input("hidden_TH", hidden_TH, (len(row_map), hidden), rows_SLH)
    if residual_TH is not None:
        _check_input("residual_TH", residual_TH, (len(row_map), hidden), rows_SLH)
    if not rows_SLH.is_cuda:
        reference.gather_layer(hidden_TH, residual_TH, layer, row_map, rows_SLH, counters_SL4)
    elif len(row_map):
        from draftfeed_producer.tap.launch import launch_layer

        with torch.cuda.device(rows_SLH.device):
            launch_layer(hidden_TH, residual_TH, layer, row_map, rows_SLH, counters_SL4)


def _check_outputs(rows: Tensor, counters: Tensor) -> torch.Size:
    wire = rows.dtype in (torch.float16, torch.bfloat16)
    if not (wire and rows.dim() == 3 and rows.shape[2] % _VECTOR == 0 and _packed_tightly(rows)):
        raise _wrong(
            "rows_SLH", rows, f"contiguous float16 or bfloat16 [slots, L, H], H % {_VECTOR} == 0"
        )
    shape = (*rows.shape[:2], COUNTERS)
    if counters.dtype != torch.int32 or counters.shape != shape or not _packed_tightly(counters):
        raise _wrong("counters_SL4", counters, f"contiguous int32 {list(shape)}")
    _check_device("counters_SL4", counters, rows)
    return rows.shape


def _check_row_map(row_map: Tensor, rows: Tensor) -> None:
    if row_map.dtype != torch.int32 or row_map.dim() != 1 or not row_map.is_contiguous():
        raise _wrong("row_map", row_map, "contiguous int32 [T]")
    _check_device("row_map", row_map, rows)


def _check_input(name: str, x: Tensor, shape: tuple[int, int], rows: Tensor) -> None:
    if x.dtype != torch.bfloat16 or x.shape != shape:
        raise _wrong(name, x, f"bfloat16 {list(shape)}")
    if x.stride(1) != 1 or x.stride(0) < shape[1] or x.stride(0) % _VECTOR:
        wanted = f"strides (a multiple of {_VECTOR} from {shape[1]} on, 1)"
        raise _wrong(name, x, wanted)
    if x.data_ptr() % _ALIGNMENT_BYTES:
        raise _wrong(name, x, f"at an address divisible by {_ALIGNMENT_BYTES}")
    _check_device(name, x, rows)


def _check_device(name: str, x: Tensor, rows: Tensor) -> None:
    if x.device != rows.device:
        raise _wrong(name, x, f"on {rows.device}, where rows_SLH is")


def _packed_tightly(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _ALIGNMENT_BYTES == 0


def _wrong(name: str, x: Tensor, wanted: str) -> TapLayoutError:
    dtype = str(x.dtype).removeprefix("torch.")
    where = f"at {x.data_ptr():#x} on {x.device}"
    return TapLayoutError(name, f"{dtype} {list(x.shape)}, strides {x.stride()}, {where}", wanted)
