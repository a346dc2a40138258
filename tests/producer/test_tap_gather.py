"""The checks before a launch, and the gather on a CPU.

What a kernel is given wrongly it reads wrongly without an error: rows of another token, or of
another layer, which train happily.
"""

from typing import Any

import pytest
import torch

from draftfeed_producer.errors import TapLayoutError
from draftfeed_producer.tap import reference
from draftfeed_producer.tap.gather import gather_layer, gather_packed, gather_with_final

T, L, H, SLOTS = 5, 2, 40, 7
POISON = 333.0


def arguments(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "packed_TLH": torch.randn(T, L * H, generator=generator).to(torch.bfloat16),
        "row_map": torch.tensor([3, -1, 0, 6, 2], dtype=torch.int32),
        "rows_SLH": torch.full((SLOTS, L, H), POISON, dtype=dtype),
        "counters_SL4": torch.full((SLOTS, L, 4), -9, dtype=torch.int32),
    }


def layer_arguments(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    given = arguments(dtype)
    packed = given.pop("packed_TLH")
    return {"hidden_TH": packed[:, :H], "residual_TH": packed[:, H:], "layer": 1, **given}


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


WRONG_INPUTS = {
    "dtype": torch.zeros(T, H),
    "fp16": torch.zeros(T, H, dtype=torch.float16),
    "too few tokens": bf16(T - 1, H),
    "too narrow": bf16(T, H - 8),
    "dimensions": bf16(T, 1, H),
    "every other element": bf16(T, 2 * H)[:, ::2],
    "transposed": bf16(H, T).T,
    "one row for all": bf16(1, H).expand(T, H),
    "stride not of 16 bytes": bf16(T, H + 4)[:, :H],
    "address not of 16 bytes": bf16(T, H + 8)[:, 4 : H + 4],
    "device": torch.zeros(T, H, dtype=torch.bfloat16, device="meta"),
}
WRONG_PACKED = {
    name: x.repeat(1, 2) if name in ("dtype", "fp16", "too few tokens", "too narrow") else x
    for name, x in WRONG_INPUTS.items()
}
WRONG_PACKED |= {
    "every other element": bf16(T, 2 * L * H)[:, ::2],
    "transposed": bf16(L * H, T).T,
    "one row for all": bf16(1, L * H).expand(T, L * H),
    "stride not of 16 bytes": bf16(T, L * H + 4)[:, : L * H],
    "address not of 16 bytes": bf16(T, L * H + 8)[:, 4 : L * H + 4],
    "device": torch.zeros(T, L * H, dtype=torch.bfloat16, device="meta"),
}
WRONG_OUTPUTS = {
    ("rows_SLH", "dtype"): torch.zeros(SLOTS, L, H),
    ("rows_SLH", "dimensions"): torch.zeros(SLOTS, L * H, dtype=torch.float16),
    ("rows_SLH", "H not in vectors"): torch.zeros(SLOTS, L, H + 4, dtype=torch.float16),
    ("rows_SLH", "gaps"): torch.zeros(SLOTS, L, 2 * H, dtype=torch.float16)[:, :, :H],
    ("rows_SLH", "layers outside"): torch.zeros(L, SLOTS, H, dtype=torch.float16).transpose(0, 1),
    ("rows_SLH", "address"): torch.zeros(SLOTS * L * H + 4, dtype=torch.float16)[4:].view(
        SLOTS, L, H
    ),
    ("counters_SL4", "dtype"): torch.zeros(SLOTS, L, 4, dtype=torch.int64),
    ("counters_SL4", "slots"): torch.zeros(SLOTS - 1, L, 4, dtype=torch.int32),
    ("counters_SL4", "layers"): torch.zeros(SLOTS, L + 1, 4, dtype=torch.int32),
    ("counters_SL4", "three"): torch.zeros(SLOTS, L, 3, dtype=torch.int32),
    ("counters_SL4", "gaps"): torch.zeros(SLOTS, L, 8, dtype=torch.int32)[:, :, :4],
    ("counters_SL4", "address"): torch.zeros(SLOTS * L * 4 + 1, dtype=torch.int32)[1:].view(
        SLOTS, L, 4
    ),
    ("counters_SL4", "device"): torch.zeros(SLOTS, L, 4, dtype=torch.int32, device="meta"),
    ("row_map", "dtype"): torch.zeros(T, dtype=torch.int64),
    ("row_map", "dimensions"): torch.zeros(T, 1, dtype=torch.int32),
    ("row_map", "every other"): torch.zeros(2 * T, dtype=torch.int32)[::2],
    ("row_map", "device"): torch.zeros(T, dtype=torch.int32, device="meta"),
}
each_output = pytest.mark.parametrize(
    ("argument", "what"), WRONG_OUTPUTS, ids=[f"{name}-{what}" for name, what in WRONG_OUTPUTS]
)


def refused(gather: Any, given: dict[str, Any], argument: str) -> TapLayoutError:
    """The call is refused for that argument, and nothing was written."""
    with pytest.raises(TapLayoutError, match=f"^{argument} is .*; it must be ") as caught:
        gather(**given)
    assert caught.value.argument == argument
    for name, poison in (("rows_SLH", POISON), ("counters_SL4", -9)):
        if name != argument:
            assert bool((given[name] == poison).all())
    return caught.value


@pytest.mark.parametrize("what", WRONG_PACKED)
def test_packed_states_that_a_kernel_would_read_wrongly_are_refused(what: str):
    refused(gather_packed, arguments() | {"packed_TLH": WRONG_PACKED[what]}, "packed_TLH")


@pytest.mark.parametrize("argument", ["hidden_TH", "residual_TH"])
@pytest.mark.parametrize("what", WRONG_INPUTS)
def test_states_of_a_layer_that_a_kernel_would_read_wrongly_are_refused(argument: str, what: str):
    refused(gather_layer, layer_arguments() | {argument: WRONG_INPUTS[what]}, argument)


def final_arguments(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    given = arguments(dtype)
    packed = given["packed_TLH"]
    return {**given, "packed_TLH": packed[:, :H], "final_TH": packed[:, H:].contiguous()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_final_state_that_lies_elsewhere_becomes_the_last_layer(dtype: torch.dtype):
    got, want = final_arguments(dtype), arguments(dtype)
    gather_with_final(**got)
    gather_packed(**want)
    for name in ("rows_SLH", "counters_SL4"):
        assert torch.equal(got[name], want[name])


@pytest.mark.parametrize("argument", ["packed_TLH", "final_TH"])
@pytest.mark.parametrize("what", WRONG_INPUTS)
def test_a_final_state_that_a_kernel_would_read_wrongly_is_refused(argument: str, what: str):
    refused(gather_with_final, final_arguments() | {argument: WRONG_INPUTS[what]}, argument)


def test_packed_states_with_a_layer_more_or_less_than_there_is_room_for_are_refused():
    """The last layer would hold what an earlier pass left there."""
    for width in (H, 3 * H):
        refused(gather_packed, arguments() | {"packed_TLH": bf16(T, width)}, "packed_TLH")
    for width in (2 * H, 3 * H):
        refused(gather_with_final, final_arguments() | {"packed_TLH": bf16(T, width)}, "packed_TLH")


@each_output
def test_what_would_be_written_wrongly_is_refused(argument: str, what: str):
    wrong = {argument: WRONG_OUTPUTS[argument, what]}
    refused(gather_packed, arguments() | wrong, argument)
    refused(gather_layer, layer_arguments() | wrong, argument)
    refused(gather_with_final, final_arguments() | wrong, argument)


def test_a_row_map_of_another_batch_is_refused():
    shorter = {"row_map": torch.zeros(T - 1, dtype=torch.int32)}
    refused(gather_packed, arguments() | shorter, "packed_TLH")
    refused(gather_layer, layer_arguments() | shorter, "hidden_TH")


@pytest.mark.parametrize("layer", [-1, L])
def test_a_layer_that_no_slot_has_is_refused(layer: int):
    refused(gather_layer, layer_arguments() | {"layer": layer}, "layer")


def test_a_refusal_says_what_it_found_and_what_is_needed():
    error = refused(
        gather_packed, arguments() | {"packed_TLH": torch.zeros(T, L * H)}, "packed_TLH"
    )
    assert "float32 [5, 80], strides (80, 1)" in error.found
    assert error.wanted == "bfloat16 [5, 80]"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_cpu_the_reference_gathers(dtype: torch.dtype):
    got, want = arguments(dtype), arguments(dtype)
    gather_packed(**got)
    reference.gather_packed(**want)
    assert torch.equal(got["rows_SLH"], want["rows_SLH"])
    assert torch.equal(got["counters_SL4"], want["counters_SL4"])
    assert int((got["counters_SL4"][:, 0, 0] != -9).sum()) == 4


@pytest.mark.parametrize("alone", [True, False])
def test_on_a_cpu_the_reference_gathers_a_layer(alone: bool):
    got, want = layer_arguments(), layer_arguments()
    if alone:
        got["residual_TH"] = want["residual_TH"] = None
    gather_layer(**got)
    reference.gather_layer(**want)
    assert torch.equal(got["rows_SLH"], want["rows_SLH"])
    assert torch.equal(got["counters_SL4"], want["counters_SL4"])
    assert bool((got["rows_SLH"][:, 0] == POISON).all())
    assert int((got["counters_SL4"][:, 1, 0] != -9).sum()) == 4


def test_no_tokens_write_nothing():
    given = arguments()
    given |= {"packed_TLH": bf16(0, L * H), "row_map": torch.zeros(0, dtype=torch.int32)}
    gather_packed(**given)
    assert bool((given["rows_SLH"] == POISON).all())
