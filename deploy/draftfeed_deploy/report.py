"""Proof that a finished run did what it promised: `report.json`, `report.html` and a few lines."""

import importlib.metadata
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

import msgspec

from draftfeed_deploy.records import Evaluation, ProducerSnapshot, Rejection
from draftfeed_deploy.report_checks import (
    Check,
    Expected,
    expected_prompts,
    loss_words,
    run_checks,
    uses,
)
from draftfeed_deploy.report_epochs import EpochReport, epoch_lines, epoch_reports
from draftfeed_deploy.report_html import render
from draftfeed_deploy.report_records import RunFiles, read_run
from draftfeed_deploy.report_swap import SwapReport, swap_lines, swap_report

__all__ = ["Check", "Layer", "Report", "judge_run", "summary_lines", "write_report"]

SHARD_SIZE = 4096
"""Lines a shard of the prompt file, where the producer's configuration says nothing else."""


class Layer(msgspec.Struct, frozen=True):
    """Values of one tapped layer that did not survive the conversion to fp16 unharmed."""

    layer: str
    """Its id: k is the output of decoder block k, from 0; "final" is the final state."""
    nonfinite: int
    saturated: int
    zero_rows: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = 1
    draftfeed_version: str
    written_at: str
    """UTC, ISO 8601."""
    run: str
    """Name of the run directory."""
    prompts_file: str
    dataset: str
    """Dataset part of every sample id: 16 hex digits of the prompt file's SHA-256."""
    duration_seconds: float
    prompts: int
    """In every epoch, each a sample of its own."""
    generated: int
    trained: int
    """Distinct samples used by a completed optimizer step."""
    rejected: list[Rejection]
    steps: int
    tokens: int
    response_tokens: int
    tokens_per_second: float
    """Over the time in which the producer was generating."""
    logical_bytes: int
    """Hidden states alone, as the target made them."""
    encoded_bytes: int
    wire_bytes: int
    ratio: float | None
    """Logical over encoded bytes; framing and what was sent again are only in the wire's."""
    recaptured: int
    """Samples that lacked rows and were made again."""
    spool_peak_bytes: int
    buffer_peak_bytes: int
    producer_stall_seconds: dict[str, float]
    consumer_stall_seconds: dict[str, float]
    layers: list[Layer]
    final_training_loss: float | None
    evaluation: Evaluation | None
    swap: SwapReport | None = None
    """When a second consumer took over."""
    epochs: list[EpochReport] = []
    """When there were several."""
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def judge_run(
    run_dir: Path, prompts_path: Path, shard_size: int = SHARD_SIZE, epochs: int = 1
) -> Report:
    """Judge the run in `run_dir` and write nothing. Damage is a failed check, not an error."""
    return _judge(read_run(run_dir), run_dir, expected_prompts(prompts_path, shard_size, epochs))


def write_report(
    run_dir: Path, prompts_path: Path, shard_size: int = SHARD_SIZE, epochs: int = 1
) -> Report:
    """Judge the run in `run_dir`; write `report.json` and `report.html` beside its files.

    `shard_size` and `epochs` are the producer's: both are part of the sample ids that are expected.
    Whatever is missing or damaged becomes a failed check. Raises OSError only when the reports
    cannot be written, and ImportError when matplotlib is not there to draw the page.
    """
    files = read_run(run_dir)
    report = _judge(files, run_dir, expected_prompts(prompts_path, shard_size, epochs))
    run_dir.mkdir(parents=True, exist_ok=True)
    document = {"passed": report.passed, **msgspec.to_builtins(report)}
    text = msgspec.json.format(msgspec.json.encode(document))
    (run_dir / "report.json").write_bytes(text + b"\n")
    (run_dir / "report.html").write_text(render(report, files), encoding="utf-8")
    return report


