"""What `draftfeed prepare` found in a set, for programs and for people."""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from draftfeed_deploy.prepare_layers import Layers
from draftfeed_deploy.prepare_template import Probe, makes_of_thinking

FAULTS_KEPT = 1000
"""With their reasons; more are counted."""
FAULTS_SHOWN = 10
BINS = 32
NO_THINKING = (
    "this chat template has none: prompts end the same with it on and off, and what a response "
    "has of it is left out"
)


class Fault(Struct, frozen=True):
    row: int
    reason: str


class Distribution(Struct, frozen=True):
    """Of token counts. Bins have equal ratios; edges are one more than counts."""

    count: int
    total: int
    mean: float
    least: int
    median: float
    p90: float
    p99: float
    most: int
    edges: list[float]
    counts: list[int]


class Report(Struct, kw_only=True):
    source: str
    out: str
    target: str
    mode: str
    thinking: str
    max_tokens: int
    """Of a prompt; in prefill mode the response counts, too."""
    rows: int = 0
    written: int = 0
    duplicates: int = 0
    renamed: int = 0
    """Rows whose id another row has: theirs is followed by # and the row's number."""
    over_long: int = 0
    broken: int = 0
    faults: list[Fault] = []
    """The first of all rows that were left out."""
    responses_cut: int = 0
    """In live mode the target answers anew."""
    with_tools: int = 0
    columns_left_out: dict[str, int] = {}
    """Rows of those written that have each."""
    prompt_tokens: Distribution | None = None
    loss_mask_sums: Distribution | None = None
    """Of responses, in prefill mode."""
    degenerate: dict[str, int] = {}
    """Responses by what is wrong with them, in prefill mode."""
    layers: Layers | None = None
    """Where a drafter was named."""
    probes: list[Probe] = []
    errors: list[str] = []
    """With any, nothing was written."""

    @property
    def without_thinking(self) -> bool:
        """Whether the chat template makes nothing of thinking, and is right otherwise."""
        if any(probe.fault for probe in self.probes if probe.thinking != "on"):
            return False
        return bool(self.probes) and not any(map(makes_of_thinking, self.probes))

    @property
    def passed(self) -> bool:
        return not self.errors


def distribution(tokens: Sequence[int]) -> Distribution | None:
    if not len(tokens):
        return None
    values = np.asarray(tokens, np.int64)
    median, p90, p99 = np.percentile(values, (50, 90, 99))
    least, most = int(values.min()), int(values.max())
    edges = np.geomspace(least, max(most, least + 1), BINS + 1)
    edges[0], edges[-1] = least, max(most, least + 1)  # powers are not quite exact
    counts, _ = np.histogram(values, edges)
    return Distribution(
        count=len(values),
        total=int(values.sum()),
        mean=float(values.mean()),
        least=least,
        median=float(median),
        p90=float(p90),
        p99=float(p99),
        most=most,
        edges=edges.tolist(),
        counts=counts.tolist(),
    )


def lines_of(report: Report) -> Iterator[str]:
    verdict = "PASSED" if report.passed else "FAILED"
    yield f"{verdict}: {report.written:,} of {report.rows:,} rows in {report.out}"
    for error in report.errors:
        yield f"  error      {error}"
    yield f"  left out   {report.broken:,} broken, {report.duplicates:,} duplicates, " + (
        f"{report.over_long:,} longer than {report.max_tokens:,} tokens"
    )
    for fault in report.faults[:FAULTS_SHOWN]:
        yield f"    row {fault.row}: {fault.reason}"
    if (more := report.broken + report.duplicates + report.over_long - FAULTS_SHOWN) > 0:
        yield f"    and {more:,} more"
    if report.renamed:
        yield f"  renamed    {report.renamed:,} rows with an id that another row has: ID#ROW"
    if report.columns_left_out:
        yield f"  columns left out   {', '.join(report.columns_left_out)}"
    if report.responses_cut:
        yield f"  responses  {report.responses_cut:,} cut off: the target answers anew"
    if report.with_tools:
        yield f"  tools      in {report.with_tools:,} rows"
    yield from _count_lines("prompts", report.prompt_tokens)
    yield from _count_lines("loss mask", report.loss_mask_sums)
    for reason, count in report.degenerate.items():
        yield f"  responses  {count:,} {reason}"
    if report.layers is not None:
        yield f"  layers     of the drafter: {report.layers}"
    if report.without_thinking:
        yield f"  thinking   {NO_THINKING}"
        return
    for probe in report.probes:
        yield f"  thinking {probe.thinking + ':':10}{_probe_words(probe)}"


def _count_lines(what: str, found: Distribution | None) -> Iterator[str]:
    if found is not None:
        yield (
            f"  {what:<9}  {found.total:,} tokens; {found.least:,} to {found.most:,}, mean "
            f"{found.mean:,.0f}, median {found.median:,.0f}, 99% up to {found.p99:,.0f}"
        )


def _probe_words(probe: Probe) -> str:
    where = "inside a thinking block" if probe.opens else "with none open"
    if probe.closes:
        where = "after a thinking block that is over"
    return f"prompts end {where}; " + (probe.fault or f"the loss mask has {probe.mask!r}")
