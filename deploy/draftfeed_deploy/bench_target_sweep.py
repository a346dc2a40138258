"""Which batches are tried, and when it is enough. Nothing here runs an engine."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

FLAT = 0.05
"""A doubling of the batch that gives less is not worth its memory."""
FLAT_DOUBLINGS = 2
"""In a row: one alone may be noise."""


class Rate(NamedTuple):
    batch: int
    output: float
    """Tokens per second."""


def batches(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and `most` itself."""
    batch = 1
    while batch < most:
        yield batch
        batch *= 2
    yield most


def gain(smaller: Rate, larger: Rate) -> float:
    """Per doubling: 0.05 is 5%. The last step to the largest batch may be less than a doubling."""
    doublings = math.log2(larger.batch / smaller.batch)
    return float((larger.output / smaller.output) ** (1 / doublings) - 1)


def flat(rates: Sequence[Rate]) -> bool:
    """Whether the last doublings gave so little that the next one is not tried."""
    last = rates[-1 - FLAT_DOUBLINGS :]
    gains = [gain(a, b) for a, b in pairwise(last)]
    return len(gains) == FLAT_DOUBLINGS and max(gains) < FLAT


def knee(rates: Sequence[Rate]) -> Rate:
    """The smallest batch behind which no doubling that was tried gives FLAT; the last one when the
    last doubling does."""
    for i in range(len(rates) - 1, 0, -1):
        if gain(rates[i - 1], rates[i]) >= FLAT:
            return rates[i]
    return rates[0]


class Budget:
    """Of time."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        """began: by that clock; None: now."""
        self._clock = clock
        self._end = (clock() if began is None else began) + seconds

    @property
    def left_seconds(self) -> float:
        """Negative when it is overdrawn."""
        return self._end - self._clock()

    def allows(self, seconds: float) -> bool:
        return seconds <= self.left_seconds


def expected_seconds(seconds: float, batch: int, next_batch: int) -> float:
    """Of a round at the next batch, at most: when a larger batch is no faster for each request."""
    return seconds * next_batch / batch
