"""A scenario, planned, with everything that is said of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from draftfeed_deploy import plan_files
from draftfeed_deploy.plan import Plan, plan
from draftfeed_deploy.plan_claims import Judged, judge
from draftfeed_deploy.plan_drivers import Sensitivity, drivers, sensitivities
from draftfeed_deploy.plan_files import Case
from draftfeed_deploy.plan_findings import Finding, findings
from draftfeed_deploy.plan_inputs import Measured
from draftfeed_deploy.plan_results import Result, results


class Outcome(Struct, frozen=True):
    case: Case
    plan: Plan
    results: list[Result]
    drivers: dict[str, tuple[str, ...]]
    """Keys of the assumptions that move a result, by its key."""
    findings: list[Finding]
    sensitivities: list[Sensitivity]
    claims: list[Judged]


def outcome(
    name: str,
    overrides: Sequence[str] = (),
    benchmark: Path | None = None,
    running: Measured | None = None,
) -> Outcome:
    """running: what running producers have measured. Raises ConfigError."""
    case = plan_files.load(name, overrides, benchmark, running)
    inputs = case.inputs
    planned = plan(inputs)
    return Outcome(
        case=case,
        plan=planned,
        results=results(inputs, planned),
        drivers=drivers(case.stated, case.assumptions),
        findings=findings(inputs, planned, case.doubts),
        sensitivities=sensitivities(case.stated, case.assumptions),
        claims=judge(
            case,
            lambda more: plan_files.load(name, more),
            lambda more: plan_files.load(name, [*overrides, *more], benchmark, running),
        ),
    )


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Values in the units that are named beside them; a limit that is none is null."""
    return {
        "scenario": outcome.case.name,
        "title": outcome.case.inputs.title,
        "bottleneck": outcome.plan.times.bottleneck,
        "results": {
            result.key: {
                **msgspec.structs.asdict(result),
                "inputs": outcome.drivers[result.key],
            }
            for result in outcome.results
        },
        "assumptions": outcome.case.assumptions,
        "findings": outcome.findings,
        "sensitivity": outcome.sensitivities,
        "claims": [msgspec.to_builtins(judged) for judged in outcome.claims],
    }
