"""What was found: rows of the table, every round's figures for the document, what was cut."""

import time
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch


class Spread(NamedTuple):
    median: float
    least: float
    most: float

    def words(self, factor: float = 1, digits: int = 1) -> str:
        middle, low, high = (f"{factor * value:,.{digits}f}" for value in self)
        return f"{middle} ({low} to {high})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


MET, MISSED, FAILED = "met", "missed", "FAILED"
NEEDS_CUDA = "not run: needs CUDA"


class Bar(NamedTuple):
    """A goal, and the value beyond which the whole run fails (None: a miss is only told)."""

    words: str
    least: float = float("-inf")
    most: float = float("inf")
    fails_above: float | None = None

    def verdict(self, value: float) -> str:
        if self.fails_above is not None and value > self.fails_above:
            return FAILED
        return MET if self.least <= value <= self.most else MISSED


class Row(NamedTuple):
    part: str
    what: str
    value: str
    goal: str = ""
    verdict: str = ""


class Report:
    """One run's findings. Bars are judged on a GPU only."""

    def __init__(self, judged: bool) -> None:
        self.rows: list[Row] = []
        self.rounds: dict[str, Any] = {}
        self.cut: list[str] = []
        self._judged = judged

    @property
    def failed(self) -> bool:
        return any(row.verdict == FAILED for row in self.rows)

    def tell(self, part: str, what: str, value: str) -> None:
        self.rows.append(Row(part, what, value))

    def judge(self, part: str, what: str, value: str, measured: float, bar: Bar) -> None:
        verdict = bar.verdict(measured) if self._judged else "not judged"
        self.rows.append(Row(part, what, value, bar.words, verdict))

    def check(self, part: str, what: str, value: str, compared: int, wrong: Sequence[str]) -> None:
        """A row that holds or fails, on any machine; the first thing wrong is named."""
        if wrong:
            value = f"{len(wrong)} wrong, first: {wrong[0]}"
        elif not compared:
            value = "nothing was compared: no time was left"
        holds = compared and not wrong
        self.rows.append(Row(part, what, value, "equal", MET if holds else FAILED))

    def broke(self, part: str, why: str) -> None:
        self.rows.append(Row(part, "broke off", why, "", FAILED))

    def needs_cuda(self, part: str, what: str) -> None:
        self.rows.append(Row(part, what, NEEDS_CUDA))

    def shortened(self, part: str, what: str) -> None:
        self.cut.append(f"{part}: {what}")

    def table(self) -> list[str]:
        header = Row("part", "what", "measured", "goal", "")
        rows = [header, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]

    def ending(self) -> list[str]:
        verdicts = [row for row in self.rows if row.verdict in (MET, MISSED, FAILED)]
        met = sum(row.verdict == MET for row in verdicts)
        lines = [f"{met} of {len(verdicts)} goals met"] if verdicts else []
        lines += [
            f"  {row.verdict}: {row.part}, {row.what}" for row in verdicts if row.verdict != MET
        ]
        lines += [f"cut for time: {what}" for what in self.cut]
        return lines


class Deadline:
    """When a part has to end. Looked at between rounds, so a part may be late by one of them."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @property
    def passed(self) -> bool:
        return self.left <= 0


def gigabytes_per_second(size_bytes: int, seconds: float) -> float:
    return size_bytes / seconds / 1e9


def name_of(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
