"""The SGLang engine over a stand-in that can be told to misbehave: what comes out is exact."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from draftfeed_producer.engines import CaptureConfig
from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.errors import CaptureError, EngineError
from draftfeed_producer.prompts import Prompt
from standin_engine import Standin, check, check_all, fed_rows, make_prompts
from standin_model import (
    ABORT_ALWAYS,
    ABORT_LATE,
    ABORT_ONCE,
    FINISHED_FIRST,
    FOREIGN_ONCE,
    GARBAGE,
    NO_ANSWER,
    NOT_FINISHED,
    ROW_BYTES,
    SKIP_ALWAYS,
    SKIP_ONCE,
    TOO_LONG,
    TWICE,
    WRONG_POSITIONS,
    WRONG_SLAB,
)
from waiting import eventually

BY_SLOT = CaptureConfig(prefix_cache=True)
LENGTHS = [5, 30, 1, 70, 9, 2, 40, 8]
TRIAL_ROWS = 5
"""Of the request that tries the hook."""


@pytest.fixture(scope="module", params=["positions", "slots"])
def shared(request: pytest.FixtureRequest, standin: Standin) -> Iterator[SGLangEngine]:
    """One that nothing can end, for tests that can tell it by the prompts what to do."""
    by_slot = request.param == "slots"
    engine = standin.engine(capture=BY_SLOT if by_slot else None)
    yield engine
    engine.close()


def test_every_sample_is_exact_and_comes_once(shared: SGLangEngine):
    prompts = make_prompts(LENGTHS)
    check_all(list(shared.run(iter(prompts))), prompts)


@pytest.mark.parametrize(
    "knobs",
    [
        {"retract_every": 3, "mixed": True, "chunk": 7},
        {"overlap": False, "chunk": 5},
        {"retract_every": 2, "chunk": 16, "kv_tokens": 256, "capture": BY_SLOT},
        {"kv_tokens": 192, "mixed": True, "overlap": False, "capture": BY_SLOT},
    ],
    ids=["retracted-mixed", "no-overlap", "slots-retracted", "slots-evicted"],
)
def test_however_the_engine_batches(standin: Standin, knobs: dict):
    """Rows of a retracted request come again; slots are given to others in the meantime."""
    engine = standin.engine(**knobs)
    prompts = make_prompts(LENGTHS)
    check_all(list(engine.run(iter(prompts))), prompts)
    assert engine.recaptured == 0
    engine.close()


def test_a_prefix_that_the_cache_has_keeps_its_rows(standin: Standin):
    """Prefix-cache hits give no rows."""
    engine = standin.engine(concurrency=1, capture=BY_SLOT)
    long = make_prompts([60])[0]
    cuts = [60, 40, 60, 59]
    prompts = [
        msgspec.structs.replace(prompt, input_ids=long.input_ids[:n])
        for prompt, n in zip(make_prompts(cuts), cuts, strict=True)
    ]
    check_all(list(engine.run(iter(prompts))), prompts)
    assert engine.recaptured == 0
    assert engine.captured < 0.6 * fed_rows(prompts), "nothing was found in the cache"
    engine.close()


@pytest.mark.parametrize("trick", [SKIP_ONCE, FOREIGN_ONCE, ABORT_ONCE, ABORT_LATE])
def test_what_went_wrong_once_is_made_again_and_counted(shared: SGLangEngine, trick: int):
    """A row that is missing, or another token's, must never be trained."""
    # Lengths of its own for each, so that the engine has not seen it.
    prompts = make_prompts([5, 30 + trick % 10, 12, 9], {1: trick})
    before = shared.recaptured
    check_all(list(shared.run(iter(prompts))), prompts)
    assert shared.recaptured == before + 1


@pytest.mark.parametrize("trick", [TWICE, FINISHED_FIRST])
def test_words_that_come_twice_or_too_early_change_nothing(shared: SGLangEngine, trick: int):
    prompts = make_prompts([5, 30, 12, 9, 20], {1: trick, 3: trick})
    check_all(list(shared.run(iter(prompts))), prompts)


