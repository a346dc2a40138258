"""The gather on a GPU: one program converts one row, of one token and one layer.

Almost every row holds nothing that saturates and nothing that is not finite. So the first pass
only converts, counts what fp16 cannot hold, and takes the largest magnitude. If that says so, the
program reads the row again, out of the cache, and a second pass does everything.

bf16 is handled as bit patterns: in Triton's interpreter, in which the tests run this file, its
arithmetic truncates. fp32 is not: no conversion or comparison here may flush denormals.
"""
# Kernels are written in Triton's language, which has no types and fewer kinds of expressions.
# ruff: noqa: RUF005
# mypy: ignore-errors
# pyright: reportMissingImports=false

import triton
import triton.language as tl

# fp32 bit patterns, and the fp16 and bf16 ones of what comes out of the second pass.
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
FIRST_SATURATED = tl.constexpr(0x47800000)
NAN = tl.constexpr(0x7FC00000)
FP16_NAN = tl.constexpr(0x7E00)
FP16_MAX = tl.constexpr(0x7BFF)

# One of each kind, in a register that holds three counts of what a lane meets in one row.
COUNT = tl.constexpr(0x3FF)
SATURATED = tl.constexpr(1)
NONFINITE = tl.constexpr(1 << 10)
INEXACT = tl.constexpr(1 << 20)

