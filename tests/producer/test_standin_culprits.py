"""Prompts that the SGLang engine cannot make: they are given up, and hold nobody up."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.errors import CaptureError, EngineError
from draftfeed_producer.prompts import Prompt
from draftfeed_proto.sample import Sample
from standin_engine import NEW_TOKENS, Standin, check_all, make_prompts
from standin_model import ABORT_ALWAYS, KILLER, SKIP_ALWAYS

DIED = "the engine died 3 times with it, the last time with nothing else in it; the engine ended"
LENGTHS = [5, 30, 1, 70, 9, 2, 40, 8]


def run(engine: SGLangEngine, prompts: list[Prompt]) -> tuple[list[Sample], dict[int, str]]:
    """Samples, and by ordinal why others were given up: each once."""
    given_up: list[tuple[int, str]] = []
    samples = list(engine.run(iter(prompts), lambda id, why: given_up.append((id.ordinal, why))))
    assert len(given_up) == len(dict(given_up)), given_up
    assert engine._requests == {}
    return samples, dict(given_up)


def without(prompts: list[Prompt], *ordinals: int) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.id.ordinal not in ordinals]


@pytest.mark.parametrize(
    ("kill_at", "concurrency", "culprits"),
    [
        (11, 4, (3,)),
        (1, 4, (0,)),
        (6, 1, (2,)),
        (2, 3, (1, 2)),
        (3, 4, (4, 5, 6)),
        (NEW_TOKENS, 2, (7,)),
    ],
    ids=["others-finish-first", "first", "alone", "two-at-once", "three-at-once", "last"],
)
def test_a_prompt_that_kills_the_engine_is_found(
    standin: Standin, kill_at: int, concurrency: int, culprits: tuple[int, ...]
):
    """It is made again for ever, as long as others are finished in between."""
    engine = standin.engine(kill_at=kill_at, concurrency=concurrency, mixed=True, chunk=8)
    prompts = make_prompts(LENGTHS, dict.fromkeys(culprits, KILLER))
    samples, given_up = run(engine, prompts)
    check_all(samples, without(prompts, *culprits))
    assert sorted(given_up) == sorted(culprits), "whoever was merely there is not to blame"
    assert all(reason.startswith(DIED) for reason in given_up.values())
    assert all("the scheduler is gone" in reason for reason in given_up.values())
    engine.close()


def test_without_anybody_to_tell_the_prompt_that_kills_the_engine_is_named(standin: Standin):
    engine = standin.engine(kill_at=11, mixed=True, chunk=8)
    prompts = make_prompts(LENGTHS, {3: KILLER})
    with pytest.raises(EngineError, match=f"^sample {prompts[3].id}: {DIED}"):
        list(engine.run(iter(prompts)))
    others = without(prompts, 3)
    check_all(list(engine.run(iter(others))), others)
    engine.close()


def test_two_deaths_that_no_prompt_is_to_blame_for_cost_none(standin: Standin):
    """Each prompt was there twice: memory ran out, somebody restarted the driver."""
    engine = standin.engine(lives=standin.lives(), die_at_pass=5, deaths=2)
    prompts = make_prompts(LENGTHS)
    samples, given_up = run(engine, prompts)
    check_all(samples, prompts)
    assert given_up == {}
    engine.close()


@pytest.mark.parametrize("trick", [KILLER, ABORT_ALWAYS])
def test_an_engine_that_fails_with_every_prompt_uses_none_of_them_up(standin: Standin, trick: int):
    """A GPU breaks, and overnight the whole list of prompts is quarantined."""
    engine = standin.engine()
    prompts = make_prompts([5] * 12, dict.fromkeys(range(12), trick))
    given_up: list[object] = []
    with pytest.raises(EngineError, match="8 prompts in a row, so it is not the prompts"):
        list(engine.run(iter(prompts), lambda *told: given_up.append(told)))
    assert given_up == []
    engine.close()


def test_what_sglang_aborts_twice_is_given_up_with_its_reason(standin: Standin):
    engine = standin.engine(refuses_tokens=40)
    prompts = make_prompts(LENGTHS)
    samples, given_up = run(engine, prompts)
    check_all(samples, without(prompts, 3, 6))
    words = "SGLang aborted it: {} tokens are too many"
    assert given_up == {3: words.format(70), 6: words.format(40)}
    assert engine.recaptured == 2
    engine.close()


def test_a_prompt_that_is_all_there_is_is_given_up_too(standin: Standin):
    engine = standin.engine()
    assert run(engine, make_prompts([5], {0: ABORT_ALWAYS}))[0] == []
    engine.close()


def test_rows_that_are_missing_twice_end_the_run_all_the_same(standin: Standin):
    """Then the capture is broken, and every sample may be."""
    engine = standin.engine()
    prompts = make_prompts([5, 30, 12], {1: SKIP_ALWAYS})
    with pytest.raises(CaptureError, match="1 of"):
        run(engine, prompts)
    engine.close()


def test_an_input_that_the_engine_does_not_take_is_not_submitted(standin: Standin):
    """A response that is there is fed, but for its last token."""
    engine = standin.engine(most_input_tokens=39, refuses_tokens=40)
    prompts = make_prompts([5, 40, 39, 70, 30, 30])
    for i, n in ((4, 10), (5, 11)):
        answer = prompts[1].input_ids[:n]
        prompts[i] = msgspec.structs.replace(prompts[i], response_ids=answer)
    samples, given_up = run(engine, prompts)
    check_all(samples, without(prompts, 1, 3, 5))
    words = (
        "{} tokens are to be fed, the engine takes 39: "
        "raise memory_fraction, or lower max_prompt_tokens"
    )
    assert given_up == {1: words.format(40), 3: words.format(70), 5: words.format(40)}
    assert engine.recaptured == 0
    with pytest.raises(EngineError, match=f"^sample {prompts[3].id}: 70 tokens are to be fed"):
        list(engine.run(iter(prompts[3:])))
    engine.close()


def test_a_response_that_the_engine_cannot_hold_is_refused_at_the_start(standin: Standin):
    """It cuts them short, and calls them finished."""
    engine = standin.engine(most_input_tokens=NEW_TOKENS - 1)
    words = r"^max_new_tokens is 12, the engine holds 11 tokens: raise memory_fraction or lower it$"
    with pytest.raises(EngineError, match=words):
        run(engine, make_prompts([3]))
    engine.close()


def test_a_run_that_was_left_while_a_suspect_was_tried_leaves_nothing_behind(standin: Standin):
    """The next one would make it a second time."""
    lives = standin.lives()
    engine = standin.engine(lives=lives, kill_at=1, concurrency=3, chunk=8)
    prompts = make_prompts([1500, 5, 6], {1: KILLER})
    given_up: list[object] = []
    left: Any = engine.run(iter(prompts), lambda *told: given_up.append(told))
    next(left)
    left.close()
    assert Path(lives).stat().st_size == 3, "it has died twice, and the first was tried alone"
    assert given_up == []
    check_all(list(engine.run(iter(prompts[2:]))), prompts[2:])
    assert Path(lives).stat().st_size == 3
    engine.close()