def _judge(files: RunFiles, run_dir: Path, expected: Expected) -> Report:
    last = files.producer[-1] if files.producer else None
    return Report(
        draftfeed_version=importlib.metadata.version("draftfeed"),
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
        run=run_dir.resolve().name,
        prompts_file=expected.file,
        dataset=expected.dataset,
        duration_seconds=files.duration_seconds,
        prompts=len(expected.names),
        generated=len({sample.id for sample in files.generated}),
        trained=len(uses(files)),
        rejected=files.rejected,
        steps=len(files.steps),
        tokens=last.tokens if last else 0,
        response_tokens=last.response_tokens if last else 0,
        tokens_per_second=_tokens_per_second(files.producer),
        logical_bytes=last.logical_bytes if last else 0,
        encoded_bytes=last.encoded_bytes if last else 0,
        wire_bytes=last.wire_bytes if last else 0,
        ratio=last.logical_bytes / last.encoded_bytes if last and last.encoded_bytes else None,
        recaptured=last.recaptured if last else 0,
        spool_peak_bytes=max((s.spool_bytes for s in files.producer), default=0),
        buffer_peak_bytes=max((s.buffer_bytes for s in files.consumer), default=0),
        producer_stall_seconds=last.stall_seconds if last else {},
        consumer_stall_seconds=_summed(
            one.snapshots[-1].stall_seconds for one in files.consumers if one.snapshots
        ),
        layers=_layers(last),
        final_training_loss=_last_loss(files),
        evaluation=files.evaluation,
        swap=swap_report(files),
        epochs=epoch_reports(files, expected.epochs),
        checks=run_checks(files, expected),
    )


def summary_lines(report: Report) -> list[str]:
    """The report for a terminal: at most 20 lines of plain text."""
    failed = [check for check in report.checks if not check.passed]
    verdict = "FAILED" if failed else "PASSED"
    ratio = f", ratio {report.ratio:.3f}" if report.ratio else ""
    return [
        f"{verdict}: {report.trained} of {report.prompts} {_each(report)} in {report.steps} steps,"
        f" {report.duration_seconds:.0f} s",
        f"  generated  {report.generated} samples, {report.tokens:,} tokens"
        f" ({report.response_tokens:,} of responses), {report.tokens_per_second:.0f} tokens/s,"
        f" {report.recaptured} made again",
        f"  moved      {report.logical_bytes / 1e6:.1f} MB of hidden states,"
        f" {report.encoded_bytes / 1e6:.1f} MB encoded{ratio},"
        f" {report.wire_bytes / 1e6:.1f} MB on the wire",
        f"  learned    {_learned(report.evaluation)}",
        f"  stalls     producer: {_stalls(report.producer_stall_seconds)};"
        f" consumer: {_stalls(report.consumer_stall_seconds)}",
        *(swap_lines(report.swap) if report.swap else []),
        *epoch_lines(report.epochs),
        f"  checks     {len(report.checks) - len(failed)} of {len(report.checks)} passed",
        *(f"  FAILED     {check.name}: {check.detail}" for check in failed),
    ]


def _each(report: Report) -> str:
    count = len(report.epochs)
    return f"samples of {count} epochs trained" if count else "prompts trained"


def _tokens_per_second(snapshots: list[ProducerSnapshot]) -> float:
    """Mean from the last snapshot of a target that is not there yet to the first one with all
    tokens: they are counted when their sample is finished, which many are at once."""
    if not snapshots:
        return 0.0
    last = snapshots[-1]
    *_, start = snapshots[0], *takewhile(_not_begun, snapshots)
    stop = next(s for s in snapshots if s.tokens == last.tokens)
    seconds = stop.time_seconds - start.time_seconds
    return (stop.tokens - start.tokens) / seconds if seconds > 0 else 0.0


def _not_begun(snapshot: ProducerSnapshot) -> bool:
    return snapshot.tokens == 0 and snapshot.phase in ("", "loading")


def _summed(stalls: Iterable[dict[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for seconds in stalls:
        total.update(seconds)
    return dict(total)


def _layers(last: ProducerSnapshot | None) -> list[Layer]:
    if last is None:
        return []
    counts = zip(last.nonfinite or [], last.saturated, last.zero_rows or [], strict=False)
    return [Layer(name, *count) for name, count in zip(last.layers, counts, strict=False)]


def _last_loss(files: RunFiles) -> float | None:
    losses = [step.loss for step in files.steps if step.loss is not None]
    return losses[-1] if losses else None


def _learned(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "not evaluated"
    same = "same text as greedy" if evaluation.same_as_greedy else "text differs from greedy"
    return (
        f"held-out loss {loss_words(evaluation)};"
        f" accepted length {evaluation.accepted_length:.2f}, {same}"
    )


def _stalls(seconds: dict[str, float]) -> str:
    words = (f"{cause.replace('_', ' ')} {value:.1f} s" for cause, value in seconds.items())
    return ", ".join(words) or "not recorded"
