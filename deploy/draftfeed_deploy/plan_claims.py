"""Figures that somebody has computed, computed again: on their own terms, and on the plan's."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.plan import plan
from draftfeed_deploy.plan_files import Case
from draftfeed_deploy.plan_inputs import Claim, Inputs
from draftfeed_deploy.plan_results import results
from draftfeed_deploy.plan_units import FACTORS, MEASURES

HALF = 0.5 + 1e-9
"""Of the step that a figure is rounded to."""


class Judged(Struct, frozen=True):
    """A claim, and what comes out in its unit."""

    claim: Claim
    on_its_terms: float
    reproduced: bool
    """To the rounding in which it was stated."""
    planned: float
    """The same case, reckoned as the plan does."""
    agrees: bool


def judge(case: Case, reload: Callable[[Sequence[str]], Case]) -> list[Judged]:
    """reload: the same case with more settings. Raises ConfigError for a claim about nothing."""
    return [_judged(claim, case.name, reload) for claim in case.inputs.claims]


def _judged(claim: Claim, where: str, reload: Callable[[Sequence[str]], Case]) -> Judged:
    _check(claim, where)
    values = []
    for terms in (claim.terms, ()):
        value = _value(claim, reload([*claim.case, *terms]).inputs, where)
        if claim.against is not None:
            value /= _value(claim, reload([*claim.against, *terms]).inputs, where)
            value = 100 * (value - 1)
        else:
            value /= FACTORS[claim.unit]
        values.append(value)
    return Judged(claim, values[0], _holds(claim, values[0]), values[1], _holds(claim, values[1]))


def _check(claim: Claim, where: str) -> None:
    if claim.unit not in FACTORS:
        known = ", ".join(FACTORS)
        raise ConfigError(where, f"claim {claim.says!r}: unit must be one of {known}")


def _value(claim: Claim, inputs: Inputs, where: str) -> float:
    found = {result.key: result for result in results(inputs, plan(inputs))}
    result = found.get(claim.result)
    if result is None:
        raise ConfigError(where, f"claim {claim.says!r}: this plan has no result {claim.result!r}")
    if claim.against is None and result.unit != MEASURES[claim.unit]:
        raise ConfigError(where, f"claim {claim.says!r}: {result.key} is in {result.unit}")
    return result.value


def _holds(claim: Claim, value: float) -> bool:
    slack = HALF * claim.rounding
    high = claim.value if claim.high is None else claim.high
    return claim.value - slack <= value <= high + slack
