"""Torch reference of the gather: what every other form of the tap must equal bit for bit."""

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
_ROWS_AT_ONCE = 2048


def to_wire(x: Tensor) -> tuple[Tensor, Tensor]:
    """Converts a residual stream [..., H] to the wire's fp16, bf16 values in, nothing else lost.

    fp32 is rounded to bf16 (nearest even) first, because bf16 is what a target in production
    emits. Finite values beyond 65504 saturate, Inf stays Inf, every NaN becomes 0x7E00.

    Returns fp16 [..., H] and int32 counters [..., 4] per row: saturated, nonfinite, inexact
    (finite, unsaturated values that fp16 cannot hold) and 1 for a row that is all zero.
    """
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    x = x.to(torch.bfloat16)
    magnitude = x.view(torch.int16) & _MAGNITUDE
    nonfinite = magnitude >= _INFINITY
    saturated = (magnitude >= _FIRST_SATURATED) & ~nonfinite
    exact = x.float()
    wire = _saturate(exact, magnitude, nonfinite)
    # Bits, not values: a process that flushes denormals would call a lost denormal exact.
    changed = wire.float().view(torch.int32) != exact.view(torch.int32)
    inexact = changed & ~saturated & ~nonfinite
    # Into int32 at once: torch sums booleans into int64 much slower.
    counts = [kind.sum(-1, dtype=torch.int32) for kind in (saturated, nonfinite, inexact)]
    zero_row = (magnitude.amax(-1) == 0).to(torch.int32)
    return wire, torch.stack((*counts, zero_row), dim=-1)


def _saturate(exact: Tensor, magnitude: Tensor, nonfinite: Tensor) -> Tensor:
    wire = exact.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)
    if not bool(nonfinite.any()):
        return wire
    wire = torch.where(nonfinite, exact.to(torch.float16), wire)
    # The sign and payload of a NaN differ between machines (Inf - Inf): one NaN for all.
    nan = torch.tensor(_FP16_NAN, dtype=torch.int16, device=exact.device).view(torch.float16)
    return torch.where(magnitude > _INFINITY, nan, wire)


def gather_packed(
    packed_TLH: Tensor, row_map: Tensor, rows_SLH: Tensor, counters_SL4: Tensor
) -> None:
    """Writes token t of `packed_TLH` to slot `row_map[t]`, converted by `to_wire`.

    packed_TLH    bf16 or fp32 [T, L*H], the tapped layers side by side
    row_map       int32 [T], -1 = skip (padding, finished sequences); no slot named twice
    rows_SLH      fp16 [slots, L, H]; slots that are not named keep what they held
    counters_SL4  int32 [slots, L, 4], see `to_wire`
    """
    slots, layers, hidden = rows_SLH.shape
    assert packed_TLH.shape == (len(row_map), layers * hidden), packed_TLH.shape
    assert counters_SL4.shape == (slots, layers, COUNTERS), counters_SL4.shape
    assert row_map.dtype == counters_SL4.dtype == torch.int32
    assert rows_SLH.dtype == torch.float16
    assert packed_TLH.is_contiguous()
    assert rows_SLH.is_contiguous()
    assert counters_SL4.is_contiguous()
    # Pieces bound the temporaries, which are several times the size of their input.
    for tokens in torch.split((row_map >= 0).nonzero().flatten(), _ROWS_AT_ONCE):
        wire, counters = to_wire(packed_TLH[tokens].view(-1, layers, hidden))
        slot = row_map[tokens].long()
        rows_SLH.index_copy_(0, slot, wire)
        counters_SL4.index_copy_(0, slot, counters)
