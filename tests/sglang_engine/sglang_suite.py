"""What SGLang must get right however it schedules: tests for each `running` engine, on top of
the suite of every engine. A module imports these tests and has a fixture `running`."""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.prompts import Prompt
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample
from engine_suite import (
    LENGTHS,
    Captured,
    assert_sampled_from,
    given,
    lost_channels,
    make_prompts,
)
from sglang_engines import NEW_TOKENS, TOLERANCE, Reader, Running, fed, in_order, words


@pytest.fixture(scope="module")
def reader(running: Running) -> Reader:
    return Reader(running.path)


@pytest.fixture(scope="module")
def captured(running: Running, reader: Reader) -> Captured:
    """Six prompts of mixed lengths, four at a time."""
    prompts = make_prompts(LENGTHS)
    # Drawn, not greedy: a random model soon repeats one token, and then rows repeat, too.
    engine = running.with_(temperature=1.0)
    samples = in_order(engine.run(iter(prompts)))
    assert [sample.id for sample in samples] == [prompt.id for prompt in prompts]
    assert engine.recaptured == 0
    references = [reader.reference(sample) for sample in samples]
    return Captured(
        running.case.layer_ids,
        TOLERANCE,
        NEW_TOKENS,
        prompts,
        samples,
        references,
        lost_channels(running.path),
        running.case.final,
        reader.forward,
    )


@pytest.fixture(scope="module")
def prefilled(running: Running, captured: Captured) -> list[Sample]:
    engine = running.with_(mode="prefill")
    samples = in_order(engine.run(iter(given(captured))))
    assert engine.recaptured == 0
    return samples


@pytest.fixture(scope="module")
def greedy(captured: Captured, reader: Reader) -> list[list[int]]:
    """transformers' responses to the prompts of `captured`, each alone."""
    return [reader.greedy(prompt) for prompt in captured.prompts]


def test_greedy_tokens_equal_those_of_transformers(
    running: Running, captured: Captured, greedy: list[list[int]]
):
    """The tap must change nothing of what is generated. A final state is the one that the head
    made each of them from."""
    samples = in_order(running.with_().run(iter(captured.prompts)))
    assert [words(sample) for sample in samples] == greedy
    if captured.final != "none":
        assert_sampled_from(samples, captured.forward, len(captured.layer_ids), captured.final)


def test_responses_end_with_a_stop_token_or_at_the_limit(
    running: Running,
    reader: Reader,
    captured: Captured,
    greedy: list[list[int]],
    record_property: Callable[[str, object], None],
):
    """The last token has no row, whichever way a response ends. A request that ended
    is in one more pass when the scheduler plans ahead, and that pass's rows are nobody's."""
    stop, expected = stop_for(greedy)
    engine = running.with_(stop_token_ids=(stop,))
    before = engine.captured
    samples = in_order(engine.run(iter(captured.prompts)))
    assert [words(sample) for sample in samples] == expected
    for sample, response in zip(samples, expected, strict=True):
        assert sample.finish_reason == ("stop" if response[-1] == stop else "length")
        assert len(sample.hidden_states) == len(sample.input_ids) - 1
    reader.check(samples, running.case)
    passed_over = engine.captured - before - fed(samples)
    record_property("rows of passes after the end", str(passed_over))
    if not running.case.retract and not running.case.prefix_cache:
        assert (passed_over > 0) == running.case.overlap


def stop_for(responses: list[list[int]]) -> tuple[int, list[list[int]]]:
    """A token that ends some of the responses, none of them at once, and not all; and what then
    is left of them."""
    for stop in sorted({token for response in responses for token in response}):
        cut = [
            response[: response.index(stop) + 1] if stop in response else response
            for response in responses
        ]
        ended = [response[-1] == stop and len(response) < NEW_TOKENS for response in cut]
        if any(ended) and not all(stop in response for response in responses):
            return stop, cut
    raise AssertionError("the responses are too much alike")


