"""The demo's watch over its services."""

import pytest

from draftfeed_deploy.services import Standstill
from snapshots import consumed, produced


def test_counters_that_stay_are_a_standstill_though_snapshots_keep_coming() -> None:
    watch = Standstill(limit_seconds=120, now=0)
    watch.note(produced(1, captured=5), now=1)
    for second in range(2, 122):
        watch.note(produced(second, captured=5), now=second)
        watch.note(consumed(second, samples=1), now=second)
    assert watch.reached(123)
    assert not watch.reached(122)


@pytest.mark.parametrize(
    "snapshot",
    [produced(100, captured=6), produced(100, captured=5, committed=1), consumed(100, step=2)],
)
def test_one_counter_of_either_side_is_enough(snapshot: object) -> None:
    watch = Standstill(limit_seconds=120, now=0)
    watch.note(produced(1, captured=5), now=1)
    watch.note(consumed(1, step=1), now=1)
    watch.note(snapshot, now=100)  # type: ignore[arg-type]
    assert not watch.reached(200)
    assert watch.reached(221)


def test_loading_a_model_may_take_its_time_but_ends() -> None:
    watch = Standstill(limit_seconds=120, now=0)
    for second in range(0, 900, 10):
        watch.note(produced(second, phase="loading"), now=second)
        watch.note(consumed(second), now=second)
        assert not watch.reached(second + 10)
    watch.note(produced(900), now=900)
    assert watch.reached(1021)


def test_services_that_say_nothing_at_all_are_a_standstill() -> None:
    assert Standstill(limit_seconds=120, now=0).reached(121)
