"""Qwen3 in SGLang: as it comes, in chunks without planning ahead, and with retractions."""

from collections.abc import Iterator

import pytest

from engine_suite import (  # noqa: F401 - the tests are run here
    test_counters_are_the_sums_over_a_samples_own_rows,
    test_every_sample_has_one_id_more_than_rows,
    test_layer_ids_shifted_by_one_do_not_pass_for_equal,
    test_prefill_of_a_response_makes_the_sample_that_live_capture_made,
    test_rows_captured_in_prefill_mode_equal_one_full_forward_pass,
    test_rows_captured_while_generating_equal_one_full_forward_pass,
    test_rows_shifted_by_one_do_not_pass_for_equal,
    test_the_final_state_equals_that_of_one_full_forward_pass,
    test_the_final_state_makes_the_targets_logits,
    test_what_stands_for_the_state_before_the_norm_makes_the_targets_logits,
)
from sglang_engines import Case, Running, started
from sglang_suite import *  # noqa: F403 - the tests are run here

pytestmark = pytest.mark.timeout(300)

LAYERS = (0, 2, 4)
CASES = {
    "plain": Case("tiny_qwen3", LAYERS, final="postnorm"),
    "chunks-no_overlap": Case(
        "tiny_qwen3", LAYERS, {"chunked_prefill_size": 8, "disable_overlap_schedule": True}
    ),
    "chunks-retractions": Case(
        "tiny_qwen3", LAYERS, {"chunked_prefill_size": 16}, retract=True, final="postnorm"
    ),
}


@pytest.fixture(scope="module", params=CASES)
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    case = CASES[request.param]
    with started(case, request.getfixturevalue(case.model)) as running:
        yield running
