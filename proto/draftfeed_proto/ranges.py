"""Sets of whole numbers as half-open ranges, flattened: [start, stop, start, stop, ...], rising and
not touching."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence


def contains(edges: Sequence[int], number: int) -> bool:
    return bisect_right(edges, number) % 2 == 1


def add(edges: list[int], start: int, stop: int) -> None:
    # An edge at an even index opens a range: touching ranges are merged by taking them in.
    low, high = bisect_left(edges, start), bisect_right(edges, stop)
    opening = [start] if low % 2 == 0 else []
    closing = [stop] if high % 2 == 0 else []
    edges[low:high] = opening + closing


def union(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Of parts that may also overlap or touch, in any order."""
    edges: list[int] = []
    for start, stop in (*pairs(left), *pairs(right)):
        add(edges, start, stop)
    return edges


def difference(left: Sequence[int], right: Sequence[int]) -> list[int]:
    # The two are mostly checkpoints of one run: what only one of them has is little, and an edge
    # that both have is none of its edges.
    only_in_one = sorted(set(left) ^ set(right))
    return intersection(only_in_one, left)


def intersection(left: Sequence[int], right: Sequence[int]) -> list[int]:
    few, many = sorted((left, right), key=len)
    edges: list[int] = []
    for start, stop in pairs(few):
        low, high = bisect_right(many, start), bisect_left(many, stop)
        opening = [start] if low % 2 == 1 else []
        closing = [stop] if high % 2 == 1 else []
        edges += [*opening, *many[low:high], *closing]
    return edges


def pairs(edges: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(edges[::2], edges[1::2], strict=True)