@pytest.mark.parametrize(
    ("trick", "error", "words"),
    [
        (SKIP_ALWAYS, CaptureError, "1 of"),
        (ABORT_ALWAYS, EngineError, "SGLang aborted it: so it was asked"),
    ],
)
def test_what_goes_wrong_twice_ends_the_run(
    shared: SGLangEngine, trick: int, error: type[Exception], words: str
):
    prompts = make_prompts([5, 30, 12, 9], {1: trick})
    with pytest.raises(error, match=words):
        list(shared.run(iter(prompts)))
    again = make_prompts([3, 4])
    check_all(list(shared.run(iter(again))), again)


def test_a_run_that_was_left_in_the_middle_leaves_nothing_behind(shared: SGLangEngine):
    """Answers to requests of the run before are not mistaken for those of this one."""
    prompts = make_prompts(LENGTHS)
    for taken in (0, 1, 3):
        run: Any = shared.run(iter(prompts))
        for sample in itertools.islice(run, taken):
            check(sample, next(p for p in prompts if p.id == sample.id))
        run.close()
    check_all(list(shared.run(iter(prompts))), prompts)
    assert shared._requests == {}
    assert open_requests(shared) == 0


def test_an_answer_that_is_longer_than_there_is_memory_for_has_no_rows(standin: Standin):
    engine = standin.engine()
    with pytest.raises(CaptureError, match="1 of 17 fed tokens left no row"):
        list(engine.run(iter(make_prompts([5], {0: TOO_LONG}))))
    engine.close()


def open_requests(engine: SGLangEngine) -> int:
    """Whose rows are held in memory."""
    rows = engine._engine.rows
    return len(getattr(rows, "_open", ())) + len(getattr(rows, "_finished", ()))


def test_requests_that_were_given_up_take_no_memory(standin: Standin):
    """In slot mode the rows of a request are copied when it ends, though nobody waits for it."""
    engine = standin.engine(capture=BY_SLOT)
    prompts = make_prompts([20, 20, 20, 20], {2: ABORT_LATE})
    for _ in range(5):
        run: Any = engine.run(iter(prompts))
        next(run)
        run.close()
    list(engine.run(iter(make_prompts([3]))))
    assert open_requests(engine) == 0
    engine.close()


def test_given_responses_take_one_pass(standin: Standin):
    engine = standin.engine(capture=CaptureConfig(mode="prefill"))
    answers = make_prompts([7, 1, 30, 4])
    prompts = [
        msgspec.structs.replace(prompt, response_ids=a.input_ids[::-1], finish_reason="stop")
        for prompt, a in zip(make_prompts([5, 9, 1, 100]), answers, strict=True)
    ]
    samples = list(engine.run(iter(prompts)))
    check_all(samples, prompts)
    assert {(s.finish_reason, str(s.sampling)) for s in samples} == {("stop", "{}")}
    rows = sum(p.tokens - 1 for p in prompts)
    requests = len(prompts) + 1  # the trial is one, and what is launched in advance is a row each
    assert rows <= engine.captured - TRIAL_ROWS <= rows + requests, "a pass too much at most"
    engine.close()


def test_a_pass_that_is_larger_than_all_slabs_comes_in_pieces(standin: Standin):
    """Rows wait on the device for slabs, and slabs for the producer: someone must let go."""
    engine = standin.engine(chunk=5000, concurrency=3, kv_tokens=30000)
    prompts = make_prompts([2500, 4000, 1800, 10])
    assert min(len(p.input_ids) for p in prompts[:3]) * ROW_BYTES > 1 << 20
    check_all(list(engine.run(iter(prompts))), prompts)
    engine.close()


