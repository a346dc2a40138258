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


Loading = Callable[[Sequence[str]], Case]
"""A scenario, with these settings more."""


def judge(case: Case, as_stated: Loading, as_planned: Loading) -> list[Judged]:
    """as_stated: the file alone, since that is what its claims are about; as_planned: with all
    that was set and measured. Raises ConfigError for a claim about nothing."""
    return [_judged(claim, case.name, as_stated, as_planned) for claim in case.inputs.claims]


def _judged(claim: Claim, where: str, as_stated: Loading, as_planned: Loading) -> Judged:
    _check(claim, where)
    stated = _computed(claim, claim.terms, as_stated, where)
    planned = _computed(claim, (), as_planned, where)
    return Judged(claim, stated, _holds(claim, stated), planned, _holds(claim, planned))


def _computed(claim: Claim, terms: Sequence[str], load: Loading, where: str) -> float:
    value = _value(claim, load([*claim.case, *terms]).inputs, where)
    if claim.against is None:
        return value / FACTORS[claim.unit]
    other = _value(claim, load([*claim.against, *terms]).inputs, where)
    if not other:
        raise ConfigError(where, f"claim {claim.says!r}: {claim.result} is 0 in what it is against")
    return 100 * (value / other - 1)


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
