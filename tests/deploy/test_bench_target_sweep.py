"""How a benchmark of the target counts, and when it has seen enough."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftfeed_deploy.bench_target_machine import cards
from draftfeed_deploy.bench_target_sweep import (
    FLAT,
    Budget,
    Rate,
    batches,
    expected_seconds,
    flat,
    gain,
    knee,
)
from draftfeed_deploy.bench_target_turn import (
    Response,
    Unusable,
    Watch,
    first_token_seconds,
    output_rate,
    prefill_rate,
)
from draftfeed_producer.prompts import Prompt
from engine_suite import make_prompts

gains = st.lists(st.floats(-0.5, 1.0).filter(lambda g: abs(g - FLAT) > 1e-6), max_size=12)


def rising(steps: list[float]) -> list[Rate]:
    """Rates of batches 1, 2, 4 and so on, each so much more than the one before."""
    rates = [Rate(1, 100.0)]
    for step in steps:
        rates.append(Rate(2 * rates[-1].batch, rates[-1].output * (1 + step)))
    return rates


@given(st.integers(1, 5000))
def test_every_batch_is_at_most_twice_the_last_and_the_largest_is_there(most: int):
    found = list(batches(most))
    assert (found[0], found[-1]) == (1, most)
    assert all(a < b <= 2 * a for a, b in pairwise(found))


@given(gains)
def test_it_is_flat_when_the_last_two_doublings_gave_less_than_five_percent(steps: list[float]):
    assert flat(rising(steps)) == (len(steps) >= 2 and max(steps[-2:]) < FLAT)


@given(gains)
def test_behind_the_knee_no_doubling_gives_five_percent_and_the_last_before_it_does(
    steps: list[float],
):
    rates = rising(steps)
    at = rates.index(knee(rates))
    assert all(step < FLAT for step in steps[at:])
    assert at == 0 or steps[at - 1] >= FLAT


@given(st.integers(1, 1000), st.integers(1, 10), st.floats(0.5, 1.9))
def test_a_gain_is_of_a_doubling_whatever_the_step(batch: int, doublings: int, factor: float):
    """The last step to a batch that is no power of two is a small one: its gain looks flat."""
    larger = Rate(batch * 2**doublings, 100 * factor**doublings)
    assert gain(Rate(batch, 100.0), larger) == pytest.approx(factor - 1)


def test_a_small_last_step_does_not_look_flat():
    assert gain(Rate(32, 1000), Rate(33, 1020)) > FLAT


@given(st.floats(0.1, 100), st.lists(st.floats(0, 10), max_size=50))
def test_what_a_budget_allows_never_ends_after_it(seconds: float, costs: list[float]):
    now = 0.0
    budget = Budget(seconds, lambda: now)
    for cost in costs:
        if budget.allows(cost):
            now += cost
    assert budget.left_seconds >= -1e-9


def test_the_next_batch_is_expected_to_take_as_much_longer_as_it_is_larger():
    assert expected_seconds(3.0, 4, 8) == 6.0


def regular(count: int, tokens: int, step: float, first: list[float], every: int) -> list[Response]:
    """Responses whose tokens come each `step` seconds after their first, told of now and then."""
    found = []
    for i in range(count):
        numbers = sorted({1, *range(1, tokens, every), tokens})
        times = [first[i] + (number - 1) * step for number in numbers]
        found.append(Response(10, 0.0, times, numbers))
    return found


@given(
    st.integers(1, 8),
    st.integers(8, 64),
    st.floats(0.001, 1.0),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_the_output_rate_is_that_of_requests_that_decode_together(
    count: int, tokens: int, step: float, every: int, randomly: random.Random
):
    """However far apart their first tokens were, and however seldom one hears of them."""
    first = [randomly.uniform(0, (tokens - 2) * step) for _ in range(count)]
    rate = output_rate(regular(count, tokens, step, first, every))
    assert rate == pytest.approx(count / step, rel=1e-6)


def test_prefill_is_not_in_the_output_rate():
    """A long prefill before ten tokens a second must leave them ten."""
    responses = regular(2, 11, 0.2, [100.0, 100.0], 1)
    assert output_rate(responses) == pytest.approx(10)


def test_requests_that_were_never_together_have_no_rate():
    """A KV cache with room for half of them: the batch is not what it says."""
    responses = regular(2, 10, 0.1, [1.0, 5.0], 1)
    with pytest.raises(Unusable, match="did not have 2 requests at a time"):
        output_rate(responses)


def test_prefill_is_from_the_first_submission_to_the_last_answer():
    responses = [Response(30, 1.0, [3.0], [1]), Response(70, 2.0, [6.0], [1])]
    assert prefill_rate(responses) == pytest.approx(100 / 5)


def test_the_first_token_is_counted_from_each_requests_own_submission():
    at = [(0.0, 1.0), (5.0, 7.0), (6.0, 16.0)]
    responses = [Response(1, begun, [first, 20.0], [1, 2]) for begun, first in at]
    assert first_token_seconds(responses) == 2.0


@pytest.fixture
def prompts() -> list[Prompt]:
    return make_prompts([3, 4])


def watched(prompts: list[Prompt], told: list[list[int]]) -> Watch:
    watch = Watch()
    for prompt, tokens in zip(watch.feed(prompts), told, strict=True):
        for at, number in enumerate(tokens):
            watch(prompt.id, number, float(at))
    return watch


def test_a_response_that_is_made_again_is_not_counted(prompts: list[Prompt]):
    """Rows were missing, or the engine died: its time has two responses in it."""
    watch = watched(prompts, [[1, 2, 3, 4], [1, 2, 1, 2, 3, 4]])
    with pytest.raises(Unusable, match="a second time"):
        watch.responses(2, 4)
    watch.begin()
    assert list(watch.feed(prompts)) == prompts
    for prompt in prompts:
        watch(prompt.id, 4, 0.0)
    assert [one.prompt_tokens for one in watch.responses(2, 4)] == [3, 4]


@pytest.mark.parametrize("told", [[[1, 4], [1, 3]], [[1, 4], []]])
def test_responses_that_are_short_or_missing_are_not_counted(
    prompts: list[Prompt], told: list[list[int]]
):
    with pytest.raises(Unusable, match="not all of 2 responses have 4 tokens"):
        watched(prompts, told).responses(2, 4)


def test_cards_are_named_as_nvidia_smi_knows_them(monkeypatch: pytest.MonkeyPatch):
    """CUDA counts from 0 whatever CUDA_VISIBLE_DEVICES leaves out; nvidia-smi does not."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cards(2, 2) == ["2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,6,7")
    assert cards(0, 2) == ["4", "GPU-a"]
