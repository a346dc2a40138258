"""A plan as text: results beside what they rest on, what was claimed, what matters most."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest

from draftfeed_deploy import plan_files
from draftfeed_deploy.plan_claims import Judged
from draftfeed_deploy.plan_files import Assumption
from draftfeed_deploy.plan_findings import Finding
from draftfeed_deploy.plan_outcome import Outcome
from draftfeed_deploy.plan_results import Result
from draftfeed_deploy.plan_units import plain, show

SENSITIVITIES_SHOWN = 10
BESIDE = 88
"""Characters of what stands beside a result."""
_STUCK = "\N{NO-BREAK SPACE}"
"""Between words that stay on one line."""
COLUMN_TITLE = 24
"""Characters of a title that heads a column."""
SHARED_ROWS = (
    "response_tokens",
    "prompt_tokens",
    "second_pass_tokens",
    "output_seconds",
    "prefill_seconds",
    "second_pass_seconds",
    "generation_seconds",
    "training_seconds",
    "elapsed_seconds",
    "stream_bytes_per_second",
    "burst_bytes_per_second",
    "link_bits_needed",
    "spool_encoded_bytes",
    "archive_bytes",
    "moved_bytes",
    "streamed_bytes",
    "fits_longest",
    "cost",
)
"""Of several plans side by side."""


def lines_of(outcome: Outcome) -> Iterator[str]:
    times = outcome.plan.times
    yield _heading(outcome)
    yield f"{show(times.elapsed, 'seconds')}; what decides: {times.bottleneck}"
    group = ""
    width = max(map(len, map(_head, outcome.results)))
    for result in outcome.results:
        if result.group != group:
            group = result.group
            yield ""
            yield group
        yield from _result_lines(result, _driving(outcome, [result.key]), width)
    yield ""
    yield from _idle_lines(outcome)
    yield from _finding_lines(outcome.findings)
    yield ""
    yield from _sensitivity_lines(outcome)
    if outcome.claims:
        yield ""
        yield from _claim_lines(outcome.claims)


def list_lines() -> Iterator[str]:
    """The scenarios that are shipped, with their titles."""
    names = plan_files.names()
    width = max(map(len, names))
    yield from (f"{name:<{width}}  {plan_files.load(name).inputs.title}" for name in names)


def comparison_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Results in rows, plans in columns."""
    rows = [["", *(_column(outcome) for outcome in outcomes)]]
    by_key = [{result.key: result for result in outcome.results} for outcome in outcomes]
    for key in SHARED_ROWS:
        shown = [found.get(key) for found in by_key]
        if any(shown):
            rows.append([key, *(show(one.value, one.unit) if one else "-" for one in shown)])
    rows.append(["what decides", *(outcome.plan.times.bottleneck for outcome in outcomes)])
    yield from _table_lines(rows)
    yield ""
    yield from _shared_lines(outcomes)
    for outcome in outcomes:
        yield ""
        yield _heading(outcome)
        yield from _finding_lines(outcome.findings)


