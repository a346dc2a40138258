"""`report.html`: one page, no script, nothing loaded from elsewhere."""

from collections.abc import Callable, Iterable
from html import escape
from importlib.resources import files as package_files
from string import Template
from typing import TYPE_CHECKING

from draftfeed_deploy.report_epochs import EpochReport
from draftfeed_deploy.report_plots import plots
from draftfeed_deploy.report_records import RunFiles
from draftfeed_deploy.report_swap import Generation, SwapReport

if TYPE_CHECKING:
    from draftfeed_deploy.report import Check, Layer, Report


def render(report: "Report", files: RunFiles) -> str:
    """The page as text. Raises ImportError when matplotlib is not installed."""
    page = package_files("draftfeed_deploy").joinpath("data/report.html").read_text("utf-8")
    checks = report.checks
    return Template(page).substitute(
        plots(files),
        run=escape(report.run),
        verdict="passed" if report.passed else "failed",
        verdict_text=_verdict(report),
        subtitle=escape(_subtitle(report)),
        tiles="".join(_tiles(report)),
        checks_passed=f"{sum(check.passed for check in checks)} of {len(checks)}",
        checks="".join(map(_check_row, checks)),
        swap=_swap(report.swap) if report.swap else "",
        epochs=_epochs(report.epochs) if report.epochs else "",
        stalls="".join(_stall_rows(report)),
        layers="".join(_layer_rows(report.layers)),
        facts="".join(_fact_rows(report)),
    )


def _verdict(report: "Report") -> str:
    failed = sum(not check.passed for check in report.checks)
    return "All checks passed" if not failed else f"{failed} check{'s' * (failed > 1)} failed"


def _subtitle(report: "Report") -> str:
    return (
        f"{_asked(report)}, {report.generated} samples generated, "
        f"{report.trained} trained in {report.steps} optimizer steps, "
        f"{_duration(report.duration_seconds)}"
    )


def _tiles(report: "Report") -> Iterable[str]:
    ratio = f"{report.ratio:.3f}" if report.ratio else "–"
    yield _tile("trained", f"{report.trained:,}", f"of {_asked(report)}")
    yield _tile("generated", f"{report.tokens_per_second:,.0f}", "tokens/s")
    encoded = f"{_size(report.logical_bytes)} encoded as {_size(report.encoded_bytes)}"
    yield _tile("ratio", ratio, encoded)
    if not (evaluation := report.evaluation):
        yield _tile("held-out loss", "–", "not evaluated")
        return
    before, after = evaluation.untrained_loss, evaluation.trained_loss
    change = f"{after / before - 1:+.0%}".replace("-", "−") if before > 0 else "–"
    yield _tile("held-out loss", change, f"{before:.2f} → {after:.2f}")
    yield _tile("accepted length", f"{evaluation.accepted_length:.2f}", "tokens a target call")


def _asked(report: "Report") -> str:
    what = f"samples in {len(report.epochs)} epochs" if report.epochs else "prompts"
    return f"{report.prompts:,} {what}"


def _tile(label: str, value: str, unit: str) -> str:
    return (
        f'<div class="tile"><span class="label">{escape(label)}</span>'
        f"<strong>{escape(value)}</strong><span>{escape(unit)}</span></div>"
    )


def _check_row(check: "Check") -> str:
    state, mark = ("ok", "✓ held") if check.passed else ("bad", "✗ failed")
    cells = f'<th scope="row">{escape(check.name)}</th><td>{escape(check.detail)}</td>'
    return f'<tr class="{state}"><td class="mark">{mark}</td>{cells}</tr>'


def _swap(swap: SwapReport) -> str:
    rows = "".join(_swap_rows(swap))
    note = "a second consumer took the stream from the first while generation went on"
    return (
        f'<section><h2>Swap <small>{note}</small></h2><table class="number"><thead><tr><th></th>'
        "<th>before</th><th>during</th><th>after</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></section>"
    )