class Feed:
    """Counts the prompts that the engine has taken."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = iter(prompts)
        self.taken = 0

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        prompt = next(self._prompts)
        self.taken += 1
        return prompt


def numbered(prompts: list[Prompt]) -> list[Prompt]:
    return [
        msgspec.structs.replace(prompt, id=SampleId("f" * 16, 0, 0, i), key=f"p{i}")
        for i, prompt in enumerate(prompts)
    ]


def most_at_once(engine: SGLangEngine, prompts: list[Prompt]) -> tuple[int, list[Sample]]:
    """Prompts taken whose samples had not come, at the most."""
    feed, samples, most = Feed(prompts), [], 0
    for sample in engine.run(feed):
        most = max(most, feed.taken - len(samples))
        samples.append(sample)
    return most, in_order(samples)


def test_prompts_are_fed_as_slots_become_free(running: Running, captured: Captured, reader: Reader):
    """Memory is bounded by what is in the engine, not by the prompt file."""
    prompts = numbered(captured.prompts * 2)
    since = running.whole_log()
    most, samples = most_at_once(running.with_(), prompts)
    assert len(samples) == len(prompts)
    assert most <= 4
    reader.check(samples, running.case)
    if not running.case.retract:
        assert max(running.logged(r"#running-req: (\d+)", since)) == 4


def test_staging_memory_for_two_samples_admits_two(
    running: Running, captured: Captured, reader: Reader
):
    """Long samples are gigabytes; what is set aside bounds how many are begun."""
    rows = max(LENGTHS) + NEW_TOKENS - 1
    hidden = captured.samples[0].hidden_states.shape[2]
    prompts = numbered([captured.prompts[-1]] * 5)
    staging_bytes = 2 * rows * 2 * captured.layers * hidden
    since = running.whole_log()
    # The next prompt is looked at before it is known to have no room.
    most, samples = most_at_once(running.with_(staging_bytes=staging_bytes), prompts)
    assert len(samples) == 5
    assert most <= 3
    reader.check(samples, running.case)
    at_once = max(running.logged(r"#running-req: (\d+)", since))
    assert at_once <= 2
    if not running.case.retract and not running.case.prefix_cache:
        assert at_once == 2


def test_a_run_that_is_given_up_leaves_nothing_behind_for_the_next(
    running: Running, captured: Captured, greedy: list[list[int]], reader: Reader
):
    """Rows and responses of requests that were given up are still on their way."""
    engine = running.with_()
    run = engine.run(iter(captured.prompts))
    next(run)
    run.close()  # type: ignore[attr-defined]
    samples = in_order(engine.run(iter(captured.prompts)))
    assert [words(sample) for sample in samples] == greedy
    reader.check(samples, running.case)


def test_a_response_of_one_token_and_a_prompt_of_one(running: Running, reader: Reader):
    """The shortest samples: no decode pass at all."""
    prompts = make_prompts([1, 1, 2])
    samples = in_order(running.with_(max_new_tokens=1).run(iter(prompts)))
    assert [len(sample.hidden_states) for sample in samples] == [1, 1, 2]
    assert all(sample.finish_reason in ("length", "stop") for sample in samples)
    reader.check(samples, running.case)


def test_the_log_tells_of_chunks(running: Running, captured: Captured):
    """Only the last chunk's rows. Here it is proved that there were chunks."""
    chunk = running.case.args.get("chunked_prefill_size")
    if chunk is None:
        pytest.skip("prompts are not cut in this engine")
    sizes = running.logged(r"#new-token: (\d+)")
    assert max(sizes) <= chunk < max(LENGTHS)
    assert np.count_nonzero(np.array(sizes) == chunk) > 0


def test_the_log_tells_of_retractions(
    running: Running, captured: Captured, record_property: Callable[[str, object], None]
):
    """A request thrown out and taken up again makes rows twice and has them once. Here it is
    proved that some were."""
    if not running.case.retract:
        pytest.skip("nothing is thrown out in this engine")
    thrown_out = sum(running.logged(r"#retracted_reqs: (\d+)"))
    record_property("requests thrown out", str(thrown_out))
    assert thrown_out > 0