def _shared_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What drives the results of several plans: first where they differ."""
    assumed = [{one.key: one for one in _driving(outcome, SHARED_ROWS)} for outcome in outcomes]
    keys = dict.fromkeys(chain.from_iterable(assumed))
    same = [key for key in keys if len({_gist(found.get(key)) for found in assumed}) == 1]
    differing = [
        [f"  {key}", *(_shown(found.get(key)) for found in assumed)]
        for key in keys
        if key not in same
    ]
    yield from _table_lines([["what drives these", *map(_column, outcomes)], *differing])
    yield "  in all of them"
    yield from (f"    {line}" for line in _wrapped(assumed[0][key] for key in same))


def _table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    columns = zip_longest(*rows, fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        yield "  ".join(cells).rstrip()


def _heading(outcome: Outcome) -> str:
    case = outcome.case
    return f"{case.name}: {case.inputs.title}" if case.inputs.title else case.name


def _column(outcome: Outcome) -> str:
    """The title, where it is as short as a name is."""
    title = outcome.case.inputs.title
    return title if title and len(title) <= COLUMN_TITLE else outcome.case.name


def _head(result: Result) -> str:
    return f"  {show(result.value, result.unit):>13}  {result.meaning}"


def _driving(outcome: Outcome, results: Iterable[str]) -> list[Assumption]:
    """What drives any of these."""
    keys = chain.from_iterable(outcome.drivers.get(result, ()) for result in results)
    return [outcome.case.assumptions[key] for key in dict.fromkeys(keys)]


def _result_lines(result: Result, used: Iterable[Assumption], width: int) -> Iterator[str]:
    beside = list(_wrapped(used))
    for head, words in zip_longest([_head(result)], beside, fillvalue=""):
        yield f"{head:<{width}}  {words}".rstrip()


def _idle_lines(outcome: Outcome) -> Iterator[str]:
    used = set(chain.from_iterable(outcome.drivers.values()))
    idle = [
        one
        for key, one in outcome.case.assumptions.items()
        if key not in used and one.value is not None
    ]
    if idle:
        yield "what drives none of these"
        yield from (f"  {line}" for line in _wrapped(idle))
        yield ""


def _wrapped(assumptions: Iterable[Assumption]) -> Iterator[str]:
    """A paragraph for each source, defaults last."""
    by_source: dict[str, list[str]] = {}
    for one in assumptions:
        by_source.setdefault(_source(one), []).append(_words(one).replace(" ", _STUCK))
    for source in sorted(by_source, key="default".__eq__):
        text = f"{source}: {'; '.join(by_source[source])}"
        for line in textwrap.wrap(
            text, BESIDE, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        ):
            yield line.replace(_STUCK, " ")


def _words(one: Assumption) -> str:
    words = f"{one.key} {plain(one.value)}"
    return f"{words} ({one.note})" if one.note and one.source != "given" else words


def _gist(one: Assumption | None) -> tuple[str, str]:
    """Whichever file gives it."""
    return ("", "") if one is None else (plain(one.value), one.source)


def _shown(one: Assumption | None) -> str:
    return "-" if one is None else f"{plain(one.value)} ({_source(one)})"


def _source(one: Assumption) -> str:
    """given, measured, default; or the file that gives it."""
    return one.note if one.source == "given" and one.note else one.source


def _finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        mark = "IMPOSSIBLE" if finding.grade == "impossible" else finding.grade
        yield f"  {mark:<10}  {finding.text}"


def _sensitivity_lines(outcome: Outcome) -> Iterator[str]:
    elapsed = show(outcome.plan.times.elapsed, "seconds")
    shown = outcome.sensitivities[:SENSITIVITIES_SHOWN]
    yield f"what changes {elapsed} most{'':24}20% less    20% more   source"
    for one in shown:
        assumption = outcome.case.assumptions[one.key]
        source = _source(assumption)
        less, more = (show(value, "seconds") for value in (one.less_seconds, one.more_seconds))
        yield f"  {one.key:<38}  {less:>12}{more:>12}   {source}"


def _claim_lines(claims: Iterable[Judged]) -> Iterator[str]:
    yield "what was claimed, computed on its own terms and by this plan"
    for one in claims:
        claim = one.claim
        stated = f"{claim.value:g}" + (f" to {claim.high:g}" if claim.high is not None else "")
        verdict = "reproduced" if one.reproduced else "NOT reproduced"
        yield f"  {claim.says}"
        by_plan = f"{one.planned:.4g} {claim.unit}{'' if one.agrees else ', which differs'}"
        yield (
            f"    claimed {stated} {claim.unit}; on its terms {one.on_its_terms:.4g}, {verdict}; "
            f"by this plan {by_plan}"
        )
        if claim.note:
            yield f"    {claim.note}"