def test_the_engine_goes_on_while_nobody_takes_samples(standin: Standin):
    """The scheduler must never wait for whoever stores samples, only for new requests."""
    engine = standin.engine(concurrency=6, chunk=500, kv_tokens=30000)
    prompts = make_prompts([900] * 8)
    pulled = Pulled(prompts)
    run: Any = engine.run(pulled)
    first = next(run)
    begun = prompts[: pulled.count]
    assert fed_rows(begun) * ROW_BYTES > 2 << 20, "the slabs alone could hold them"
    eventually(
        lambda: engine.captured >= TRIAL_ROWS + fed_rows(begun),
        "every row of what is in the engine has left it",
    )
    assert pulled.count == len(begun) <= 6
    check_all([first, *run], prompts)
    engine.close()


class Pulled:
    """Prompts, and how many of them were taken."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = iter(prompts)
        self.count = 0

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        prompt = next(self._prompts)
        self.count += 1
        return prompt


def test_prompts_are_submitted_while_their_rows_fit_into_memory(standin: Standin):
    """Two samples of 31 rows at the most; one of 111 alone is too large, and made alone."""
    capture = CaptureConfig(staging_bytes=70 * ROW_BYTES)
    engine = standin.engine(concurrency=8, capture=capture)
    prompts = make_prompts([20, 20, 20, 100, 20, 20])
    most = 0
    samples = []
    for sample in engine.run(iter(prompts)):
        samples.append(sample)
        rows = [request.most_rows for request in engine._requests.values()]
        assert sum(rows) <= 70 or len(rows) == 1
        most = max(most, len(rows))
    assert most >= 1
    check_all(samples, prompts)
    engine.close()


def test_a_flood_of_log_lines_does_not_stop_the_engine(standin: Standin):
    """Nobody reads the pipe, it is full, and whoever prints waits for ever."""
    engine = standin.engine(chatter=1000)
    prompts = make_prompts([5, 6, 7])
    check_all(list(engine.run(iter(prompts))), prompts)
    engine.close()


@pytest.mark.parametrize("trick", [GARBAGE, WRONG_SLAB, WRONG_POSITIONS])
def test_words_that_make_no_sense_end_the_run(standin: Standin, trick: int):
    """The thread that hears them dies, and everybody waits for ever."""
    engine = standin.engine()
    with pytest.raises(EngineError):
        list(engine.run(iter(make_prompts([5, 30, 12, 9], {1: trick}))))
    prompts = make_prompts([3, 4])
    check_all(list(engine.run(iter(prompts))), prompts)
    engine.close()


def test_an_answer_without_an_end_is_not_waited_for_for_ever(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
):
    """The plugin never says that the request has all its rows."""
    monkeypatch.setattr("draftfeed_producer.engines.sglang.engine._ROWS_SECONDS", 0.3)
    engine = standin.engine()
    prompts = make_prompts([5, 30], {1: NOT_FINISHED})
    check_all(list(engine.run(iter(prompts))), prompts)
    engine.close()


def test_stop_ends_a_run_that_waits_for_an_answer(standin: Standin):
    engine = standin.engine()
    samples = []
    run: Any = engine.run(iter(make_prompts([5, 30, 7], {1: NO_ANSWER})))
    thread = threading.Thread(target=lambda: samples.extend(run))
    thread.start()
    eventually(lambda: len(samples) == 2, "the others are there")
    engine.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert len(samples) == 2
    engine.close()


def test_no_prompts_start_no_engine(standin: Standin):
    engine = standin.engine(python="/nowhere/python")
    assert list(engine.run(iter([]))) == []
    engine.close()


def test_samples_of_an_answer_as_long_as_allowed_and_shorter(shared: SGLangEngine):
    """An answer that ends by itself, one token after its prompt or later."""
    prompts = make_prompts([3] * 60)
    samples = list(shared.run(iter(prompts)))
    check_all(samples, prompts)
    assert np.all([s.finish_reason == "length" for s in samples])
