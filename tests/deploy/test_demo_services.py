"""The demo's watch over its services, and when a second consumer comes."""

from pathlib import Path

import pytest

from draftfeed_deploy.errors import ServiceFailed
from draftfeed_deploy.services import Standstill, Swapping
from snapshots import consumed, produced


def test_counters_that_stay_are_a_standstill_though_snapshots_keep_coming() -> None:
    watch = Standstill(limit_seconds=120, now=0)
    watch.note("producer", produced(1, captured=5), now=1)
    for second in range(2, 122):
        watch.note("producer", produced(second, captured=5), now=second)
        watch.note("consumer", consumed(second, samples=1), now=second)
    assert watch.reached(123)
    assert not watch.reached(122)


@pytest.mark.parametrize(
    ("name", "snapshot"),
    [
        ("producer", produced(100, captured=6)),
        ("producer", produced(100, captured=5, committed=1)),
        ("consumer", consumed(100, step=2)),
    ],
)
def test_one_counter_of_either_side_is_enough(name: str, snapshot: object) -> None:
    watch = Standstill(limit_seconds=120, now=0)
    watch.note("producer", produced(1, captured=5), now=1)
    watch.note("consumer", consumed(1, step=1), now=1)
    watch.note(name, snapshot, now=100)  # type: ignore[arg-type]
    assert not watch.reached(200)
    assert watch.reached(221)


def test_loading_a_model_may_take_its_time_but_ends() -> None:
    watch = Standstill(limit_seconds=120, now=0)
    for second in range(0, 900, 10):
        watch.note("producer", produced(second, phase="loading"), now=second)
        watch.note("consumer", consumed(second), now=second)
        assert not watch.reached(second + 10)
    watch.note("producer", produced(900), now=900)
    assert watch.reached(1021)


def test_two_consumers_of_a_swap_that_both_stand_still_are_a_standstill() -> None:
    watch = Standstill(limit_seconds=120, now=0)
    for second in range(1, 130):
        watch.note("consumer", consumed(second, samples=9), now=second)
        watch.note("consumer-2", consumed(second), now=second)
        watch.note("producer", produced(second), now=second)
    assert watch.reached(130)


def test_second_consumer_comes_when_enough_is_trained_and_a_checkpoint_is_there() -> None:
    swap = Swapping(after=5)
    swap.note(consumed(1, trained=5))
    assert not swap.due
    swap.note(produced(1, committed=3))
    assert swap.due
    swap.begin()
    assert not swap.due


def test_demo_without_a_swap_never_starts_a_second_consumer() -> None:
    swap = Swapping(after=0)
    swap.note(consumed(1, trained=5))
    swap.note(produced(1, committed=3))
    assert not swap.due


def test_swap_that_came_too_late_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match="more --prompts"):
        Swapping(after=5).write(tmp_path / "swap.json", 0)


def test_services_that_say_nothing_at_all_are_a_standstill() -> None:
    assert Standstill(limit_seconds=120, now=0).reached(121)
