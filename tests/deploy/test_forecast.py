"""The forecast against runs whose end is known, because they are simulated to it."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from draftfeed_deploy.forecast import Forecast, Outlook, Reading, TooEarly, forecast, together
from draftfeed_deploy.lengths import class_of, deviation, no_lengths

Rate = Callable[[float], float]


@dataclass
class Producer:
    """Makes samples of lognormal length, so many at a time; rate: rows a second, by time."""

    prompts: int
    rate: Rate
    seed: int
    at_a_time: int = 32
    readings: list[Reading] = field(default_factory=list)
    """One a second, till all is made."""
    finish: float = 0.0

    def run(self) -> "Producer":
        random_numbers = random.Random(self.seed)
        waiting = [
            100 + max(1, round(random_numbers.lognormvariate(6, 0.8))) for _ in range(self.prompts)
        ]
        lengths, running = no_lengths(), []
        second = samples = rows = responses = 0
        captured = 0.0
        while waiting or running:
            while waiting and len(running) < self.at_a_time:
                length = waiting.pop()
                running.append([float(length), length])
            share = self.rate(second) / len(running)
            for one in running:
                captured += min(one[0], share)
                one[0] -= share
            for _, length in [one for one in running if one[0] <= 0]:
                samples, rows, responses = samples + 1, rows + length, responses + length - 100
                lengths[class_of(length - 100)] += 1
            running = [one for one in running if one[0] > 0]
            second += 1
            self.readings.append(
                Reading(
                    seconds=float(second),
                    prompts=self.prompts,
                    done=samples,
                    samples=samples,
                    rows=rows,
                    captured=int(captured),
                    generating_seconds=float(second),
                    deviation_tokens=deviation(lengths, responses / samples) if samples else 0.0,
                )
            )
        self.finish = float(second)
        return self

    def outlook(self, at: float, window: int = 60) -> Outlook:
        return forecast([one for one in self.readings if at - window <= one.seconds <= at])


def known(outlook: Outlook) -> Forecast:
    assert isinstance(outlook, Forecast), outlook
    return outlook


def contains(outlook: Outlook, at: float, finish: float) -> bool:
    found = known(outlook)
    return at + found.earliest <= finish <= at + found.latest


SEEDS = range(12)


@pytest.mark.parametrize("part", [0.1, 0.3, 0.6, 0.9])
def test_constant_rate_ends_within_the_range_and_near_the_middle(
    part: float, record_property: Callable[[str, object], None]
) -> None:
    """The range must hold the end in all but the odd run, and must not be so wide that it says
    nothing."""
    hits, errors, widths = 0, [], []
    for seed in range(40):
        run = Producer(1500, lambda _: 2000.0, seed).run()
        at = part * run.finish
        found, left = known(run.outlook(at)), run.finish - at
        hits += contains(found, at, run.finish)
        errors.append(abs(found.seconds - left) / left)
        widths.append((found.latest - found.earliest) / left)
    record_property(f"real end within the range at {part:.0%} of the run", f"{hits} of 40")
    assert hits >= 38
    assert sorted(errors)[len(errors) // 2] < (0.1 if part < 0.9 else 0.25)
    assert max(widths) < (0.5 if part < 0.9 else 1.0)


def test_rate_that_has_changed_ends_between_what_both_rates_say() -> None:
    """Longer contexts, a throttled GPU: half as fast from a third on, for good."""
    hits = 0
    for seed in SEEDS:
        run = Producer(1500, lambda second: 2000.0 if second < 150 else 1000.0, seed).run()
        at = 0.6 * run.finish
        found = known(run.outlook(at))
        hits += contains(found, at, run.finish)
        assert found.rows_per_second > 1.2 * found.recent_rows_per_second
    assert hits >= len(SEEDS) - 1


def test_rate_that_drifts_is_followed() -> None:
    """Slower all the time: each forecast is nearer to the truth than the one before."""
    run = Producer(1500, lambda second: 2000.0 / (1 + second / 300), seed=1).run()
    errors = []
    for part in (0.2, 0.4, 0.6, 0.8):
        at = part * run.finish
        errors.append(abs(at + known(run.outlook(at)).seconds - run.finish))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * run.finish


def paused(second: float) -> float:
    return 0.0 if 200 <= second < 400 else 2000.0


def test_pause_has_no_latest_end_while_it_lasts() -> None:
    run = Producer(1500, paused, seed=2).run()
    found = known(run.outlook(300))
    assert found.recent_rows_per_second == 0
    assert found.latest == math.inf
    assert math.isfinite(found.seconds)
    assert math.isfinite(found.earliest)


def test_pause_that_is_over_makes_the_range_wide_and_true() -> None:
    hits = 0
    for seed in SEEDS:
        run = Producer(1500, paused, seed).run()
        hits += contains(run.outlook(470), 470, run.finish)
    assert hits >= len(SEEDS) - 1


def test_several_producers_end_with_the_last() -> None:
    """One is slow, and nobody can take its prompts: a mean rate would promise too much."""
    hits = 0
    for seed in SEEDS:
        fast = Producer(700, lambda _: 2000.0, seed).run()
        slow = Producer(700, lambda _: 800.0, seed + 100).run()
        at = 0.8 * fast.finish
        both = together([fast.outlook(at), slow.outlook(at)])
        hits += contains(both, at, max(fast.finish, slow.finish))
        assert known(both).seconds == known(slow.outlook(at)).seconds
        assert known(both).left == known(fast.outlook(at)).left + known(slow.outlook(at)).left
    assert hits >= len(SEEDS) - 1


def test_producer_that_is_done_does_not_hide_the_others() -> None:
    done = Producer(100, lambda _: 2000.0, seed=3).run()
    busy = Producer(900, lambda _: 2000.0, seed=4).run()
    both = known(together([done.outlook(done.finish), busy.outlook(100)]))
    assert both.seconds == known(busy.outlook(100)).seconds
    assert both.window_seconds > 0


def test_nothing_left_is_no_time() -> None:
    run = Producer(60, lambda _: 2000.0, seed=5).run()
    found = known(run.outlook(run.finish))
    assert (found.left, found.seconds, found.latest) == (0, 0, 0)


def test_beginning_says_why_there_is_no_forecast() -> None:
    run = Producer(1500, lambda _: 2000.0, seed=6).run()
    early = run.outlook(2)
    assert isinstance(early, TooEarly)
    assert "samples are finished" in early.why
    assert isinstance(together([run.outlook(200), early]), TooEarly)


def test_replay_promises_no_forecast_from_some_sample_on() -> None:
    """`draftfeed top` said of a replay that had served 1,292 of 1,344 samples that none was
    finished, and that there is a forecast from 30 on."""
    served = Reading(25.0, 1344, 1292, 0, 0, 0, 0.5, 0.0, replayed=1292)
    early = forecast([served._replace(seconds=1.0, done=40, replayed=40), served])
    assert isinstance(early, TooEarly)
    assert early.why.startswith("1292 samples were made before")
    assert "finished" not in early.why


def test_first_to_finish_are_not_taken_for_all() -> None:
    """With many at a time the short ones are finished first, and promise an early end."""
    run = Producer(1500, lambda _: 2000.0, seed=7, at_a_time=512).run()
    early = next(one for one in run.readings if one.samples >= 30)
    found = run.outlook(max(early.seconds, 12.0))
    assert isinstance(found, TooEarly)
    assert "the short ones" in found.why


def test_process_that_started_again_is_measured_from_there() -> None:
    """Counters that begin anew must not make a negative rate."""
    run = Producer(1500, lambda _: 2000.0, seed=8).run()
    before = [one._replace(seconds=one.seconds - 500, captured=10**9) for one in run.readings[:50]]
    after = run.readings[:100]
    assert forecast([*before, *after]) == forecast(after)
    assert known(forecast([*before, *after])).recent_rows_per_second > 0


def test_nothing_known_is_too_early() -> None:
    assert isinstance(forecast([]), TooEarly)
    assert isinstance(together([]), TooEarly)
    loading = Reading(1.0, 0, 0, 0, 0, 0, 0.0, 0.0)
    assert isinstance(forecast([loading]), TooEarly)


def test_spread_of_lengths_is_near_the_real_one() -> None:
    numbers = random.Random(9)
    lengths = [max(1, round(numbers.lognormvariate(6, 0.8))) for _ in range(5000)]
    counts = no_lengths()
    for length in lengths:
        counts[class_of(length)] += 1
    mean = sum(lengths) / len(lengths)
    real = math.sqrt(sum((one - mean) ** 2 for one in lengths) / len(lengths))
    assert deviation(counts, mean) == pytest.approx(real, rel=0.15)


@pytest.mark.parametrize(
    ("tokens", "place"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (1 << 30, 18)]
)
def test_class_of_a_length(tokens: int, place: int) -> None:
    assert class_of(tokens) == place
    assert len(no_lengths()) == 19
