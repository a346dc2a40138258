"""Torch reference of the gather: what every other form of the tap must equal bit for bit."""

from collections.abc import Iterator

import torch
from torch import Tensor

FP16_MAX = 65504.0
COUNTERS = 4
"""saturated, nonfinite, inexact, zero row: the order of `draftfeed_proto.sample.LayerCounters`."""

_MAGNITUDE = 0x7FFF
_FIRST_SATURATED = 0x4780
"""bf16 bits of 65536; the bf16 value below it, 65280, fits in fp16."""
_INFINITY = 0x7F80
_FP16_NAN = 0x7E00
_BF16_NAN = 0x7FC0
_ROWS_AT_ONCE = 2048


def to_wire(x: Tensor, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """Converts a residual stream [..., H] to the wire's fp16, bf16 values in, nothing else lost.

    fp32 is rounded to bf16 (nearest even) first, because bf16 is what a target in production
    emits. Finite values beyond 65504 saturate, Inf stays Inf, every NaN becomes 0x7E00. With
    dtype bf16 the values stay what they are, and every NaN becomes 0x7FC0.

    Returns fp16 or bf16 [..., H] and int32 counters [..., 4] per row: saturated, nonfinite,
    inexact (finite, unsaturated values that fp16 cannot hold) and 1 for a row that is all zero.
    """
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    assert dtype in (torch.bfloat16, torch.float16), dtype
    x = x.to(torch.bfloat16)
    magnitude = x.view(torch.int16) & _MAGNITUDE
    nonfinite = magnitude >= _INFINITY
    if dtype == torch.float16:
        wire, saturated, inexact = _to_fp16(x.float(), magnitude, nonfinite)
    else:
        wire, saturated = x, torch.zeros_like(nonfinite)
        inexact = saturated
    if bool(nonfinite.any()):
        # The sign and payload of a NaN differ between machines (Inf - Inf): one NaN for all.
        wire = torch.where(magnitude > _INFINITY, _nan(dtype, x.device), wire)
    # Into int32 at once: torch sums booleans into int64 much slower.
    counts = [kind.sum(-1, dtype=torch.int32) for kind in (saturated, nonfinite, inexact)]
    zero_row = (magnitude.amax(-1) == 0).to(torch.int32)
    return wire, torch.stack((*counts, zero_row), dim=-1)


def _to_fp16(exact: Tensor, magnitude: Tensor, nonfinite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp16 [..., H], of a NaN whatever the cast makes; where it saturated, where it is inexact."""
    saturated = (magnitude >= _FIRST_SATURATED) & ~nonfinite
    wire = exact.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)
    if bool(nonfinite.any()):
        wire = torch.where(nonfinite, exact.to(torch.float16), wire)
    # Bits, not values: a process that flushes denormals would call a lost denormal exact.
    changed = wire.float().view(torch.int32) != exact.view(torch.int32)
    return wire, saturated, changed & ~saturated & ~nonfinite


def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    pattern = _FP16_NAN if dtype == torch.float16 else _BF16_NAN
    return torch.tensor(pattern, dtype=torch.int16, device=device).view(dtype)


def gather_packed(
    packed_TLH: Tensor, row_map: Tensor, rows_SLH: Tensor, counters_SL4: Tensor
) -> None:
    """Writes token t of `packed_TLH` to slot `row_map[t]`, converted by `to_wire`.

    packed_TLH    bf16 or fp32 [T, L*H], the tapped layers side by side, or the first of them:
                  those behind keep what they held
    row_map       int32 [T], -1 = skip (padding, finished sequences); no slot named twice
    rows_SLH      fp16 or bf16 [slots, L, H]; slots that are not named keep what they held
    counters_SL4  int32 [slots, L, 4], see `to_wire`
    """
    hidden = rows_SLH.shape[2]
    layers = packed_TLH.shape[1] // hidden
    assert 1 <= layers <= rows_SLH.shape[1], packed_TLH.shape
    assert packed_TLH.shape == (len(row_map), layers * hidden), packed_TLH.shape
    for tokens, slots in _pieces(row_map):
        rows = packed_TLH[tokens].view(-1, layers, hidden)
        _write(rows, slots, rows_SLH[:, :layers], counters_SL4[:, :layers])


def gather_layer(
    hidden_TH: Tensor,
    residual_TH: Tensor | None,
    layer: int,
    row_map: Tensor,
    rows_SLH: Tensor,
    counters_SL4: Tensor,
) -> None:
    """Writes token t of one layer, hidden + residual, to `rows_SLH[row_map[t], layer]`.

    hidden_TH, residual_TH  bf16 or fp32 [T, H]; added in fp32, then rounded to bf16 as a model does
    layer                   index among the L tapped layers
    The others as in `gather_packed`.
    """
    assert hidden_TH.shape == (len(row_map), rows_SLH.shape[2]), hidden_TH.shape
    assert 0 <= layer < rows_SLH.shape[1], layer
    for tokens, slots in _pieces(row_map):
        rows = hidden_TH[tokens]
        if residual_TH is not None:
            rows = rows.float() + residual_TH[tokens].float()
        _write(rows, slots, rows_SLH[:, layer], counters_SL4[:, layer])


def _pieces(row_map: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """int64 tokens and their slots, so many that the temporaries stay small.

    Those are several times the size of their input.
    """
    assert row_map.dtype == torch.int32, row_map.dtype
    for tokens in torch.split((row_map >= 0).nonzero().flatten(), _ROWS_AT_ONCE):
        yield tokens, row_map[tokens].long()


def _write(x: Tensor, slots: Tensor, rows: Tensor, counters: Tensor) -> None:
    assert counters.dtype == torch.int32, counters.dtype
    assert counters.shape == (*rows.shape[:-1], COUNTERS), counters.shape
    wire, counts = to_wire(x, rows.dtype)
    rows.index_copy_(0, slots, wire)
    counters.index_copy_(0, slots, counts)
