"""Members of one run that get, or train, less than the others."""

from collections.abc import Mapping
from statistics import median
from typing import Annotated

from msgspec import Meta, Struct

LEAST_SHARE = 0.6
"""Of what the others do. Samples differ in size, so that equal members differ by a tenth or two
over a minute."""


class Drift(Struct, frozen=True):
    name: str
    share: Annotated[float, Meta(ge=0, le=1)]
    """Of the median of the others."""


def drifting(done: Mapping[str, float]) -> list[Drift]:
    """done: what each member got in the same time. The slowest first."""
    found = []
    for name, own in done.items():
        others = [value for other, value in done.items() if other != name]
        if others and (usual := median(others)) > 0 and own < LEAST_SHARE * usual:
            found.append(Drift(name, own / usual))
    return sorted(found, key=lambda one: one.share)
