"""What moves a plan's results: each assumption is varied, with everything else as it is.

Nobody keeps a list of what rests on what, so none can fall behind the arithmetic.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from draftfeed_deploy.plan import plan
from draftfeed_deploy.plan_inputs import Inputs, filled
from draftfeed_deploy.plan_results import values

FACTORS = (0.5, 2.0)
"""An assumption drives a result that differs when it is half of what it is, or twice."""
STEP = 0.2
"""Of the sensitivity."""
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


def drivers(inputs: Inputs, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Of each result, those of the keys that move it, or whether there is such a result at all.
    inputs: as they were stated, so that what follows from a varied one is varied with it."""
    before = values(filled(inputs))
    found: dict[str, list[str]] = {result: [] for result in before}
    for key in keys:
        others = [values(filled(other)) for other in _variations(inputs, key)]
        for result, value in before.items():
            if any(_differs(other.get(result), value) for other in others):
                found[result].append(key)
    return {result: tuple(moved) for result, moved in found.items()}


def sensitivities(inputs: Inputs, keys: Iterable[str]) -> list[Sensitivity]:
    """Of all numbers among the keys that change how long the run takes, the strongest first.
    inputs: as they were stated."""
    base = _elapsed(inputs)
    found = []
    for key in keys:
        value = _value(filled(inputs), key)
        if not _is_number(value):
            continue
        less, more = (_times(inputs, key, value, factor) for factor in (1 - STEP, 1 + STEP))
        one = Sensitivity(key, _elapsed(less), _elapsed(more))
        if one.spread_seconds > 1e-9 * base:
            found.append(one)
    return sorted(found, key=lambda one: -one.spread_seconds)


def _variations(inputs: Inputs, key: str) -> Iterator[Inputs]:
    """None of a name, or of what is not set."""
    value = _value(filled(inputs), key)
    if isinstance(value, bool):
        yield _with(inputs, key, not value)
    elif _is_number(value):
        yield from (_times(inputs, key, value or 1.0, factor) for factor in FACTORS)
    else:
        yield from (_with(inputs, key, one) for one in _choices(inputs, key) if one != value)


def _times(inputs: Inputs, key: str, value: float, factor: float) -> Inputs:
    varied = value * factor
    return _with(inputs, key, min(1.0, varied) if key in FRACTIONS else varied)


def _choices(inputs: Inputs, key: str) -> tuple[Any, ...]:
    table, name = key.split(".")
    fields = msgspec.structs.fields(getattr(inputs, table))
    (kind,) = (field.type for field in fields if field.name == name)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _with(inputs: Inputs, key: str, value: object) -> Inputs:
    table, name = key.split(".")
    part = msgspec.structs.replace(getattr(inputs, table), **{name: value})
    return msgspec.structs.replace(inputs, **{table: part})


def _value(inputs: Inputs, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(inputs, table), name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _differs(other: float | None, value: float) -> bool:
    return other is None or not math.isclose(other, value, rel_tol=1e-9)


def _elapsed(inputs: Inputs) -> float:
    return plan(filled(inputs)).times.elapsed
