"""The quality gate: when most responses are worthless, generation should not go on for days.

Responses count as degenerate that stop at once, are very short, are the same for many prompts, or
never end their thinking. Each of these is fine now and then, and a set with many tool calls and
one-word answers has many: only a share of them closes the gate.

They are judged in the order in which they were begun, so many in a row together. By the order in
which they finish it would be the short ones first, the more so the more run at a time; in the order
of their beginning, what has not finished can only turn out sound. Pure: no clock, no files, no
threads.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

EXAMPLES = 3
SHOWN_CHARS = 60
FIRST_RUNNING = 4
"""Until the first responses are judged, no more run at a time than this part of a window."""
STRETCHES_KEPT = 64
"""The last ones. Who is overtaken by so many others is not looked at."""

IMMEDIATE, SHORT, IDENTICAL, UNFINISHED = (
    "stopped at once",
    "short",
    "the same for many prompts",
    "thinking without an end",
)


class QualityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When generation is stopped because of what it generates."""

    max_share: float = 0.5
    """Of the window that may be degenerate; 1: never stop."""
    window: int = 200
    """Responses, in the order in which they were begun, that are judged together; at the beginning
    half as many. Until that is done, a quarter as many requests run at a time at most."""
    min_response_tokens: int = 8
    """A response that ended by itself and has no more tokens than this is short. Its end token
    counts, and so does a thinking block, even an empty one."""
    max_identical: int = 10
    """A response that the window has more often than this is the same for many prompts."""

    def __post_init__(self) -> None:
        if not 0 < self.max_share <= 1:
            raise ValueError(f"max_share is {self.max_share}, it must be above 0 and at most 1")
        if self.window < 2:
            raise ValueError(f"window is {self.window}, it must be at least 2")
        if self.min_response_tokens < 0:
            raise ValueError("min_response_tokens must not be negative")
        if self.max_identical < 1:
            raise ValueError(f"max_identical is {self.max_identical}, it must be at least 1")


class Response(NamedTuple):
    """What the gate looks at of a finished sample."""

    key: str
    tokens: int
    """Sum of the loss mask."""
    identity: bytes
    """Equal for equal responses: their ids, or a digest of them."""
    finish_reason: str
    thinking_open: bool
    """Whether it began to think, or was made to, and never came to the end of that."""
    text: str
    """The beginning of it, for people."""


class Alarm(NamedTuple):
    """Why the gate is closed."""

    finished: int
    """Samples, when it closed."""
    looked_at: int
    """Responses that were begun one after the other."""
    unseen: int
    """Of those, the ones that have not finished, or not even begun."""
    degenerate: int
    most: int
    """That may be."""
    reasons: dict[str, int]
    """A response may be there for several."""
    examples: tuple[str, ...]

    def __str__(self) -> str:
        why = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        unseen = f" ({self.unseen} of them not seen yet)" if self.unseen else ""
        return (
            f"{self.degenerate} of {self.looked_at} responses in a row{unseen} are degenerate, "
            f"{self.most} may be: {why}; such as {'; '.join(self.examples)}"
        )


class GateFigures(NamedTuple):
    """How the last window is of which half has finished."""

    looked_at: int = 0
    """Finished samples in it."""
    degenerate: int = 0
    closed: bool = False


class _Seen(NamedTuple):
    response: Response
    reasons: tuple[str, ...]
    """Without the one that depends on the rest of the window."""


class _Same(NamedTuple):
    """Responses of a window that are equal."""

    times: int = 0
    bad: int = 0
    """Of those, for a reason of their own."""


class _Stretch:
    """So many responses in a row, as far as they have finished."""

    def __init__(self, size: int, max_identical: int) -> None:
        self.size, self._max_identical = size, max_identical
        self.seen: list[_Seen] = []
        self._same: dict[bytes, _Same] = {}
        self.degenerate = 0

    @property
    def finished(self) -> int:
        return len(self.seen)

    def add(self, seen: _Seen) -> None:
        self.seen.append(seen)
        before = self._same.get(seen.response.identity, _Same())
        after = _Same(before.times + 1, before.bad + bool(seen.reasons))
        self._same[seen.response.identity] = after
        self.degenerate += self._degenerate(after) - self._degenerate(before)

    def reasons(self, seen: _Seen) -> tuple[str, ...]:
        identical = self._same[seen.response.identity].times > self._max_identical
        return (*seen.reasons, IDENTICAL) if identical else seen.reasons

    def _degenerate(self, same: _Same) -> int:
        return same.times if same.times > self._max_identical else same.bad


