"""Rows of tokens that SGLang found in its prefix cache, and so did not compute again."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from draftfeed_producer.prompts import Prompt
from draftfeed_proto.sample import Sample
from engine_suite import (  # noqa: F401 - the tests are run here
    test_counters_are_the_sums_over_a_samples_own_rows,
    test_every_sample_has_one_id_more_than_rows,
    test_prefill_of_a_response_makes_the_sample_that_live_capture_made,
    test_rows_captured_in_prefill_mode_equal_one_full_forward_pass,
    test_rows_captured_while_generating_equal_one_full_forward_pass,
    test_the_final_state_equals_that_of_one_full_forward_pass,
    test_the_final_state_makes_the_targets_logits,
    test_what_stands_for_the_state_before_the_norm_makes_the_targets_logits,
)
from sglang_engines import (
    Case,
    Reader,
    Running,
    fed,
    in_order,
    prompts_of,
    started,
    words,
)
from sglang_suite import *  # noqa: F403 - the tests are run here

pytestmark = pytest.mark.timeout(300)

# So few KV slots that what is cached is thrown out again, and its slots go to others.
SMALL = {"max_total_tokens": 320}
CASES = {
    "qwen3": Case(
        "tiny_qwen3", (0, 2, 4), {"chunked_prefill_size": 16, **SMALL}, True, final="postnorm"
    ),
    "qwen3-retractions": Case("tiny_qwen3", (0, 2, 4), SMALL, True, retract=True),
    # Only without planning ahead does SGLang keep the recurrent states of prefixes on a CPU.
    "qwen35": Case(
        *("tiny_qwen35", (0, 3, 6), {"disable_overlap_schedule": True, **SMALL}, True),
        final="postnorm",
    ),
}


@pytest.fixture(scope="module", params=CASES)
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    case = CASES[request.param]
    with started(case, request.getfixturevalue(case.model)) as running:
        yield running


def random_ids(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 400, length).astype(np.int32)


def make(running: Running, prompts: list[Prompt], reader: Reader) -> tuple[list[Sample], int]:
    """Samples, checked, and how many of their rows were not computed now."""
    engine = running.with_()
    before = engine.captured
    samples = in_order(engine.run(iter(prompts)))
    assert [sample.id for sample in samples] == [prompt.id for prompt in prompts]
    assert engine.recaptured == 0
    reader.check(samples, running.case)
    return samples, fed(samples) - (engine.captured - before)


def test_a_batch_of_prompts_that_begin_alike_has_all_its_rows(
    running: Running, reader: Reader, record_property: Callable[[str, object], None]
):
    """Fewer rows than tokens, silently; with more than one prompt in the batch, rows that land in
    another request."""
    head = random_ids(70, 24)
    make(running, prompts_of([head]), reader)
    since = running.whole_log()
    tails = [random_ids(71 + i, length) for i, length in enumerate((3, 17, 1, 9))]
    prompts = prompts_of(np.concatenate([head, tail]) for tail in tails)
    _, saved = make(running, prompts, reader)
    cached = running.logged(r"#cached-token: (\d+)", since)
    record_property("rows not computed again", f"{saved}, cached tokens: {cached}")
    assert sum(cached) >= 4 * len(head)
    if not running.case.retract:
        assert saved == 4 * len(head)


def test_a_beginning_that_no_prompt_ended_at(
    running: Running, reader: Reader, record_property: Callable[[str, object], None]
):
    """A system prompt: cached where each token has its own KV; SGLang keeps a hybrid's recurrent
    states where a prompt or a response ended, so there it is computed again."""
    head = random_ids(75, 18)
    prompts = prompts_of(np.concatenate([head, random_ids(76 + i, 4 + i)]) for i in range(4))
    make(running, prompts[:1], reader)
    _, saved = make(running, prompts[1:], reader)
    record_property("rows not computed again", str(saved))
    if not running.case.retract:
        assert saved == (0 if running.case.model == "tiny_qwen35" else 3 * len(head))


def test_a_prompt_that_goes_on_from_a_response_has_that_responses_rows(
    running: Running, reader: Reader, record_property: Callable[[str, object], None]
):
    """Rows of generated tokens, found again as part of the next prompt; the last token of the
    response had none and must get one."""
    first, _ = make(running, prompts_of([random_ids(80, 12), random_ids(81, 20)]), reader)
    since = running.whole_log()
    again = (np.concatenate([sample.input_ids, random_ids(82, 5)]) for sample in first)
    make(running, prompts_of(again), reader)
    cached = running.logged(r"#cached-token: (\d+)", since)
    record_property("cached tokens", str(cached))
    assert sum(cached) >= fed(first)


def test_the_same_prompt_side_by_side_and_again(
    running: Running, reader: Reader, record_property: Callable[[str, object], None]
):
    """Two that compute the same prefix at the same time: one of them gives its slots up."""
    ids = random_ids(90, 21)
    samples, _ = make(running, prompts_of([ids, ids, ids]), reader)
    again, saved = make(running, prompts_of([ids, ids]), reader)
    record_property("rows not computed again", str(saved))
    assert {tuple(words(sample)) for sample in [*samples, *again]} == {tuple(words(samples[0]))}


def test_slots_that_went_to_others_do_not_bring_their_old_rows(running: Running, reader: Reader):
    """A row lives as long as its KV slot: more tokens than the cache holds, then the first
    prompts again, of which some are still cached in part and some not at all."""
    first = prompts_of(random_ids(100 + i, 20 + i) for i in range(4))
    others = prompts_of(random_ids(200 + i, 30 + i % 7) for i in range(16))
    make(running, first, reader)
    samples, _ = make(running, others, reader)
    assert fed(samples) > running.case.args["max_total_tokens"]
    make(running, first, reader)
