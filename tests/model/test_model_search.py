"""Exhaustive search over the real cores of both sides, in a scope of two or three samples.

What is exhaustive, and what bounds it: model_search.py. In short, one or two faults (crash of
producer or rank, power loss, lost spool, full disk, cut or stalled link, failed save, drain,
takeover, rollback) at every point at which they could matter.
"""

import logging
import os
from collections.abc import Callable, Iterator

import pytest

from model_search import Search
from model_world import Scope

DEEP = os.environ.get("DRAFTFEED_MODEL") == "deep"
"""Run by `make model`: hours."""

Case = tuple[Scope, int, str]
"""(scope, faults, how). "first": engine and trainer go on in one order; "choose": in every order;
"orders": what is on its way arrives in every order."""

CASES: dict[str, Case] = {
    "two producers, two ranks, three samples, one fault": (Scope(), 1, "first"),
    "a checkpoint after every step": (Scope(early_saves=True), 1, "first"),
    "room for one sample": (Scope(1, 2, 2, room_samples=1), 1, "first"),
    "one of each, every choice, one fault": (Scope(1, 1, 2), 1, "choose"),
    "one of each, every order, one fault": (Scope(1, 1, 1), 1, "orders"),
    "one of each, two faults": (Scope(1, 1, 1), 2, "first"),
}
DEEP_CASES: dict[str, Case] = {
    "two ranks, every order, one fault": (Scope(1, 2, 2), 1, "orders"),
    "two producers, every order, one fault": (Scope(2, 1, 2), 1, "orders"),
    "one of each, every order, two faults": (Scope(1, 1, 1), 2, "orders"),
    "two ranks, two faults": (Scope(1, 2, 2), 2, "first"),
    "two producers, every choice, one fault": (Scope(2, 1, 2), 1, "choose"),
    "two producers, two ranks, every choice, one fault": (Scope(2, 2, 2), 1, "choose"),
    "one of each, every choice, two faults": (Scope(1, 1, 2), 2, "choose"),
    "two producers, two ranks, two faults": (Scope(2, 2, 2, early_saves=True), 2, "first"),
    "two producers, two ranks, three samples, two faults": (Scope(), 2, "first"),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The cores tell of every fault."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(case: Case, record: Callable[[str, object], None]) -> None:
    scope, faults, how = case
    found = Search(scope, faults, choose=how == "choose", orders=how == "orders").run()
    record("explored", str(found))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_nothing_is_lost_or_trained_twice_and_every_run_ends(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    run(case, record_property)


@pytest.mark.skipif(not DEEP, reason="takes hours: make model")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("case", DEEP_CASES.values(), ids=DEEP_CASES.keys())
def test_deeper(case: Case, record_property: Callable[[str, object], None]) -> None:
    run(case, record_property)
