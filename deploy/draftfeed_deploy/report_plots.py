"""The three plots of the report, as SVG that lives inside the page.

matplotlib bakes colours in, a page has a light and a dark face: the plots are drawn in stand-in
colours that are swapped for the page's CSS variables.
"""

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftfeed_deploy.report_records import RunFiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, BLUE, AMBER, GREEN = "#0d0e01", "#0d0e02", "#0d0e03", "#0d0e04", "#0d0e05"
CSS_NAMES = {INK: "ink", FAINT: "line", BLUE: "blue", AMBER: "amber", GREEN: "green"}
MB = 1e6

Series = NDArray[np.float64]


def plots(files: RunFiles) -> dict[str, str]:
    """Inline `<svg>` elements by name. Raises ImportError when matplotlib is not installed."""
    return {
        "bandwidth": svg_of(_bandwidth(files), "bandwidth"),
        "fill": svg_of(_fill(files), "fill"),
        "loss": svg_of(_loss(files), "loss"),
    }


def _bandwidth(files: RunFiles) -> "Figure":
    figure, (axes,) = figure_of(width=10.4, height=2.6, rows=1)
    times = _column(files.producer, "time_seconds")
    if len(times) < 2:
        return _empty(figure, axes)
    for name, colour in (("logical", BLUE), ("wire", AMBER)):
        centres, rates = _rate(times, _column(files.producer, f"{name}_bytes"))
        axes.fill_between(centres, rates / MB, step="mid", color=colour, alpha=0.16, linewidth=0)
        axes.step(centres, rates / MB, where="mid", color=colour, label=name, linewidth=1.6)
    finish(axes, "MB/s", "seconds since the run began")
    _legend(axes)
    return figure


def _fill(files: RunFiles) -> "Figure":
    figure, (above, below) = figure_of(width=5.2, height=3.5, rows=2)
    spool = (files.producer, "spool_bytes", "spool_quota_bytes", "spool (producer)")
    buffer = (files.consumer, "buffer_bytes", "buffer_capacity_bytes", "buffer (consumer)")
    for axes, colour, (snapshots, filled, limit, label) in (
        (above, BLUE, spool),
        (below, GREEN, buffer),
    ):
        if not snapshots:
            _empty(figure, axes)
            continue
        capacity = getattr(snapshots[-1], limit) / MB
        _level(axes, colour, _column(snapshots, "time_seconds"), _column(snapshots, filled) / MB)
        _mark_capacity(axes, capacity, max(getattr(s, filled) for s in snapshots) / MB)
        axes.set_xlim(0, files.duration_seconds or 1)
        size = f", of {capacity:,.4g} MB" if capacity else ""
        axes.set_title(f"{label}{size}", loc="left", fontsize=8.5, color=INK)
        finish(axes, "MB", "seconds since the run began" if axes is below else "")
    return figure


def _level(axes: "Axes", colour: str, times: Series, level: Series) -> None:
    axes.fill_between(times, level, step="post", color=colour, alpha=0.16, linewidth=0)
    axes.step(times, level, where="post", color=colour, linewidth=1.6)


def _loss(files: RunFiles) -> "Figure":
    figure, (axes,) = figure_of(width=5.2, height=3.5, rows=1)
    points = [(step.step, step.loss) for step in files.steps if step.loss is not None]
    if not points:
        return _empty(figure, axes)
    steps, losses = np.array(points, dtype=np.float64).T
    axes.plot(steps, losses, ".", color=BLUE, alpha=0.4, markersize=5, label="each step")
    window = max(1, len(losses) // 10)
    means = _running_mean(losses, window)
    centres = steps[window // 2 :][: len(means)]
    axes.plot(centres, means, color=BLUE, label=f"mean of {window}")
    finish(axes, "training loss", "optimizer step", floor=None)
    _legend(axes)
    return figure


def _rate(times: Series, totals: Series) -> tuple[Series, Series]:
    """Bytes/s in even bins of at least a second: (bin centres, rates).

    Samples come in batches: finer bins would show spikes where people look for a level.
    """
    span = max(times[-1] - times[0], 1e-9)
    edges = np.linspace(times[0], times[-1], num=max(2, min(60, int(span)) + 1))
    # A restarted process counts from zero again; its bytes were not moved backwards.
    moved = np.maximum(np.diff(np.interp(edges, times, totals)), 0)
    return (edges[:-1] + edges[1:]) / 2, moved / np.diff(edges)


def _running_mean(values: Series, window: int) -> Series:
    sums = np.cumsum(np.insert(values, 0, 0.0))
    return (sums[window:] - sums[:-window]) / window


def _column(snapshots: list[Any], name: str) -> Series:
    return np.array([getattr(snapshot, name) for snapshot in snapshots], dtype=np.float64)


def figure_of(*, width: float, height: float, rows: int) -> "tuple[Figure, list[Axes]]":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "in the checkout run: pip install '.[demo]'"
        raise ImportError(f"the report needs matplotlib; {fix}") from error
    # Figure without pyplot: no global state, no display, nothing to close.
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
    return figure, list(axes[:, 0])


def _empty(figure: "Figure", axes: "Axes") -> "Figure":
    axes.set_axis_off()
    axes.text(0.5, 0.5, "nothing was recorded", ha="center", color=INK, transform=axes.transAxes)
    return figure


def _mark_capacity(axes: "Axes", capacity: float, peak: float) -> None:
    # Drawn only where it does not flatten the curve below it.
    if 0 < capacity < 4 * peak:
        axes.axhline(capacity, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))


def _legend(axes: "Axes") -> None:
    above = {"bbox_to_anchor": (1, 0.98), "ncols": 2}
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="lower right", **above)


def finish(axes: "Axes", y_label: str, x_label: str, *, floor: float | None = 0) -> None:
    axes.set_ylabel(y_label, color=INK, fontsize=8.5)
    axes.set_xlabel(x_label, color=INK, fontsize=8.5)
    axes.margins(x=0.01, y=0.14)
    if floor is not None:
        axes.set_ylim(bottom=floor)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8.5, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.patch.set_alpha(0)


def svg_of(figure: "Figure", name: str) -> str:
    import matplotlib as mpl

    text = io.StringIO()
    anonymous = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Text stays text: small, searchable, in the page's own font.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=anonymous)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # HTML knows the namespaces; without them the page names no address at all.
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--sans)", svg)
    for colour, css in CSS_NAMES.items():
        svg = svg.replace(colour, f"var(--{css})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{name} plot" ', 1)
