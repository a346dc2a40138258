"""What `/status.json` says of a service: its state, its last ten minutes, what it warned of.

The status page and `draftfeed top` show this document. Readers ignore fields that they do not know,
and find a default where one is missing.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from draftfeed_deploy.drift import Drift, drifting
from draftfeed_deploy.forecast import Forecast, Outlook, Reading, TooEarly, forecast
from draftfeed_deploy.lengths import deviation
from draftfeed_deploy.metrics import Identity, in_utf8
from draftfeed_deploy.records import ConsumerSnapshot, Count, ProducerSnapshot, Seconds, Snapshot

INTERVAL_SECONDS = 2.0
KEPT = 300
"""Intervals: ten minutes."""
DRIFT_INTERVALS = 30
LOG_LINES = 20
LOG_CHARACTERS = 1000
MOST_NAMES = 64
"""Of members whose bytes are kept."""


Rate = Annotated[float, Meta(ge=0, le=1e18)]
Share = Annotated[float, Meta(ge=0, le=1)]
Moments = Annotated[float, Meta(ge=0, le=1e11)]
"""Unix time. Bounds are for readers: what is shown must be a figure that can be shown."""


class LogLine(Struct, frozen=True, kw_only=True):
    time_seconds: Moments = 0.0
    level: str = ""
    words: str = ""


class Outcome(Struct, frozen=True, kw_only=True):
    """A Forecast, with null for an end that cannot be told."""

    left: Count = 0
    seconds: Seconds = 0.0
    earliest: Seconds = 0.0
    latest: Seconds | None = None
    rows_per_second: Rate = 0.0
    recent_rows_per_second: Rate = 0.0
    window_seconds: Seconds = 0.0


class Rates(Struct, frozen=True, kw_only=True):
    """Per second, one for each interval, the newest last."""

    interval_seconds: Seconds = INTERVAL_SECONDS
    logical_bytes: list[Rate] = []
    wire_bytes: list[Rate] = []
    tokens: list[Rate] = []
    """Rows, which a producer captures and a consumer receives."""
    samples: list[Rate] = []
    """Finished by a producer, trained by a consumer."""


class Document(Struct, frozen=True, kw_only=True):
    service: str = ""
    """producer, consumer, or nothing while it starts."""
    version: str = ""
    model: str = ""
    stream_id: str = ""
    layer_ids: list[int] = []
    time_seconds: Moments = 0.0
    age_seconds: Seconds = 0.0
    """Of the figures: more than a few say that nobody looks at the service any more."""
    healthy: bool = True
    ready: bool = False
    state: str = "starting"
    """What its probes say."""
    producer: ProducerSnapshot | None = None
    consumer: ConsumerSnapshot | None = None
    rates: Rates = Rates()
    stalls: dict[str, Share] = {}
    """Share of the last minute that was lost, by cause."""
    drifting: list[Drift] = []
    forecast: Outcome | None = None
    too_early: str = ""
    """Why there is no forecast."""
    log: list[LogLine] = []


class RecentLog(logging.Handler):
    """The last warnings and errors of the process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[LogLine] = deque(maxlen=LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            words = record.getMessage()
        except (TypeError, ValueError):  # a message whose arguments do not fit it
            words = str(record.msg)
        self._lines.append(
            LogLine(
                time_seconds=round(record.created, 3),
                level=record.levelname.lower(),
                words=words[:LOG_CHARACTERS],
            )
        )

    def lines(self) -> list[LogLine]:
        """The newest first."""
        return list(self._lines.copy())[::-1]


class Moment(NamedTuple):
    """Counters at the end of an interval."""

    seconds: float
    logical_bytes: float
    wire_bytes: float
    tokens: float
    samples: float
    stalls: Mapping[str, float]
    by_member: Mapping[str, float]
    reading: Reading | None
    """Of a producer."""


class Board:
    """Sees the service's snapshots, from one thread; is asked by others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Snapshot | None = None
        self._shown_at = 0.0
        self._past: deque[Moment] = deque(maxlen=KEPT + 1)

    def show(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._last, self._shown_at = snapshot, time.monotonic()
            due = self._past[-1].seconds + INTERVAL_SECONDS if self._past else 0.0
            if snapshot.time_seconds >= due:
                self._past.append(moment(snapshot))

    def document(self, identity: Identity, log: Sequence[LogLine]) -> Document:
        """Without what its probes say."""
        with self._lock:
            last, shown_at, past = self._last, self._shown_at, list(self._past)
        if last is None:
            return Document(time_seconds=time.time(), log=list(log), version=identity.version)
        stream, recent = identity.descriptor, past[-DRIFT_INTERVALS - 1 :]
        outlook = _outlook(last, past)
        return Document(
            service="producer" if isinstance(last, ProducerSnapshot) else "consumer",
            version=identity.version,
            model=stream.model if stream else "",
            stream_id=stream.stream_id() if stream else "",
            layer_ids=list(stream.layer_ids) if stream else [],
            time_seconds=time.time(),
            age_seconds=round(time.monotonic() - shown_at, 3),
            producer=last if isinstance(last, ProducerSnapshot) else None,
            consumer=last if isinstance(last, ConsumerSnapshot) else None,
            rates=rates(past),
            stalls=_stalls(recent),
            drifting=_drifting(last, recent),
            forecast=_outcome(outlook) if isinstance(outlook, Forecast) else None,
            too_early=outlook.why if isinstance(outlook, TooEarly) else "",
            log=list(log),
        )


def moment(now: Snapshot) -> Moment:
    match now:
        case ProducerSnapshot():
            tokens, samples, by_member = now.captured, now.samples, _first(now.sent_bytes)
        case ConsumerSnapshot():
            tokens, samples, by_member = now.tokens, now.trained, {}
    return Moment(
        seconds=now.time_seconds,
        logical_bytes=now.logical_bytes,
        wire_bytes=now.wire_bytes,
        tokens=tokens,
        samples=samples,
        stalls=now.stall_seconds,
        by_member=by_member,
        reading=reading(now) if isinstance(now, ProducerSnapshot) else None,
    )


def _first(values: Mapping[str, float]) -> dict[str, float]:
    return dict(list(values.items())[-MOST_NAMES:])


def reading(now: ProducerSnapshot) -> Reading:
    tokens = now.response_tokens / now.samples if now.samples else 0.0
    return Reading(
        seconds=now.time_seconds,
        prompts=now.prompts,
        done=now.made,
        samples=now.samples,
        rows=now.tokens,
        captured=now.captured,
        generating_seconds=now.generating_seconds,
        deviation_tokens=deviation(now.response_lengths, tokens),
        replayed=now.replayed,
    )


def rates(past: Sequence[Moment]) -> Rates:
    """One less than there are moments; a counter that fell is another process'."""

    def of(name: str) -> list[float]:
        return [
            round(max(0.0, getattr(after, name) - getattr(before, name)) / seconds, 1)
            for before, after in pairwise(past)
            if (seconds := after.seconds - before.seconds) > 0
        ]

    return Rates(
        logical_bytes=of("logical_bytes"),
        wire_bytes=of("wire_bytes"),
        tokens=of("tokens"),
        samples=of("samples"),
    )


def _stalls(past: Sequence[Moment]) -> dict[str, float]:
    """Share of the time, by cause; two clocks' readings may add up to a little more than all."""
    if len(past) < 2 or past[-1].seconds <= past[0].seconds:
        return {}
    seconds = past[-1].seconds - past[0].seconds
    return {
        cause: min(1.0, max(0.0, now - past[0].stalls.get(cause, 0.0)) / seconds)
        for cause, now in past[-1].stalls.items()
    }


def _drifting(last: Snapshot, past: Sequence[Moment]) -> list[Drift]:
    """Of the members that are there all the time."""
    if not isinstance(last, ProducerSnapshot) or len(past) < 2:
        return []
    before, after = past[0].by_member, past[-1].by_member
    there = [name for name in last.members if name in before and name in after]
    got = {name: after[name] - before[name] for name in there}
    return drifting(got)


def _outlook(last: Snapshot, past: Sequence[Moment]) -> Outlook | None:
    if not isinstance(last, ProducerSnapshot):
        return None
    readings = [one.reading for one in past if one.reading is not None]
    return forecast([*readings, reading(last)])


def _outcome(found: Forecast) -> Outcome:
    return Outcome(**found._asdict())


def encoded(document: Document) -> bytes:
    """JSON; numbers that are none or infinite are null, bytes that are no text are spelt out."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_in_utf8(msgspec.to_builtins(document)))


def _in_utf8(value: Any) -> Any:
    match value:
        case str():
            return in_utf8(value)
        case list():
            return [_in_utf8(one) for one in value]
        case dict():
            return {_in_utf8(key): _in_utf8(one) for key, one in value.items()}
    return value


def decoded(text: bytes) -> Document:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Document)
