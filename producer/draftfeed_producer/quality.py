"""The quality gate: when most responses are worthless, generation should not go on for days.

It looks at a window of the last finished samples. Responses count as degenerate that stop at once,
are very short, are the same for many prompts, or never end their thinking. Each of these is fine
now and then, and a set with many tool calls and one-word answers has many: only a share of them
closes the gate. Pure: no clock, no files, no threads.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

EXAMPLES = 3
SHOWN_CHARS = 60
RUNNING_WINDOWS = 4
"""A window has so many times the requests that run, or those would outweigh it; and until the first
window is full, no more run than a quarter of it."""

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
    """Finished samples that are looked at; the first look is at half of them. Until there are so
    many, a quarter as many requests run at a time at most."""
    min_response_tokens: int = 8
    """A response that ended by itself and has no more tokens than this is short. Its end token
    counts, and so does a thinking block, even an empty one."""
    max_identical: int = 10
    """A response that the window has more often than this is the same for many prompts. Where many
    requests run at once the window is longer, and this grows with it."""

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
    """In the window, those that ran included."""
    running: int
    degenerate: int
    max_share: float
    reasons: dict[str, int]
    """A response may be there for several."""
    examples: tuple[str, ...]

    def __str__(self) -> str:
        share = f"{self.degenerate / self.looked_at:.0%}, and {self.max_share:.0%} may be"
        why = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        running = f" ({self.running} of them still run)" if self.running else ""
        return (
            f"{self.degenerate} of the last {self.looked_at} responses{running} are degenerate, "
            f"{share}: {why}; such as {'; '.join(self.examples)}"
        )


class GateFigures(NamedTuple):
    """How the window is."""

    looked_at: int = 0
    """Finished samples in it."""
    degenerate: int = 0
    closed: bool = False


class _Seen(NamedTuple):
    response: Response
    reasons: tuple[str, ...]
    """Without the one that depends on the rest of the window."""


class QualityGate:
    """Closes once and stays closed. One thread uses it."""

    def __init__(self, config: QualityConfig) -> None:
        self._config = config
        self._window: deque[_Seen] = deque()
        self._same: dict[bytes, _Same] = {}
        self._most_identical = config.max_identical
        self._degenerate = 0
        self.finished = 0
        """Samples so far."""
        self.alarm: Alarm | None = None

    def add(self, response: Response, running: int = 0) -> Alarm | None:
        """running: requests that have begun and not finished. They count as sound, or the first
        samples to finish would be judged for being the shortest. The alarm is returned when this
        response closes the gate."""
        self.finished += 1
        self._enter(_Seen(response, own_reasons(response, self._config)))
        longest = max(self._config.window, RUNNING_WINDOWS * running)
        while len(self._window) > longest:
            self._leave(self._window.popleft())
        self._allow_identical(self._config.max_identical * longest // self._config.window)
        enough = self.finished >= self._config.window // 2
        return self._judge(running) if enough else None

    def end(self) -> Alarm | None:
        """Nothing more comes: what there is is judged, also when it is less than half a window.
        The alarm is returned when this closes the gate."""
        return self._judge(running=0)

    @property
    def most_running(self) -> int | None:
        """Requests at a time, or None for any number. Those that run count as sound, so with many
        of them it would take as many bad samples to say that all are bad."""
        judged = self.finished >= self._config.window or self._config.max_share == 1
        return None if judged else max(1, self._config.window // RUNNING_WINDOWS)

    @property
    def figures(self) -> GateFigures:
        return GateFigures(len(self._window), self._degenerate, self.alarm is not None)

    def _judge(self, running: int) -> Alarm | None:
        most = self._config.max_share * (len(self._window) + running)
        if self.alarm is not None or self._degenerate <= most:
            return None
        self.alarm = self._alarm(running)
        return self.alarm

    def _allow_identical(self, most: int) -> None:
        if most != self._most_identical:
            self._most_identical = most
            self._degenerate = sum(same.degenerate(most) for same in self._same.values())

    def _enter(self, seen: _Seen) -> None:
        self._window.append(seen)
        self._change(seen, 1)

    def _leave(self, seen: _Seen) -> None:
        self._change(seen, -1)

    def _change(self, seen: _Seen, by: int) -> None:
        identity = seen.response.identity
        same = self._same.get(identity, _Same(0, 0))
        changed = _Same(same.times + by, same.bad + by * bool(seen.reasons))
        most = self._most_identical
        self._degenerate += changed.degenerate(most) - same.degenerate(most)
        if changed.times:
            self._same[identity] = changed
        else:
            del self._same[identity]

    def _reasons(self, seen: _Seen) -> tuple[str, ...]:
        identical = self._same[seen.response.identity].times > self._most_identical
        return (*seen.reasons, IDENTICAL) if identical else seen.reasons

    def _alarm(self, running: int) -> Alarm:
        found = [(seen.response, self._reasons(seen)) for seen in self._window]
        bad = [(response, reasons) for response, reasons in found if reasons]
        counts: dict[str, int] = {}
        for reason in (reason for _, reasons in bad for reason in reasons):
            counts[reason] = counts.get(reason, 0) + 1
        return Alarm(
            finished=self.finished,
            looked_at=len(self._window) + running,
            running=running,
            degenerate=self._degenerate,
            max_share=self._config.max_share,
            reasons=dict(sorted(counts.items(), key=lambda item: -item[1])),
            examples=tuple(_example(*one) for one in bad[-EXAMPLES:]),
        )


class _Same(NamedTuple):
    """Responses of the window that are equal."""

    times: int
    bad: int
    """Of those, for a reason of their own."""

    def degenerate(self, max_identical: int) -> int:
        return self.times if self.times > max_identical else self.bad


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
