from typing import Any

import pytest
import torch

from draftfeed_consumer.policy import Policy, Verdict, verdict
from draftfeed_proto.sample import LayerCounters

CLEAN = LayerCounters(0, 0, 0, 0)
LAYERS = 3


def states() -> torch.Tensor:
    return torch.randn(8, LAYERS, 16, generator=torch.Generator().manual_seed(0)).half() + 3


def judged(
    states: torch.Tensor, counters: list[LayerCounters] | None = None, **policy: Any
) -> Verdict:
    item = {"counters": counters or [CLEAN] * LAYERS, "hidden_states": states}
    return verdict(Policy(**policy), item)


def counted(layer: int, **values: int) -> list[LayerCounters]:
    return [CLEAN._replace(**values) if at == layer else CLEAN for at in range(LAYERS)]


def test_a_clean_sample_is_accepted() -> None:
    assert judged(states()) == ("accept", "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_are_found_without_a_counter(value: float) -> None:
    bad = states()
    bad[4, 1, 7] = value
    found = judged(bad)
    assert found.action == "reject"
    assert found.reason == "values that are not finite (layers 1)"


def test_an_all_zero_row_is_found_without_a_counter() -> None:
    bad = states()
    bad[5, 2] = 0
    found = judged(bad)
    assert found == ("reject", "rows that are all zero (layers 2)")


def test_a_row_of_minus_zero_is_all_zero() -> None:
    bad = states()
    bad[0, 0] = -0.0
    assert judged(bad).action == "reject"


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
    assert judged(states(), counted(1, **{counter: 2})).action == action


def test_overflow_of_fp16_can_be_made_a_reason_to_reject() -> None:
    found = judged(states(), counted(0, saturated=1), saturated="reject")
    assert found == ("reject", "values clamped to fp16's range (layers 0)")


def test_a_warning_does_not_hide_behind_another() -> None:
    counters = counted(0, nonfinite=1, zero_rows=1, saturated=1)
    found = judged(states(), counters, nonfinite="warn", zero_rows="warn")
    assert found.action == "warn"
    assert found.reason.count(";") == 2


@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "values that are not finite"), (0.0, "rows that are all")]
)
def test_the_final_state_is_judged_too(value: float, what: str) -> None:
    """One that nobody wrote, or with a NaN: labels are made of it."""
    final = states()[:, 0].clone()
    item = {"counters": [CLEAN] * (LAYERS + 1), "hidden_states": states(), "final_states": final}
    assert verdict(Policy(), item).action == "accept"
    final[3] = value
    found = verdict(Policy(), item)
    assert found.action == "reject"
    assert found.reason.startswith(what)
    assert found.reason.endswith("(layers 3)")


def test_bf16_is_judged_too() -> None:
    bad = states().bfloat16()
    bad[0, 0, 0] = float("inf")
    assert judged(bad).action == "reject"
