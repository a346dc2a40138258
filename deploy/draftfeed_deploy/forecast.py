"""When a run will have generated its prompts: pure functions of what its producers say.

The rate is measured twice, in rows per second: over the producer's time so far and over the
readings at hand. Either may be wrong from now on, so the finish lies between the two, and most
likely in the middle. The prompts that are left may be longer or shorter than those seen, by 2.5
standard errors of their sum; those in the making count as whole for the latest finish, and by their
rows for the earliest. A run of several producers ends with the last of them, because none can take
another's prompts while it runs.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

LEAST_SAMPLES = 30
LEAST_SECONDS = 10.0
"""Of generating, and of the rows that are compared with it."""
LEAST_WINDOW_SECONDS = 0.5
STANDARD_ERRORS = 2.5


class Reading(NamedTuple):
    """A producer at one moment. What counts up begins with its process."""

    seconds: float
    """Of the reader's monotonic clock."""
    prompts: int
    done: int
    """Prompts that have a sample or have ended without one, earlier processes' too."""
    samples: int
    rows: int
    """Of those samples."""
    captured: int
    """Rows, of unfinished samples too."""
    generating_seconds: float
    deviation_tokens: float
    """Standard deviation of the lengths of responses."""
    replayed: int = 0
    """Samples that came from the archive, or once more out of the spool."""


class TooEarly(NamedTuple):
    why: str


class Forecast(NamedTuple):
    """Of generation: seconds from the last reading. `latest` is infinite when nothing moves."""

    left: int
    """Prompts."""
    seconds: float
    earliest: float
    latest: float
    rows_per_second: float
    """Over the time so far."""
    recent_rows_per_second: float
    """Over the readings."""
    window_seconds: float
    """That they cover."""


Outlook: TypeAlias = Forecast | TooEarly


def forecast(readings: Sequence[Reading]) -> Outlook:
    """readings: of one producer, the newest last."""
    readings = _of_this_process(readings)
    if not readings:
        return TooEarly("nothing is known of it yet")
    now = readings[-1]
    if now.prompts == 0:
        return TooEarly("it does not know its prompts yet")
    left = max(0, now.prompts - now.done)
    if left == 0:
        return Forecast(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    if (why := _too_early(readings)) is not None:
        return TooEarly(why)
    window = now.seconds - readings[0].seconds
    so_far = now.captured / now.generating_seconds
    recent = (now.captured - readings[0].captured) / window
    mean = mean_rows(now)
    most = left * mean
    least = max(0.0, most - (now.captured - now.rows))
    slowest, fastest = min(so_far, recent), max(so_far, recent)
    spread = _spread(now, mean, left)
    earliest = least / fastest * max(0.0, 1 - spread)
    latest = most / slowest * (1 + spread) if slowest > 0 else math.inf
    middle = (least + most) / 2
    times = [middle / rate for rate in (so_far, recent) if rate > 0]
    return Forecast(
        left=left,
        seconds=sum(times) / len(times),
        earliest=earliest,
        latest=latest,
        rows_per_second=so_far,
        recent_rows_per_second=recent,
        window_seconds=window,
    )


def together(outlooks: Iterable[Outlook]) -> Outlook:
    """Of a run whose producers have these outlooks: too early as long as it is for one of them."""
    found = list(outlooks)
    early = [one for one in found if isinstance(one, TooEarly)]
    if early:
        return early[0]
    known = [one for one in found if isinstance(one, Forecast)]
    if not known:
        return TooEarly("no producer is known")
    moving = [one for one in known if one.left] or known[:1]
    return Forecast(
        left=sum(one.left for one in known),
        seconds=max(one.seconds for one in known),
        earliest=max(one.earliest for one in known),
        latest=max(one.latest for one in known),
        rows_per_second=sum(one.rows_per_second for one in known),
        recent_rows_per_second=sum(one.recent_rows_per_second for one in known),
        window_seconds=min(one.window_seconds for one in moving),
    )


def _of_this_process(readings: Sequence[Reading]) -> Sequence[Reading]:
    """A counter that falls, or a time that does, is another process'."""
    for place in range(len(readings) - 1, 0, -1):
        before, after = readings[place - 1], readings[place]
        if after.captured < before.captured or after.generating_seconds < before.generating_seconds:
            return readings[place:]
    return readings


def _too_early(readings: Sequence[Reading]) -> str | None:
    first, now = readings[0], readings[-1]
    if now.replayed and not now.captured:
        return f"{now.replayed} samples were made before and none now; only generating is forecast"
    if now.samples < LEAST_SAMPLES:
        return f"{now.samples} samples are finished; from {LEAST_SAMPLES} on there is a forecast"
    if now.generating_seconds < LEAST_SECONDS:
        return f"it has generated for {now.generating_seconds:.0f} s, of {LEAST_SECONDS:.0f}"
    if now.captured > 2 * now.rows:
        return "more rows are in the making than finished: those finished are the short ones"
    if now.seconds - first.seconds < LEAST_WINDOW_SECONDS or not (now.rows and now.captured):
        return "its rate is not known yet"
    return None


def mean_rows(now: Reading) -> float:
    """Of a sample. Those that are finished are short ones, as long ones are still in the making.

    Renewal theory: with many at a time whose lengths have the mean m and the deviation c m, their
    unfinished rows are m (1 + c^2) / 2 each, and finished samples lag or lead what the rows would
    give by (1 - c^2) / 2 each. So of the unfinished rows 2 c^2 / (1 + c^2) belong to m.
    """
    mean = now.rows / now.samples
    squared = (now.deviation_tokens / mean) ** 2
    unfinished = max(0, now.captured - now.rows)
    return mean + unfinished * 2 * squared / (1 + squared) / now.samples


def _spread(now: Reading, mean: float, left: int) -> float:
    """By what part the sum of the rows that are left may be off: its mean is known from n samples,
    and the sum of `left` new ones varies about that."""
    error = now.deviation_tokens / mean * math.sqrt(1 / now.samples + 1 / left)
    return STANDARD_ERRORS * error