class QualityGate:
    """Closes once and stays closed. One thread uses it.

    A new stretch of responses begins with each half window, and each response is in two of them:
    a bad time that is as long as a window and a half fills one, wherever it begins.
    """

    def __init__(self, config: QualityConfig) -> None:
        self._config, self._half = config, config.window // 2
        self._stretches: dict[int, _Stretch] = {0: self._stretch(0)}
        self._first = self._stretches[0]
        self.finished = 0
        """Samples so far."""
        self.alarm: Alarm | None = None

    def add(self, response: Response, number: int | None = None) -> Alarm | None:
        """number: how many were begun before it. None: they finish in that order. The alarm is
        returned when this response closes the gate."""
        seen = _Seen(response, own_reasons(response, self._config))
        place = (self.finished if number is None else number) // self._half
        self.finished += 1
        for index in (place, place + 1):
            if index > max(self._stretches) - STRETCHES_KEPT:
                self._at(index).add(seen)
                self._judge(self._stretches[index], self._stretches[index].size)
        return self.alarm if self.alarm and self.alarm.finished == self.finished else None

    def end(self) -> Alarm | None:
        """Nothing more comes: what there is is judged, also when it is less than half a window.
        The alarm is returned when this closes the gate."""
        was_open = self.alarm is None
        for stretch in self._stretches.values():
            if stretch is self._first or stretch.finished >= self._half:
                self._judge(stretch, stretch.finished)
        return self.alarm if was_open else None

    @property
    def most_running(self) -> int | None:
        """Requests at a time, or None for any number: so that no more is made of a set that is bad
        from the beginning than it takes to say so."""
        sound = self._first.finished - self._first.degenerate
        enough = self._first.size - self._most(self._first.size)
        return None if sound >= enough else max(1, self._config.window // FIRST_RUNNING)

    @property
    def figures(self) -> GateFigures:
        newest = reversed(self._stretches.values())
        shown = next((one for one in newest if one.finished >= self._half), self._first)
        return GateFigures(shown.finished, shown.degenerate, self.alarm is not None)

    def _stretch(self, index: int) -> _Stretch:
        size = self._half if index == 0 else 2 * self._half
        return _Stretch(size, self._config.max_identical)

    def _at(self, index: int) -> _Stretch:
        for missing in range(max(self._stretches) + 1, index + 1):
            self._stretches[missing] = self._stretch(missing)
            self._stretches.pop(missing - STRETCHES_KEPT, None)
        return self._stretches[index]

    def _most(self, size: int) -> int:
        return math.floor(self._config.max_share * size + 1e-9)

    def _judge(self, stretch: _Stretch, size: int) -> None:
        if self.alarm is not None or stretch.degenerate <= self._most(size):
            return
        found = [(seen.response, stretch.reasons(seen)) for seen in stretch.seen]
        bad = [(response, reasons) for response, reasons in found if reasons]
        counts: dict[str, int] = {}
        for reason in (reason for _, reasons in bad for reason in reasons):
            counts[reason] = counts.get(reason, 0) + 1
        self.alarm = Alarm(
            finished=self.finished,
            looked_at=size,
            unseen=size - stretch.finished,
            degenerate=stretch.degenerate,
            most=self._most(size),
            reasons=dict(sorted(counts.items(), key=lambda item: -item[1])),
            examples=tuple(_example(*one) for one in bad[-EXAMPLES:]),
        )


def own_reasons(response: Response, config: QualityConfig) -> tuple[str, ...]:
    """Why a response is degenerate, whatever the others are like."""
    reasons = []
    by_itself = response.finish_reason != "length"
    if by_itself and response.tokens <= 1:
        reasons.append(IMMEDIATE)
    if by_itself and response.tokens <= config.min_response_tokens:
        reasons.append(SHORT)
    if response.thinking_open:
        reasons.append(UNFINISHED)
    return tuple(reasons)


def thinking_is_open(ids: Sequence[int], begin: int | None, end: int | None) -> bool:
    """Whether the last of the tokens that begin and end thinking is one that begins it.

    ids: prompt and response, since many templates begin the thinking in the prompt.
    """
    if begin is None or end is None:
        return False
    for id in reversed(ids):
        if id in (begin, end):
            return id == begin
    return False


def shown(text: str) -> str:
    """For a log: one line, quoted, not too long."""
    cut = text[: SHOWN_CHARS - 1] + "…" if len(text) > SHOWN_CHARS else text
    return json.dumps(cut, ensure_ascii=False)


def _example(response: Response, reasons: Iterable[str]) -> str:
    return (
        f"{response.key}: {shown(response.text)}, {response.tokens} tokens ({', '.join(reasons)})"
    )
