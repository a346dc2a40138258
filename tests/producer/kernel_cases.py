"""The gather kernel in Triton's interpreter, equal to the torch reference bit for bit.

`test_tap_kernel` runs this file in processes of its own, one for each version of Triton:
TRITON_INTERPRET=1 binds when Triton is imported. So its name is not that of a test file.
"""

# Triton is not in the environment that type checkers look at.
# pyright: reportMissingImports=false

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from draftfeed_producer.tap import kernel, reference
from draftfeed_producer.tap.launch import Blocking, launch_layer, launch_packed
from draftfeed_producer.tap.reference import COUNTERS

GUARD = 3
"""Slots before and behind the ring, which nobody may write."""
POISON = 0x5A5A
WIRE = [torch.float16, torch.bfloat16]
SHAPES = [(7, 1, 40), (4, 3, 72), (3, 5, 264), (2, 8, 1000)]


class Ring:
    """Poisoned rows and counters, contiguous, in the middle of larger poisoned ones."""

    def __init__(self, slots: int, layers: int, hidden: int, dtype: torch.dtype) -> None:
        self._all_rows = torch.full((slots + 2 * GUARD, layers, hidden), POISON, dtype=torch.int16)
        self._all_counters = torch.full(
            (slots + 2 * GUARD, layers, COUNTERS), POISON, dtype=torch.int32
        )
        inner = slice(GUARD, GUARD + slots)
        self.rows = self._all_rows.view(dtype)[inner]
        self.counters = self._all_counters[inner]

    def assert_equal(self, other: "Ring") -> None:
        """Every bit, of what was written and of what was to be left alone."""
        torch.testing.assert_close(self._all_rows, other._all_rows, rtol=0, atol=0)
        torch.testing.assert_close(self._all_counters, other._all_counters, rtol=0, atol=0)


def seeded(*case: object) -> torch.Generator:
    seed = zlib.crc32(repr(case).encode())
    print("seed", seed)  # noqa: T201  pytest shows it with a failure
    return torch.Generator().manual_seed(seed)


def patterns(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def below(shape: tuple[int, ...], low: int, high: int, random: torch.Generator) -> Tensor:
    """Magnitudes with these bf16 patterns, of either sign."""
    sign = torch.randint(0, 2, shape, generator=random) << 15
    return patterns(torch.randint(low, high, shape, generator=random) | sign)


def ordinary(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=random) * 3).to(torch.bfloat16)


