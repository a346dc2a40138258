"""Shard ranges as people write them: `0-3,8` is the shards 0, 1, 2, 3 and 8."""

import re
from itertools import chain, pairwise

from draftfeed_producer.errors import ShardError
from draftfeed_proto import ranges

Ranges = tuple[int, ...]
"""Half-open, flattened: (start, stop, start, stop, ...), rising, not touching."""

_PART = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def parse_ranges(text: str) -> Ranges:
    """Raises ShardError unless it is a list of numbers and ranges, each shard once."""
    spans = sorted(_span(part.strip(), text) for part in text.split(","))
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise ShardError(f"shards {text!r}: {start} is in it twice")
    return union(tuple(chain.from_iterable(spans)), ())


def format_ranges(shards: Ranges) -> str:
    """Inverse of `parse_ranges`; "none" when there are none."""
    words = [f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in ranges.pairs(shards)]
    return ",".join(words) or "none"


def union(left: Ranges, right: Ranges) -> Ranges:
    return tuple(ranges.union(left, right))


def difference(left: Ranges, right: Ranges) -> Ranges:
    return tuple(ranges.difference(left, right))


def intersection(left: Ranges, right: Ranges) -> Ranges:
    return tuple(ranges.intersection(left, right))


def _span(part: str, text: str) -> tuple[int, int]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ShardError(f"shards {text!r}: {part!r} is not a number or a range such as 0-3")
    first = int(match[1])
    last = int(match[2] or match[1])
    if last < first:
        raise ShardError(f"shards {text!r}: {part!r} ends before it begins")
    return first, last + 1
