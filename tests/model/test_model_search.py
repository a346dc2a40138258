"""Exhaustive search over the real cores of both sides, in a scope of two or three samples.

What is exhaustive, and what bounds it: model_search.py. In short, one or two faults (crash of
producer or rank, power loss, lost spool, full disk, cut or stalled link, failed save, drain,
takeover, rollback) at every point at which they could matter. Where `choose` is off, engine and
trainer go on in one order; where it is on, in every order.
"""

import logging
import os
from collections.abc import Callable, Iterator

import pytest

from model_search import Search
from model_world import Scope

DEEP = os.environ.get("DRAFTFEED_MODEL") == "deep"
"""Run by `make model`: hours."""

SCOPES = {
    "two producers, two ranks, three samples, one fault": (Scope(), 1, False),
    "a checkpoint after every step": (Scope(early_saves=True), 1, False),
    "room for one sample": (Scope(1, 2, 2, room_samples=1), 1, False),
    "one of each, every order, one fault": (Scope(1, 1, 2), 1, True),
    "one of each, two faults": (Scope(1, 1, 1), 2, False),
}
DEEP_SCOPES = {
    "one of each, every order, two faults": (Scope(1, 1, 2), 2, True),
    "two ranks, two faults": (Scope(1, 2, 2), 2, False),
    "two producers, every order, one fault": (Scope(2, 1, 2), 1, True),
    "two producers, two ranks, every order, one fault": (Scope(2, 2, 2), 1, True),
    "two producers, two ranks, two faults": (Scope(2, 2, 2, early_saves=True), 2, False),
    "two producers, two ranks, three samples, two faults": (Scope(), 2, False),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The cores tell of every fault."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(case: tuple[Scope, int, bool], record: Callable[[str, object], None]) -> None:
    scope, faults, choose = case
    found = Search(scope, faults, choose=choose).run()
    record("explored", found)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SCOPES.values(), ids=SCOPES.keys())
def test_nothing_is_lost_or_trained_twice_and_every_run_ends(
    case: tuple[Scope, int, bool], record_property: Callable[[str, object], None]
) -> None:
    run(case, record_property)


@pytest.mark.skipif(not DEEP, reason="takes hours: make model")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("case", DEEP_SCOPES.values(), ids=DEEP_SCOPES.keys())
def test_deeper(
    case: tuple[Scope, int, bool], record_property: Callable[[str, object], None]
) -> None:
    run(case, record_property)