# Of integers Triton would otherwise compile variants, one in the middle of a run.
_RUNTIME = ("stride", "hidden_stride", "residual_stride", "slots", "layer")


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=("row_map",))
def packed_kernel(
    packed,
    stride,
    row_map,
    rows,
    counters,
    slots,
    P: tl.constexpr,
    L: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program t * P + layer writes packed[t, layer * H :][:H] to rows[row_map[t], layer].

    packed bf16 [T, P*H], rows of a token `stride` * 8 elements apart; row_map int32 [T]; rows
    fp16 or bf16 [slots, L, H], L >= P; counters int32 [slots, L, 4]. All but row_map aligned to 16
    bytes. BLOCK elements are handled at once, and AHEAD times as many are read before any is
    written.
    """
    token = tl.program_id(0) // P
    layer = tl.program_id(0) % P
    slot = tl.load(row_map + token)
    if (slot >= 0) & (slot < slots):
        source = _bits(packed) + token.to(tl.int64) * (stride * 8) + layer * H
        _gather_row(source, None, rows, counters, slot.to(tl.int64) * L + layer, H, BLOCK, AHEAD)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=("row_map",))
def layer_kernel(
    hidden,
    hidden_stride,
    residual,
    residual_stride,
    layer,
    row_map,
    rows,
    counters,
    slots,
    L: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program t writes hidden[t] + residual[t] to rows[row_map[t], layer]; residual may be None.

    hidden, residual bf16 [T, H], their rows so many times 8 elements apart; the rest as in
    `packed_kernel`.
    """
    token = tl.program_id(0)
    slot = tl.load(row_map + token)
    if (slot >= 0) & (slot < slots):
        source = _bits(hidden) + token.to(tl.int64) * (hidden_stride * 8)
        added = None
        if residual is not None:
            added = _bits(residual) + token.to(tl.int64) * (residual_stride * 8)
        _gather_row(source, added, rows, counters, slot.to(tl.int64) * L + layer, H, BLOCK, AHEAD)


@triton.jit
def _gather_row(
    source, added, rows, counters, row, H: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    FP16: tl.constexpr = rows.dtype.element_ty == tl.float16
    RARE: tl.constexpr = FIRST_SATURATED if FP16 else INFINITY
    target = _bits(rows) + row * H
    inexact, largest = _convert(source, added, target, FP16, H, BLOCK, AHEAD)
    saturated = 0
    nonfinite = 0
    if largest >= RARE:
        saturated, nonfinite, inexact = _convert_rare(source, added, target, FP16, H, BLOCK)
    column = tl.arange(0, 4)
    counts = tl.where(column == 0, saturated, nonfinite)
    counts = tl.where(column == 2, inexact, counts)
    counts = tl.where(column == 3, (largest == 0).to(tl.int32), counts)
    tl.store(counters + row * 4 + column, counts)


@triton.jit
def _convert(
    source,
    added,
    target,
    FP16: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """First pass. Returns how many values are inexact, and the pattern of the largest magnitude."""
    # In fp32, where comparing and adding up are one instruction each; exact below 2**24.
    inexact = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, H, BLOCK * AHEAD):
        # All loads come first: the compiler moves none across a store, as the two might overlap.
        read = ()
        for first in tl.static_range(start, min(start + BLOCK * AHEAD, H), BLOCK):
            read = read + (_read(source, added, first, H, BLOCK),)
        for index in tl.static_range(len(read)):
            pattern = _pattern(read[index])
            value = pattern.to(tl.float32, bitcast=True)
            largest = tl.maximum(largest, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
            result = _upper(pattern)
            if FP16:
                converted = value.to(tl.float16)
                inexact += tl.where(converted.to(tl.float32) != value, 1.0, 0.0)
                result = converted.to(tl.uint16, bitcast=True)
            _write(target, result, start + index * BLOCK, H, BLOCK)
    # As integers NaN is larger than infinity, and no reduction loses it.
    return tl.sum(inexact, 0).to(tl.int32), tl.max(largest.to(tl.int32, bitcast=True), 0)


@triton.jit
def _convert_rare(source, added, target, FP16: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """Second pass: what the first one wrote is written again, behind the barrier of its sums.

    Returns how many values saturate, are not finite, are inexact.
    """
    tl.static_assert(H <= BLOCK * COUNT)
    counts = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, H, BLOCK):
        pattern = _pattern(_read(source, added, first, H, BLOCK))
        magnitude = pattern & MAGNITUDE
        kind = tl.where(magnitude >= INFINITY, NONFINITE, 0)
        result = _upper(tl.where(magnitude > INFINITY, NAN, pattern))
        if FP16:
            value = pattern.to(tl.float32, bitcast=True)
            converted = value.to(tl.float16)
            changed = tl.where(converted.to(tl.float32) != value, INEXACT, 0)
            over = (magnitude >= FIRST_SATURATED) & (magnitude < INFINITY)
            kind = tl.where(over, SATURATED, tl.where(magnitude < INFINITY, changed, kind))
            limit = (_upper(pattern) & 0x8000) | FP16_MAX
            result = tl.where(over, limit, converted.to(tl.uint16, bitcast=True))
            result = tl.where(magnitude > INFINITY, FP16_NAN, result)
        counts += kind
        _write(target, result.to(tl.uint16), first, H, BLOCK)
    return _total(counts, SATURATED), _total(counts, NONFINITE), _total(counts, INEXACT)


@triton.jit
def _total(counts, kind: tl.constexpr):
    return tl.sum((counts // kind) & COUNT, 0)


@triton.jit
def _bits(pointer):
    return pointer.to(tl.pointer_type(tl.uint16), bitcast=True)


@triton.jit
def _read(source, added, first, H: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK bf16 patterns from column `first` on, zeros beyond the row: (hidden,) or both."""
    column = first + tl.arange(0, BLOCK)
    read = (tl.load(source + column, column < H, 0),)
    if added is not None:
        read = read + (tl.load(added + column, column < H, 0),)
    return read


@triton.jit
def _write(target, result, first, H: tl.constexpr, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)
    tl.store(target + column, result, column < H)


@triton.jit
def _pattern(read):
    """The fp32 pattern of what was read: a bf16 value, the lower half is zero."""
    pattern = read[0].to(tl.uint32) << 16
    if len(read) == 2:
        pattern = _add(pattern, read[1].to(tl.uint32) << 16)
    return pattern


@triton.jit
def _add(pattern, other):
    return round_to_bf16(pattern.to(tl.float32, bitcast=True) + other.to(tl.float32, bitcast=True))


@triton.jit
def round_to_bf16(value):
    """The fp32 pattern of the nearest bf16 value, ties to even, and one NaN for all."""
    # Rounding would carry a GPU's NaN, 0x7FFFFFFF, over into minus zero.
    pattern = tl.where(value == value, value.to(tl.uint32, bitcast=True), NAN)
    return (pattern + 0x7FFF + ((pattern >> 16) & 1)) & 0xFFFF0000


@triton.jit
def _upper(pattern):
    return (pattern >> 16).to(tl.uint16)