def any_bits(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return below(shape, 0, 0x8000, random)


def lost_in_fp16(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return below(shape, 0x3200, 0x3900, random)


def denormal(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return below(shape, 0, 0x100, random)


def past_65504(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return below(shape, 0x4700, 0x4800, random)


def one_rare(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """One value a row that saturates or is not finite, among which the first and the last."""
    x = ordinary(shape, random).flatten(0, -2)
    rare = torch.tensor([0x4780, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0xC780, 0x7FC0, 0xFF7F])
    rare = patterns(rare)[torch.randint(0, 8, (len(x),), generator=random)]
    column = torch.randint(0, x.shape[1], (len(x),), generator=random)
    column[0], column[-1] = 0, x.shape[1] - 1
    x[torch.arange(len(x)), column] = rare
    return x.view(shape)


def nearly_zero_rows(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Zeros of either sign, in every other row one denormal."""
    x = below(shape, 0, 1, random).flatten(0, -2)
    x[::2, -1] = patterns(torch.tensor([1]))
    return x.view(shape)


def one_row_rare(tokens: int, layers: int, hidden: int, random: torch.Generator) -> Tensor:
    """[tokens, L*H]. The second pass mends whatever the first one does: rows that have none too."""
    x = ordinary((tokens, layers, hidden), random)
    x[-1, -1:] = one_rare((1, hidden), random)
    return x.view(tokens, -1)


KINDS: list[Callable[[tuple[int, ...], torch.Generator], Tensor]] = [
    ordinary,
    any_bits,
    lost_in_fp16,
    denormal,
    past_65504,
    one_rare,
    nearly_zero_rows,
]


def mapped(tokens: int, slots: int, random: torch.Generator) -> Tensor:
    """int32 [tokens], slots in any order; the first is skipped, the last never."""
    row_map = torch.randperm(slots, generator=random)[:tokens].to(torch.int32)
    skipped = torch.rand(tokens, generator=random) < 0.25
    skipped[0], skipped[-1] = True, False
    return torch.where(skipped, -1, row_map)


def compare_packed(
    packed: Tensor,
    row_map: Tensor,
    slots: int,
    layers: int,
    dtype: torch.dtype,
    **options: Blocking,
) -> None:
    hidden = packed.shape[1] // layers
    got, want = (Ring(slots, layers, hidden, dtype) for _ in range(2))
    launch_packed(packed, row_map, got.rows, got.counters, **options)
    reference.gather_packed(packed, row_map, want.rows, want.counters)
    got.assert_equal(want)


def compare_layers(
    hidden_LTH: Tensor, residual_LTH: Tensor | None, row_map: Tensor, dtype: torch.dtype
) -> None:
    layers, tokens, hidden = hidden_LTH.shape
    got, want = (Ring(tokens + 4, layers, hidden, dtype) for _ in range(2))
    for layer in range(layers):
        residual = None if residual_LTH is None else residual_LTH[layer]
        launch_layer(hidden_LTH[layer], residual, layer, row_map, got.rows, got.counters)
        reference.gather_layer(
            hidden_LTH[layer], residual, layer, row_map, want.rows, want.counters
        )
    got.assert_equal(want)


@pytest.mark.parametrize("dtype", WIRE)
@pytest.mark.parametrize(("tokens", "layers", "hidden"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed(kind: Callable, tokens: int, layers: int, hidden: int, dtype: torch.dtype):
    random = seeded(kind.__name__, tokens, layers, hidden)
    packed = kind((tokens, layers, hidden), random).view(tokens, -1)
    compare_packed(packed, mapped(tokens, tokens + 4, random), tokens + 4, layers, dtype)


@pytest.mark.parametrize("dtype", WIRE)
@pytest.mark.parametrize("added", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize(("tokens", "layers", "hidden"), SHAPES[1:3])
@pytest.mark.parametrize("kind", KINDS)
def test_layer(
    kind: Callable, tokens: int, layers: int, hidden: int, added: bool, dtype: torch.dtype
):
    random = seeded(kind.__name__, tokens, layers, hidden, added)
    states = kind((layers, tokens, hidden), random)
    residual = kind((layers, tokens, hidden), random) if added else None
    compare_layers(states, residual, mapped(tokens, tokens + 4, random), dtype)


@pytest.mark.parametrize("dtype", WIRE)
def test_all_65536_patterns(dtype: torch.dtype):
    everything = patterns(torch.arange(65536)).view(8, 8 * 1024)
    compare_packed(everything, torch.arange(7, -1, -1, dtype=torch.int32), 8, 8, dtype)


@pytest.mark.parametrize("dtype", WIRE)
def test_sums_halfway_between_two_bf16_values(dtype: torch.dtype):
    """A sum rounded up, down or to odd would be another value than the model computes with."""
    random = seeded("halfway", dtype)
    states = below((2, 3, 264), 0x3F80 - 0x800, 0x3F80 + 0x800, random)
    half_ulp = (states.view(torch.int16).int() & 0x7F80) - (8 << 7)
    sign = torch.randint(0, 2, states.shape, generator=random) << 15
    compare_layers(states, patterns(half_ulp | sign), torch.tensor([2, -1, 0]).int(), dtype)


@pytest.mark.parametrize("dtype", WIRE)
def test_sums_that_overflow_or_are_no_number(dtype: torch.dtype):
    """The sign and payload of a NaN differ between machines, and must not reach the wire."""
    pairs = [
        (0x7F7F, 0x7F7F), (0x7F7F, 0x7B00), (0xFF7F, 0xFB00), (0x7F7F, 0x7AFF),
        (0x7F80, 0xFF80), (0xFF80, 0x7F80), (0x7F80, 0x3F80), (0x7FFF, 0x3F80),
        (0xFFFF, 0xBF80), (0x3F80, 0x7F81), (0x8000, 0x8000), (0x8000, 0x0000),
        (0x3F80, 0xBF80), (0x0001, 0x0001), (0x007F, 0x0001), (0x477F, 0x4300),
    ]  # fmt: skip
    states, residual = patterns(torch.tensor(pairs)).T.repeat(1, 3)[:, None, None].contiguous()
    compare_layers(states, residual, torch.tensor([3]).int(), dtype)


@triton.jit
def rounded(values, out, N: tl.constexpr):
    index = tl.arange(0, N)
    pattern = kernel.round_to_bf16(tl.load(values + index))
    tl.store(out + index, pattern.to(tl.int32, bitcast=True))


def test_the_nan_of_a_gpu_stays_a_nan_when_it_is_rounded():
    """A GPU's Inf - Inf is 0x7FFFFFFF, which no sum on a CPU is: rounded up it is minus zero."""
    nans = [0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF, 0x7FC00000, -0x400000]
    numbers = [0x7F800000, -0x800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x3F807FFF, 1, 0]
    values = torch.tensor(nans + numbers + [0, 0], dtype=torch.int32)
    got = torch.empty_like(values)
    program: Any = rounded
    program[(1,)](values.view(torch.float32), got, len(values))
    up = [0x7F800000, -0x800000, 0x7F800000, 0x3F800000, 0x3F820000, 0x3F800000, 0, 0]
    assert got.tolist() == [0x7FC00000] * len(nans) + up + [0, 0]


@pytest.mark.parametrize("dtype", WIRE)
@pytest.mark.parametrize("packed_layers", [1, 2, 4])
def test_fewer_layers_than_a_slot_has(packed_layers: int, dtype: torch.dtype):
    """The final state is written by itself: what lies there must not be touched."""
    random = seeded("fewer", packed_layers, dtype)
    packed = one_row_rare(3, packed_layers, 264, random)
    row_map = torch.tensor([5, -1, 2]).int()
    got, want = (Ring(6, 5, 264, dtype) for _ in range(2))
    launch_packed(packed, row_map, got.rows, got.counters)
    reference.gather_packed(packed, row_map, want.rows, want.counters)
    got.assert_equal(want)


def test_qwen_width():
    random = seeded("5120")
    packed = one_row_rare(2, 5, 5120, random)
    compare_packed(packed, torch.tensor([1, 0]).int(), 2, 5, torch.float16)


@pytest.mark.parametrize("hidden", [8, 1024, 3000])
@pytest.mark.parametrize("blocking", [Blocking(256, 1, 1), Blocking(512, 2, 2)])
def test_every_blocking_gives_the_same(blocking: Blocking, hidden: int):
    random = seeded(blocking, hidden)
    packed = one_row_rare(2, 2, hidden, random)
    row_map = torch.tensor([1, 2]).int()
    compare_packed(packed, row_map, 3, 2, torch.float16, blocking=blocking)


def test_rows_further_apart_than_they_are_long():
    random = seeded("strides")
    wide = ordinary((2, 4, 512), random)
    compare_packed(wide[0, :, 8:152], torch.tensor([2, 0, -1, 1]).int(), 4, 2, torch.float16)
    row_map = torch.tensor([1, -1, 3, 0]).int()
    compare_layers(wide[:1, :, 16:56], wide[1:, :, 8:48].contiguous(), row_map, torch.float16)
    compare_layers(wide[:1, :, 16:56].contiguous(), wide[1:, :, 8:48], row_map, torch.float16)


def test_slots_outside_the_ring_are_skipped():
    """A bad map must not write into somebody's memory."""
    random = seeded("outside")
    packed = ordinary((7, 80), random)
    outside = torch.tensor([4, -2, 2, 2**31 - 1, -(2**31), 5, 1]).int()
    inside = torch.tensor([-1, -1, 2, -1, -1, -1, 1]).int()
    got, want = (Ring(4, 2, 40, torch.float16) for _ in range(2))
    launch_packed(packed, outside, got.rows, got.counters)
    reference.gather_packed(packed, inside, want.rows, want.counters)
    got.assert_equal(want)
    launch_layer(packed[:, :40], None, 1, outside, got.rows, got.counters)
    reference.gather_layer(packed[:, :40], None, 1, inside, want.rows, want.counters)
    got.assert_equal(want)


def test_a_ring_of_more_than_two_billion_values():
    """Its last slot would be written at a negative offset if offsets had 32 bits."""
    slots, layers, hidden = 2**31 // 8000 + 2, 8, 1000
    rows = torch.empty(slots, layers, hidden, dtype=torch.float16)  # pages come when written
    counters = torch.empty(slots, layers, COUNTERS, dtype=torch.int32)
    packed = ordinary((1, layers * hidden), seeded("ring"))
    launch_packed(packed, torch.tensor([slots - 1]).int(), rows, counters)
    want, want_counters = reference.to_wire(packed.view(layers, hidden))
    assert torch.equal(rows[-1], want)
    assert torch.equal(counters[-1], want_counters)


def test_an_input_of_more_than_two_billion_values():
    stride = 2**30
    wide = torch.empty(2 * stride + 80, dtype=torch.bfloat16)
    packed = wide.as_strided((3, 80), (stride, 1))
    packed[:] = ordinary((3, 80), seeded("input"))
    compare_packed(packed, torch.tensor([0, 1, 2]).int(), 3, 2, torch.float16)
