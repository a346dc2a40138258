"""What scripts that compare arms in turns share: whose turn it is, and medians of all rounds."""

import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Spread(NamedTuple):
    """Of one figure, over all rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return self.times(1, 3)

    def times(self, factor: float, digits: int) -> str:
        middle, least, most = (f"{factor * value:.{digits}f}" for value in self)
        return f"{middle} ({least} to {most})"

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        found = list(values)
        return cls(median(found), min(found), max(found))


def in_turn(arms: Sequence[T], number: int) -> list[T]:
    """All arms in the order of this round: who is first goes round."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


def cpu_seconds(pid: int) -> float:
    """Of all its threads, in user mode and in the kernel. Raises OSError when it has ended."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names
