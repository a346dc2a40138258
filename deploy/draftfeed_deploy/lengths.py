"""How long responses are, counted in classes that double."""

import math
from bisect import bisect_left
from collections.abc import Sequence

LENGTH_BOUNDS = tuple(1 << power for power in range(18))
"""Tokens of a response, each class up to and with its bound; the last one, for more, has none."""


def no_lengths() -> list[int]:
    return [0] * (len(LENGTH_BOUNDS) + 1)


def class_of(tokens: int) -> int:
    return bisect_left(LENGTH_BOUNDS, tokens)


def deviation(counts: Sequence[float], mean: float) -> float:
    """Standard deviation in tokens, each response taken for the middle of its class."""
    total = sum(counts)
    if not total:
        return 0.0
    squares = sum(n * (_middle(place) - mean) ** 2 for place, n in enumerate(counts))
    return math.sqrt(squares / total)


def _middle(place: int) -> float:
    """Of (b/2, b]; beyond the last bound, as if another class followed."""
    return 0.75 * (1 << place) if place else 1.0
