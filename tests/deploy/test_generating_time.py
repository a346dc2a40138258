"""What a producer's rate so far rests on: its time, and the lengths of its responses."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from draftfeed_deploy.lengths import LENGTH_BOUNDS, no_lengths
from draftfeed_deploy.plan_live import reading
from draftfeed_deploy.producer import Stopwatch
from draftfeed_deploy.scrapes import scrape
from shown import shown
from snapshots import produced


def test_loading_and_delivering_are_not_counted() -> None:
    """A target of 55 GB loads for minutes: they would halve the rate of the first hour."""
    stopwatch = Stopwatch()
    phases = [(0, "loading"), (60, "loading"), (100, "generating"), (110, "generating")]
    assert [stopwatch.at(*one) for one in phases] == [0, 0, 0, 10]
    # It died at 110 at the latest and loads again; then all is generated.
    later = [(112, "loading"), (150, "generating"), (155, "delivering"), (900, "delivering")]
    assert [stopwatch.at(*one) for one in later] == [12, 12, 17, 17]


def test_two_who_look_at_once_count_no_second_twice() -> None:
    stopwatch = Stopwatch()
    stopwatch.at(0.0, "generating")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: stopwatch.at(at / 100, "generating"), range(1000)))
    assert stopwatch.at(10.0, "generating") == pytest.approx(10)


@pytest.mark.parametrize("counts", [{}, {3: 5, 10: 2}, {len(LENGTH_BOUNDS): 4}])
def test_lengths_come_back_from_the_metrics(counts: dict[int, int]) -> None:
    """Prometheus' buckets are cumulative, and the last one has no bound."""
    lengths = no_lengths()
    for place, count in counts.items():
        lengths[place] = count
    samples = sum(counts.values())
    state = produced(1.0, samples=samples, response_tokens=8 * samples, response_lengths=lengths)
    with shown(lambda: state) as url:
        found = scrape(url)
    name = "draftfeed_producer_response_tokens"
    assert found.value(f"{name}_count") == samples
    assert found.value(f"{name}_sum") == 8 * samples
    assert found.value(f"{name}_bucket", le="8") == sum(n for at, n in counts.items() if at <= 3)
    assert found.value(f"{name}_bucket", le="+Inf") == samples
    assert (reading(found).deviation_tokens > 0) == bool(samples)
