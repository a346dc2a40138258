"""Which assumption changes the answer most."""

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from draftfeed_deploy.plan import plan
from draftfeed_deploy.plan_inputs import Inputs

STEP = 0.2
FRACTIONS = ("hardware.memory_fraction", "training.utilisation")
"""That are 1 at most."""


class Sensitivity(Struct, frozen=True):
    key: str
    less_seconds: float
    """How long the run takes with 20% less of it."""
    more_seconds: float

    @property
    def spread_seconds(self) -> float:
        return abs(self.more_seconds - self.less_seconds)


def sensitivities(inputs: Inputs, keys: Iterable[str]) -> list[Sensitivity]:
    """Of all numbers among the keys that change how long the run takes, the strongest first."""
    base = plan(inputs).times.elapsed
    found = []
    for key in keys:
        value = _value(inputs, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        more = value * (1 + STEP)
        if key in FRACTIONS:
            more = min(1.0, more)
        one = Sensitivity(
            key, _elapsed(inputs, key, value * (1 - STEP)), _elapsed(inputs, key, more)
        )
        if one.spread_seconds > 1e-9 * base:
            found.append(one)
    return sorted(found, key=lambda one: -one.spread_seconds)


def _elapsed(inputs: Inputs, key: str, value: float) -> float:
    name, field = key.split(".")
    part = msgspec.structs.replace(getattr(inputs, name), **{field: value})
    return plan(msgspec.structs.replace(inputs, **{name: part})).times.elapsed


def _value(inputs: Inputs, key: str) -> object:
    name, field = key.split(".")
    return getattr(getattr(inputs, name), field)
