import pytest
import torch

from draftfeed_consumer.policy import Policy, verdict
from draftfeed_proto.sample import LayerCounters

CLEAN = LayerCounters(0, 0, 0, 0)
LAYERS = 3


def states() -> torch.Tensor:
    return torch.randn(8, LAYERS, 16, generator=torch.Generator().manual_seed(0)).half() + 3


def counted(layer: int, **values: int) -> list[LayerCounters]:
    return [CLEAN._replace(**values) if at == layer else CLEAN for at in range(LAYERS)]


def test_a_clean_sample_is_accepted() -> None:
    assert verdict(Policy(), [CLEAN] * LAYERS, states()) == ("accept", "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_are_found_without_a_counter(value: float) -> None:
    bad = states()
    bad[4, 1, 7] = value
    found = verdict(Policy(), [CLEAN] * LAYERS, bad)
    assert found.action == "reject"
    assert found.reason == "values that are not finite (layers 1)"


def test_an_all_zero_row_is_found_without_a_counter() -> None:
    bad = states()
    bad[5, 2] = 0
    found = verdict(Policy(), [CLEAN] * LAYERS, bad)
    assert found == ("reject", "rows that are all zero (layers 2)")


def test_a_row_of_minus_zero_is_all_zero() -> None:
    bad = states()
    bad[0, 0] = -0.0
    assert verdict(Policy(), [CLEAN] * LAYERS, bad).action == "reject"


@pytest.mark.parametrize(
    ("counter", "action"),
    [
        ("nonfinite", "reject"),
        ("zero_rows", "reject"),
        ("saturated", "warn"),
        ("inexact", "accept"),
    ],
)
def test_the_taps_counters_decide(counter: str, action: str) -> None:
    assert verdict(Policy(), counted(1, **{counter: 2}), states()).action == action


def test_overflow_of_fp16_can_be_made_a_reason_to_reject() -> None:
    found = verdict(Policy(saturated="reject"), counted(0, saturated=1), states())
    assert found == ("reject", "values clamped to fp16's range (layers 0)")


def test_a_warning_does_not_hide_behind_another() -> None:
    policy = Policy(nonfinite="warn", zero_rows="warn")
    found = verdict(policy, counted(0, nonfinite=1, zero_rows=1, saturated=1), states())
    assert found.action == "warn"
    assert found.reason.count(";") == 2


def test_bf16_is_judged_too() -> None:
    bad = states().bfloat16()
    bad[0, 0, 0] = float("inf")
    assert verdict(Policy(), [CLEAN] * LAYERS, bad).action == "reject"
