"""What a swap of consumers looked like from both ends, by what they wrote down twice a second."""

import math
from itertools import pairwise

import msgspec

from draftfeed_deploy.records import ProducerSnapshot, Step
from draftfeed_deploy.report_records import RunFiles


class Generation(msgspec.Struct, frozen=True):
    """The producer in one part of the run."""

    tokens_per_second: float
    longest_gap_seconds: float
    """Between two snapshots that saw a new token; snapshots are half a second apart."""


class SwapReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds since the run began."""

    started_seconds: float
    """The second consumer's process."""
    takeover_seconds: float
    """The producer was first seen in the new term."""
    first_sample_seconds: float
    """The second consumer has its first sample."""
    first_step_seconds: float
    steps_by_first: int
    steps_undone: int
    """In no checkpoint when the second consumer took over: trained again."""
    steps_by_second: int
    steps_per_second_before: float
    steps_per_second_after: float
    before: Generation
    during: Generation
    """From the start of the second process, which shares this machine, to its first step."""
    after: Generation


def swap_report(files: RunFiles) -> SwapReport | None:
    """None when there was no swap, or when too little of it was recorded."""
    if files.swap is None or len(files.consumers) < 2 or not files.producer:
        return None
    first, second = files.consumers
    if not (second.received and second.steps):
        return None
    started, trained = files.swap.started_seconds, second.steps[0].time_seconds
    begin, end = _generating(files.producer)
    return SwapReport(
        started_seconds=started,
        takeover_seconds=next((s.time_seconds for s in files.producer if s.term > 1), math.nan),
        first_sample_seconds=second.received[0].time_seconds,
        first_step_seconds=trained,
        steps_by_first=len(files.steps) - len(second.steps),
        steps_undone=files.undone_steps,
        steps_by_second=len(second.steps),
        steps_per_second_before=_step_rate(first.steps),
        steps_per_second_after=_step_rate(second.steps),
        before=_generation(files.producer, begin, min(started, end)),
        during=_generation(files.producer, started, min(trained, end)),
        after=_generation(files.producer, trained, end),
    )


def swap_lines(swap: SwapReport) -> list[str]:
    """For a terminal."""
    parts = {"before": swap.before, "during": swap.during, "after": swap.after}
    rates = ", ".join(f"{part.tokens_per_second:.0f} {when}" for when, part in parts.items())
    gaps = ", ".join(f"{part.longest_gap_seconds:.1f} {when}" for when, part in parts.items())
    return [
        f"  swap       second consumer started at {swap.started_seconds:.1f} s, took over at"
        f" {swap.takeover_seconds:.1f} s, first sample at {swap.first_sample_seconds:.1f} s;"
        f" {swap.steps_by_first} + {swap.steps_by_second} steps, {swap.steps_undone} undone",
        f"             tokens/s {rates}; longest gap {gaps} s;"
        f" steps/s {swap.steps_per_second_before:.2f} before, {swap.steps_per_second_after:.2f}"
        " after",
    ]


def _generating(snapshots: list[ProducerSnapshot]) -> tuple[float, float]:
    """When the first and when the last token was made."""
    last = snapshots[-1].captured
    begin = next((s for s in reversed(snapshots) if s.captured == 0), snapshots[0])
    end = next(s for s in snapshots if s.captured == last)
    return begin.time_seconds, end.time_seconds


def _generation(snapshots: list[ProducerSnapshot], begin: float, end: float) -> Generation:
    part = [s for s in snapshots if begin <= s.time_seconds <= end]
    if len(part) < 2:
        return Generation(0.0, 0.0)
    seconds = part[-1].time_seconds - part[0].time_seconds
    moved_at, longest = part[0].time_seconds, 0.0
    for before, now in pairwise(part):
        longest = max(longest, now.time_seconds - moved_at)
        if now.captured > before.captured:
            moved_at = now.time_seconds
    return Generation((part[-1].captured - part[0].captured) / seconds, longest)


def _step_rate(steps: list[Step]) -> float:
    """Per second, from the first to the last."""
    seconds = steps[-1].time_seconds - steps[0].time_seconds if steps else 0.0
    return (len(steps) - 1) / seconds if seconds > 0 else 0.0
