"""The report of a prepared set as one page: no script, nothing loaded from elsewhere."""

from collections.abc import Iterator
from html import escape
from importlib.resources import files as package_files
from string import Template
from typing import TYPE_CHECKING

import numpy as np

from draftfeed_deploy.prepare_report import NO_THINKING, Distribution, Report
from draftfeed_deploy.prepare_template import Probe
from draftfeed_deploy.report_plots import BLUE, GREEN, figure_of, finish, svg_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAULTS_SHOWN = 100


def render(report: Report) -> str:
    """Raises ImportError when matplotlib is not installed."""
    return Template(_file("prepare.html")).substitute(
        style=_style(),
        source=escape(report.source),
        verdict="passed" if report.passed else "failed",
        verdict_text="Can be used" if report.passed else "Cannot be used",
        subtitle=escape(_subtitle(report)),
        tiles="".join(_tiles(report)),
        errors="".join(f'<p class="bad">{escape(error)}</p>' for error in report.errors),
        plots="".join(_plots(report)),
        probes="".join(_probe_rows(report)),
        numbers="".join(_number_rows(report)),
        faults="".join(_fault_rows(report)),
    )


def _file(name: str) -> str:
    return package_files("draftfeed_deploy").joinpath(f"data/{name}").read_text("utf-8")


def _style() -> str:
    """That of the run's report."""
    return _file("report.html").partition("<style>")[2].partition("</style>")[0]


def _subtitle(report: Report) -> str:
    what = "answered anew" if report.mode == "live" else "with its responses"
    return f"for {report.target}, {what}, thinking: {report.thinking}"


def _tiles(report: Report) -> Iterator[str]:
    yield _tile("usable", report.written, f"of {report.rows:,} rows")
    yield _tile("broken", report.broken, "rows")
    yield _tile("duplicates", report.duplicates, "rows")
    yield _tile("over-long", report.over_long, f"more than {report.max_tokens:,} tokens")


def _tile(label: str, value: int, unit: str) -> str:
    return (
        f'<div class="tile"><span class="label">{escape(label)}</span>'
        f"<strong>{value:,}</strong><span>{escape(unit)}</span></div>"
    )


def _plots(report: Report) -> Iterator[str]:
    for name, title, found, colour in (
        ("prompts", "Tokens of prompts", report.prompt_tokens, BLUE),
        ("mask", "Loss-mask sums: tokens of responses", report.loss_mask_sums, GREEN),
    ):
        if found is not None:
            svg = svg_of(_histogram(found, colour), name)
            yield f"<section><h2>{title}</h2>{svg}</section>"


def _histogram(found: Distribution, colour: str) -> "Figure":
    figure, (axes,) = figure_of(width=5.2, height=3.0, rows=1)
    edges = np.array(found.edges)
    axes.bar(edges[:-1], found.counts, np.diff(edges), align="edge", color=colour, alpha=0.7)
    axes.set_xscale("log")
    finish(axes, "rows", "tokens")
    return figure


def _probe_rows(report: Report) -> Iterator[str]:
    if report.without_thinking:
        yield f'<tr><td colspan="3">{escape(NO_THINKING)}</td></tr>'
        return
    yield from map(_probe_row, report.probes)


def _probe_row(probe: Probe) -> str:
    state, mark = ("bad", "✗") if probe.fault else ("ok", "✓")
    return (
        f'<tr class="{state}"><td class="mark">{mark} {probe.thinking}</td>'
        f"<td><code>{escape(probe.prompt_end)}</code></td>"
        f"<td><code>{escape(probe.fault or probe.mask)}</code></td></tr>"
    )


def _number_rows(report: Report) -> Iterator[str]:
    for name, found in (("prompts", report.prompt_tokens), ("loss mask", report.loss_mask_sums)):
        if found is not None:
            figures = (found.total, found.least, found.median, found.mean, found.p99, found.most)
            yield _row(name, *(f"{figure:,.0f}" for figure in figures))


def _fault_rows(report: Report) -> Iterator[str]:
    for fault in report.faults[:FAULTS_SHOWN]:
        yield _row(str(fault.row), fault.reason)
    if len(report.faults) > FAULTS_SHOWN:
        yield _row("…", "more are in the JSON")


def _row(head: str, *cells: str) -> str:
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(head)}</th>{rest}</tr>'