def _swap_rows(swap: SwapReport) -> Iterable[str]:
    def generation(head: str, show: Callable[[Generation], str]) -> str:
        return _row(head, show(swap.before), show(swap.during), show(swap.after))

    yield generation("generated, tokens/s", lambda part: f"{part.tokens_per_second:.1f}")
    yield generation("longest gap", lambda part: f"{part.longest_gap_seconds:.1f} s")
    rates = swap.steps_per_second_before, swap.steps_per_second_after
    yield _row("optimizer steps/s", f"{rates[0]:.2f}", "", f"{rates[1]:.2f}")
    undone = f"{swap.steps_undone} undone"
    yield _row("optimizer steps", f"{swap.steps_by_first}", undone, f"{swap.steps_by_second}")
    times = {
        "second consumer started": swap.started_seconds,
        "the stream is its own": swap.takeover_seconds,
        "its first sample": swap.first_sample_seconds,
        "its first step": swap.first_step_seconds,
    }
    for what, seconds in times.items():
        yield _row(f"{what}, after the run began", "", f"{seconds:.1f} s", "")


def _epochs(epochs: list[EpochReport]) -> str:
    rows = "".join(map(_epoch_row, epochs))
    note = "the target ran for the first, the others are replayed out of the archive"
    heads = ("generated", "delivered", "trained", "equal to epoch 1", "first to last")
    return (
        f'<section><h2>Epochs <small>{note}</small></h2><table class="number"><thead><tr><th></th>'
        f"{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead>"
        f"<tbody>{rows}</tbody></table></section>"
    )


def _epoch_row(one: EpochReport) -> str:
    counts = (one.generated, one.delivered, one.trained, one.equal)
    return _row(f"epoch {one.epoch}", *(f"{n:,}" for n in counts), f"{one.seconds:.1f} s")


def _stall_rows(report: "Report") -> Iterable[str]:
    sides = {"producer": report.producer_stall_seconds, "consumer": report.consumer_stall_seconds}
    for side, stalls in sides.items():
        if not stalls:
            yield _row(side, "not recorded", "–")
        for cause, seconds in stalls.items():
            yield _row(side, cause.replace("_", " "), f"{seconds:.1f} s")


def _layer_rows(layers: "list[Layer]") -> Iterable[str]:
    if not layers:
        yield _row("–", "not recorded", "", "")
    for layer in layers:
        counts = (layer.nonfinite, layer.saturated, layer.zero_rows)
        yield _row(layer.layer, *(f"{count:,}" for count in counts))


def _fact_rows(report: "Report") -> Iterable[str]:
    yield _row("prompt file", report.prompts_file)
    yield _row("dataset", report.dataset or "–")
    yield _row("tokens", f"{report.tokens:,} fed, {report.response_tokens:,} in responses")
    yield _row("logical bytes (hidden states)", f"{report.logical_bytes:,}")
    yield _row("encoded bytes", f"{report.encoded_bytes:,}")
    yield _row("wire bytes", f"{report.wire_bytes:,}")
    yield _row("samples made again for missing rows", str(report.recaptured))
    yield _row("spool, peak", _size(report.spool_peak_bytes))
    yield _row("buffer, peak", _size(report.buffer_peak_bytes))
    yield _row("rejected", str(len(report.rejected)))
    if evaluation := report.evaluation:
        uniform = f"{evaluation.uniform_loss:.2f} (ln {evaluation.vocab_size:,})"
        yield _row("loss of uniform guessing", uniform)
        new, calls = evaluation.accepted_new_tokens, evaluation.accepted_target_calls
        yield _row("accepted (not gated)", f"{new:,} tokens in {calls:,} target calls")
        same = "the same" if evaluation.same_as_greedy else "different"
        yield _row("text against greedy (not gated)", same)
    yield _row("draftfeed", report.draftfeed_version)
    yield _row("written", report.written_at.replace("T", " "))


def _row(head: str, *cells: str) -> str:
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(head)}</th>{rest}</tr>'


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
