"""The quality gate. Once, 87% of 914,000 responses were "OK." and nobody noticed until the end."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from draftfeed_producer.quality import (
    Alarm,
    QualityConfig,
    QualityGate,
    Response,
    shown,
    thinking_is_open,
)

Maker = Callable[[random.Random, int], Response]


def response(
    key: object, text: str, tokens: int, finish: str = "stop", thinking: bool = False
) -> Response:
    return Response(str(key), tokens, text.encode(), finish, thinking, text)


def ok(numbers: random.Random, key: int) -> Response:
    return response(key, "OK.", 6)


def prose(numbers: random.Random, key: int) -> Response:
    return response(key, f"It is {numbers.random()}.", numbers.randint(40, 2000))


def tool_call(numbers: random.Random, key: int) -> Response:
    """Some are the same: a call without arguments."""
    if numbers.random() < 0.1:
        return response(key, '{"name": "get_time", "arguments": {}}', 14)
    city = numbers.randrange(500)
    return response(key, f'{{"name": "weather", "arguments": {{"city": {city}}}}}', 19)


def one_word(numbers: random.Random, key: int) -> Response:
    """Correct, and half of them yes or no."""
    words = ["Yes.", "No."] if numbers.random() < 0.5 else [f"word-{numbers.randrange(400)}"]
    return response(key, numbers.choice(words), numbers.randint(2, 6))


def endless(numbers: random.Random, key: int) -> Response:
    text = f"<think>Wait, {numbers.random()}"
    return response(key, text, 2048, finish="length", thinking=True)


def one_tool(number: int) -> Maker:
    return lambda numbers, key: response(key, f'{{"name": "tool-{number}"}}', 14)


def mixed(numbers: random.Random, shares: dict[Maker, float]) -> Iterator[Response]:
    makers, weights = list(shares), list(shares.values())
    for key in itertools.count():
        yield numbers.choices(makers, weights)[0](numbers, key)


def run(gate: QualityGate, responses: Iterator[Response], most: int) -> Alarm | None:
    for one in itertools.islice(responses, most):
        if alarm := gate.add(one):
            return alarm
    return None


@pytest.mark.parametrize("seed", range(20))
def test_87_percent_of_one_word_is_stopped_within_200_samples(seed: int):
    gate = QualityGate(QualityConfig())
    alarm = run(gate, mixed(random.Random(seed), {ok: 0.87, prose: 0.13}), 200)
    assert alarm is not None
    assert alarm is gate.alarm
    assert alarm.finished <= 200
    words = str(alarm)
    assert "short" in words
    assert "the same for many prompts" in words
    assert words.count('"OK.", 6 tokens') == len(alarm.examples) == 3
    assert f"{alarm.degenerate} of {alarm.looked_at} responses in a row" in words
    assert f"are degenerate, {alarm.most} may be: " in words


@pytest.mark.parametrize("seed", range(5))
def test_tool_calls_and_one_word_answers_are_not_stopped(seed: int):
    gate = QualityGate(QualityConfig())
    shares = {one_word: 0.3, tool_call: 0.4, prose: 0.3}
    assert run(gate, mixed(random.Random(seed), shares), 20_000) is None


class Finish(NamedTuple):
    alarm: Alarm | None
    begun: int
    finished: int


def run_in_time(
    gate: QualityGate, responses: Iterator[Response], concurrency: int, most: int
) -> Finish:
    """As an engine finishes them, which begins one when another has ended and the gate allows."""
    running: list[tuple[int, int, Response]] = []
    now = begun = 0
    for finished in range(1, most + 1):
        while len(running) < min(concurrency, gate.most_running or concurrency):
            one = next(responses)
            heapq.heappush(running, (now + one.tokens, begun, one))
            begun += 1
        now, number, done = heapq.heappop(running)
        if alarm := gate.add(done, number):
            return Finish(alarm, begun, finished)
    return Finish(None, begun, most)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("concurrency", [1, 16, 64, 256, 1024])
def test_the_shortest_finish_first_and_that_is_no_reason_to_stop(concurrency: int, seed: int):
    """With 256 requests side by side the first hundred to finish are one-word answers, all."""
    gate = QualityGate(QualityConfig())
    shares = {one_word: 0.3, tool_call: 0.3, prose: 0.4}
    finish = run_in_time(gate, mixed(random.Random(seed), shares), concurrency, 5000)
    assert finish.alarm is None
    assert gate.most_running is None


@pytest.mark.parametrize("concurrency", [1, 64, 256, 1024])
def test_calls_of_many_tools_are_not_the_same_answer(concurrency: int):
    """Two thirds are calls of twenty tools, each of them 3% of all."""
    tools = {one_tool(n): 2 / 60 for n in range(20)}
    gate = QualityGate(QualityConfig(max_identical=20))
    responses = mixed(random.Random(concurrency), {**tools, prose: 1 / 3})
    assert run_in_time(gate, responses, concurrency, 10_000).alarm is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("concurrency", [1, 16, 64, 256, 1024])
@pytest.mark.parametrize("other", [prose, tool_call])
def test_one_word_is_stopped_within_200_samples_however_many_run(
    concurrency: int, other: Maker, seed: int
):
    """With 256 at a time it went on until as many samples had finished as ran at once. What still
    runs when it closes is finished, too."""
    gate = QualityGate(QualityConfig())
    shares = {ok: 0.87, other: 0.13}
    finish = run_in_time(gate, mixed(random.Random(seed), shares), concurrency, 200)
    assert finish.alarm is not None
    assert finish.begun <= 200


@pytest.mark.parametrize("concurrency", [1, 64, 256, 512])
@pytest.mark.parametrize("good", [{prose: 1.0}, {prose: 0.4, tool_call: 0.3, one_word: 0.3}])
def test_a_target_that_begins_to_answer_one_word_is_stopped_as_soon(
    concurrency: int, good: dict[Maker, float]
):
    """After a thousand good ones 444 more had to finish, with 256 at a time."""
    numbers = random.Random(concurrency)
    gate = QualityGate(QualityConfig())
    late = itertools.chain(itertools.islice(mixed(numbers, good), 1000), mixed(numbers, {ok: 1.0}))
    finish = run_in_time(gate, late, concurrency, 3000)
    assert finish.alarm is not None
    assert finish.begun - 1000 <= 200 + concurrency
    assert finish.alarm.finished == finish.finished


def test_who_is_overtaken_by_thousands_is_not_looked_at_and_does_no_harm():
    gate = QualityGate(QualityConfig(window=4))
    for number in range(1, 2000):
        gate.add(response(number, f"an answer of its own {number}", 50), number)
    assert gate.add(ok(random.Random(0), 0), 0) is None
    assert gate.figures.looked_at >= 2


def test_who_never_wants_to_be_stopped_is_not_held_up():
    assert QualityGate(QualityConfig(max_share=1)).most_running is None
    assert QualityGate(QualityConfig(window=2)).most_running == 1


def test_thinking_that_never_ends_is_stopped():
    gate = QualityGate(QualityConfig())
    alarm = run(gate, mixed(random.Random(0), {endless: 0.7, prose: 0.3}), 200)
    assert alarm is not None
    assert list(alarm.reasons) == ["thinking without an end"]
    assert "Wait, " in alarm.examples[0]


def test_the_same_long_response_to_everything_is_stopped():
    gate = QualityGate(QualityConfig())

    def refusal(numbers: random.Random, key: int) -> Response:
        return response(key, "I am sorry, but as a language model " * 3, 40)

    alarm = run(gate, mixed(random.Random(0), {refusal: 0.6, prose: 0.4}), 200)
    assert alarm is not None
    assert list(alarm.reasons) == ["the same for many prompts"]


def test_an_end_token_alone_is_named():
    gate = QualityGate(QualityConfig(window=4))
    alarm = run(gate, (response(key, "", 1) for key in itertools.count()), 4)
    assert alarm is not None
    assert (alarm.finished, list(alarm.reasons)) == (2, ["stopped at once", "short"])


def test_what_was_cut_at_a_small_limit_is_not_short():
    """max_new_tokens = 8 is a choice, and every response then has 8."""
    gate = QualityGate(QualityConfig())
    made = (response(key, f"{key}", 8, finish="length") for key in itertools.count())
    assert run(gate, made, 1000) is None


@pytest.mark.parametrize("begin", [0, 20, 50, 70, 90])
def test_a_bad_time_is_found_wherever_it_begins(begin: int):
    """As long as a window and a half. Half a window may be bad, and is forgotten."""
    gate = QualityGate(QualityConfig(window=100))
    numbers = random.Random(0)
    good, bad = mixed(numbers, {prose: 1.0}), mixed(numbers, {ok: 1.0})
    for _ in range(5):
        assert run(gate, good, 100) is None
        assert run(gate, bad, 50) is None
        assert run(gate, good, 50) is None
    assert run(gate, good, begin) is None
    alarm = run(gate, bad, 150)
    assert alarm is not None
    assert (alarm.degenerate, alarm.looked_at, alarm.most) == (51, 100, 50)


def test_closed_once_it_says_so_once():
    gate = QualityGate(QualityConfig(window=4))
    bad = mixed(random.Random(0), {ok: 1.0})
    first = run(gate, bad, 10)
    assert first is not None
    assert run(gate, bad, 10) is None
    assert gate.alarm is first


def test_a_share_of_one_never_stops():
    gate = QualityGate(QualityConfig(max_share=1))
    assert run(gate, mixed(random.Random(0), {ok: 1.0}), 2000) is None


def test_the_count_is_what_a_full_count_says():
    """Counted up as they come, out of order, it must not drift."""
    gate = QualityGate(QualityConfig(window=30, max_identical=3, max_share=1))
    numbers = random.Random(7)
    shares = {ok: 0.1, one_word: 0.3, tool_call: 0.2, prose: 0.2, endless: 0.2}
    made = list(itertools.islice(mixed(numbers, shares), 500))
    order = sorted(range(500), key=lambda n: n + numbers.randrange(40))
    for number in order:
        gate.add(made[number], number)
    for end in range(30, 500, 15):
        window = made[end - 30 : end]
        same = [sum(other.identity == this.identity for other in window) for this in window]
        slow = sum(
            count > 3 or this.thinking_open or (this.finish_reason == "stop" and this.tokens <= 8)
            for this, count in zip(window, same, strict=True)
        )
        stretch = gate._stretches[end // 15 - 1]
        assert (stretch.finished, stretch.degenerate) == (30, slow)
    assert gate.figures.looked_at >= 15


def test_what_there_is_is_judged_at_the_end():
    numbers = random.Random(0)
    short = QualityGate(QualityConfig())
    assert run(short, mixed(numbers, {ok: 1.0}), 40) is None
    alarm = short.end()
    assert alarm is not None
    assert (alarm.degenerate, alarm.looked_at, alarm.unseen) == (40, 40, 0)
    tail = QualityGate(QualityConfig())
    assert run(tail, mixed(numbers, {prose: 1.0}), 250) is None
    assert run(tail, mixed(numbers, {ok: 1.0}), 90) is None
    assert tail.end() is not None
    assert tail.end() is None


@pytest.mark.parametrize(
    ("ids", "open_"),
    [
        ([5, 1, 6], True),
        ([5, 1, 6, 2, 7], False),
        ([1, 2, 1], True),
        ([5, 6], False),
        ([], False),
    ],
)
def test_thinking_is_open_after_a_beginning_without_an_end(ids: list[int], open_: bool):
    assert thinking_is_open(ids, 1, 2) is open_
    assert not thinking_is_open(ids, None, None)


def test_what_is_shown_stays_one_line():
    assert shown("a\nb\x1b[31m") == '"a\\nb\\u001b[31m"'
    assert len(shown("x" * 1000)) == 62


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_share": 0},
        {"max_share": 1.1},
        {"window": 1},
        {"min_response_tokens": -1},
        {"max_identical": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QualityConfig(**wrong)  # type: ignore[arg-type]
