import numpy as np
import pytest
import torch

from draftfeed_producer.tap.reference import gather_layer, gather_packed, to_wire

ALL_BF16 = np.arange(65536, dtype=np.uint32).astype(np.uint16)
POISON = 333.0


def bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).to(torch.bfloat16)


def bits(fp16: torch.Tensor) -> np.ndarray:
    return fp16.contiguous().view(torch.int16).numpy().view(np.uint16)


def independent(bf16_bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp16 bits and class ("ok", "saturated", "nonfinite", "inexact") by exact arithmetic.

    Every bf16 and fp16 value is a float64, so the nearest fp16 can be searched among all of them.
    """
    with np.errstate(invalid="ignore"):
        x = (bf16_bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    finite16 = np.arange(0x7C00, dtype=np.uint16)
    grid = finite16.view(np.float16).astype(np.float64)
    magnitude = np.abs(x)
    with np.errstate(invalid="ignore"):
        above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    low, high = magnitude - grid[above - 1], grid[above] - magnitude
    up = (high < low) | ((high == low) & (finite16[above] % 2 == 0))
    nearest = np.where(up, finite16[above], finite16[above - 1])
    nearest = np.where(magnitude > 65504, 0x7BFF, nearest)
    nearest = np.where(np.isinf(x), 0x7C00, nearest) | (bf16_bits & 0x8000)
    wire = np.where(np.isnan(x), 0x7E00, nearest).astype(np.uint16)
    kind = np.where(grid[np.minimum(nearest & 0x7FFF, 0x7BFF)] != magnitude, "inexact", "ok")
    kind = np.where(magnitude > 65504, "saturated", kind)
    kind = np.where(~np.isfinite(x), "nonfinite", kind)
    return wire, kind


def test_every_bf16_pattern_converts_bit_exactly():
    wire, kind = independent(ALL_BF16)
    got, counters = to_wire(bf16(ALL_BF16)[:, None])
    np.testing.assert_array_equal(bits(got)[:, 0], wire)
    for column, name in enumerate(("saturated", "nonfinite", "inexact")):
        np.testing.assert_array_equal(counters[:, column].numpy(), kind == name)
    np.testing.assert_array_equal(counters[:, 3].numpy(), (ALL_BF16 & 0x7FFF) == 0)


def test_bf16_on_the_wire_is_every_pattern_unchanged_but_one_nan():
    """The sign and payload of a NaN differ between machines, and digests with them."""
    got, counters = to_wire(bf16(ALL_BF16)[:, None], torch.bfloat16)
    magnitude = ALL_BF16 & 0x7FFF
    want = np.where(magnitude > 0x7F80, 0x7FC0, ALL_BF16)
    np.testing.assert_array_equal(bits(got)[:, 0], want)
    columns = [0 * magnitude, magnitude >= 0x7F80, 0 * magnitude, magnitude == 0]
    np.testing.assert_array_equal(counters.numpy(), np.stack(columns, axis=-1))


def test_conversion_is_the_same_in_a_process_that_flushes_denormals():
    want = to_wire(bf16(ALL_BF16)[:, None])
    torch.set_flush_denormal(True)
    try:
        got = to_wire(bf16(ALL_BF16)[:, None])
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(bits(got[0]), bits(want[0]))
    assert torch.equal(got[1], want[1])


def test_fp32_is_rounded_to_bf16_nearest_even_first():
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    halfway = (ALL_BF16.astype(np.uint32) << 16) | 0x8000
    raw = np.concatenate([raw, halfway])
    raw = raw[(raw & 0x7FFFFFFF) <= 0x7F800000]
    rounded = ((raw.astype(np.uint64) + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
    got, counters = to_wire(torch.from_numpy(raw.view(np.float32)))
    want, want_counters = to_wire(bf16(rounded))
    np.testing.assert_array_equal(bits(got), bits(want))
    assert counters.tolist() == want_counters.tolist()


def test_nan_and_inf_are_counted_instead_of_trained_on_unseen():
    """NaN/Inf rows trained on, or one of them aborts the whole run."""
    x = torch.stack((values(1.0, float("nan"), float("inf")), values(-float("inf"), 2.0, 3.0)))
    wire, counters = to_wire(x)
    assert bits(wire).tolist() == [[0x3C00, 0x7E00, 0x7C00], [0xFC00, 0x4000, 0x4200]]
    assert counters.tolist() == [[0, 2, 0, 0], [0, 1, 0, 0]]


def test_all_zero_rows_are_flagged():
    """All-zero rows pass every check."""
    x = torch.stack((values(0.0, -0.0, 0.0), values(0.0, 1e-30, 0.0)))
    _, counters = to_wire(x)
    assert counters[:, 3].tolist() == [1, 0]
    assert counters[:, 2].tolist() == [0, 1]  # the tiny value is lost, and counted as lost


def test_values_beyond_65504_saturate_and_are_counted():
    """fp16 overflow."""
    x = values(24960.0, 65280.0, 65536.0, -70000.0, 3e38)[None]
    wire, counters = to_wire(x)
    assert wire[0].tolist() == [24960.0, 65280.0, 65504.0, -65504.0, 65504.0]
    assert counters.tolist() == [[3, 0, 0, 0]]


@pytest.mark.parametrize("tokens", [1, 9, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gather_writes_the_named_slots_and_no_other(tokens: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(tokens)
    layers, hidden, slots = 3, 5, tokens + 8
    packed = torch.randn(tokens, layers * hidden, generator=generator).to(dtype)
    packed[:, 7] = 70000.0
    row_map = torch.randperm(slots, generator=generator)[:tokens].to(torch.int32)
    row_map[1::4] = -1
    rows = torch.full((slots, layers, hidden), POISON, dtype=torch.float16)
    counters = torch.full((slots, layers, 4), -9, dtype=torch.int32)
    gather_packed(packed, row_map, rows, counters)
    written = set()
    for token, slot in enumerate(row_map.tolist()):
        if slot >= 0:
            want, want_counters = to_wire(packed[token].view(layers, hidden))
            assert torch.equal(rows[slot], want)
            assert torch.equal(counters[slot], want_counters)
            written.add(slot)
    untouched = [slot for slot in range(slots) if slot not in written]
    assert bool((rows[untouched] == POISON).all())
    assert bool((counters[untouched] == -9).all())


def test_gather_of_nothing_writes_nothing():
    rows = torch.full((4, 2, 3), POISON, dtype=torch.float16)
    counters = torch.full((4, 2, 4), -9, dtype=torch.int32)
    skip_all = torch.full((5,), -1, dtype=torch.int32)
    gather_packed(torch.ones(5, 6, dtype=torch.bfloat16), skip_all, rows, counters)
    assert bool((rows == POISON).all())
    assert bool((counters == -9).all())


def summed(states: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """bf16 patterns of the sums, rounded to nearest even by integers; of a NaN 0x7FC0."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = sum((x.astype(np.uint32) << 16).view(np.float32) for x in (states, residual))
    raw = np.asarray(total, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return np.where(np.isnan(total), 0x7FC0, rounded).astype(np.uint16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_is_what_the_model_computes_with_hidden_plus_residual(dtype: torch.dtype):
    """Rounded any other way, the rows would differ from what the next block was given."""
    rng = np.random.default_rng(11)
    states, residual = rng.integers(0, 1 << 16, (2, 3000, 8), dtype=np.uint16)
    halfway = (0x3F80 | (states[:500] & 0x807F)).astype(np.uint16)
    states[:500], residual[:500] = halfway, 0x3B80 | (residual[:500] & 0x8000)
    row_map = torch.from_numpy(rng.permutation(3000).astype(np.int32))
    row_map[::7] = -1
    rows = torch.full((3000, 2, 8), POISON, dtype=dtype)
    counters = torch.full((3000, 2, 4), -9, dtype=torch.int32)
    gather_layer(bf16(states), bf16(residual), 1, row_map, rows, counters)
    want, want_counters = to_wire(bf16(summed(states, residual)), dtype)
    taken = row_map >= 0
    slots = row_map[taken].long()
    np.testing.assert_array_equal(bits(rows[slots, 1]), bits(want[taken]))
    assert torch.equal(counters[slots, 1], want_counters[taken])
    untouched = torch.ones(3000, dtype=torch.bool)
    untouched[slots] = False
    assert bool((rows[:, 0] == POISON).all())
    assert bool((rows[untouched] == POISON).all())
    assert bool((counters[:, 0] == -9).all())
    assert bool((counters[untouched] == -9).all())


def test_a_layer_without_residual_is_what_the_packed_form_makes_of_it():
    states = torch.randn(6, 16, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    row_map = torch.tensor([2, 0, -1, 4, 1, 3], dtype=torch.int32)
    together, one_by_one = (torch.full((5, 2, 8), POISON, dtype=torch.float16) for _ in range(2))
    counters, layer_counters = torch.zeros(2, 5, 2, 4, dtype=torch.int32)
    gather_packed(states, row_map, together, counters)
    for layer, states_TH in enumerate(states.split(8, dim=1)):
        gather_layer(states_TH, None, layer, row_map, one_by_one, layer_counters)
    assert torch.equal(one_by_one, together)
    assert torch.equal(layer_counters, counters)
