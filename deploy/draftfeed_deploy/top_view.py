"""The picture of `draftfeed top`: lines of text from what services say of themselves."""

import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from rich.cells import set_cell_size
from rich.text import Text

from draftfeed_deploy.board import Document, Outcome
from draftfeed_deploy.drift import drifting
from draftfeed_deploy.forecast import Forecast, Outlook, TooEarly, together
from draftfeed_deploy.forecast_words import outlook_words
from draftfeed_deploy.plan_units import show
from draftfeed_deploy.progress import here
from draftfeed_deploy.records import ConsumerSnapshot
from draftfeed_deploy.status import STALE_SECONDS
from draftfeed_deploy.top_watch import Service, totals

LEAST_WIDTH = 60
"""On a narrower terminal the right end is out of sight: wrapped, nothing could be read."""
GRAPH_ROWS = 3
HEADS = 20
"""Columns beside a graph."""
RATE_INTERVALS = 5
"""A rate that is shown as a number is a mean of so many."""
DRIFT_INTERVALS = 30
STALLED_SHARE = 0.05
LOG_SHOWN = 4
WRAPPED = 6
"""Lines that one message may take."""
DRIFTS_SHOWN, MEMBERS_SHOWN = 8, 64
LONGEST = 1000
"""Characters of one text that are looked at, however much a service says."""
BARS = " ▁▂▃▄▅▆▇█"
HEAD, DIM, BAD, WARNING = "bold", "grey62", "bold red", "yellow"
LOGICAL, WIRE, TOKENS = "bright_blue", "green", "cyan"
NAME, STATE = 20, 11
CELLS = (16, 9, 10, 7, 7)
PRODUCER = ("made", "tokens/s", "wire/s", "spool", "leased")
CONSUMER = ("trained", "tokens/s", "wire/s", "buffer", "held")


def picture(services: Sequence[Service], width: int, now: float) -> list[Text]:
    """now: Unix time. No line is wider than `width` cells, or LEAST_WIDTH if that is more."""
    width = max(width, LEAST_WIDTH)
    return [line for part in _parts(services, width, now) for line in part]


def _parts(services: Sequence[Service], width: int, now: float) -> Iterator[Iterable[Text]]:
    yield [_title(services, width, now)]
    if not services:
        yield [Text("no service answers yet; looking for one every few seconds", WARNING)]
        return
    here = [one.document for one in services if one.document and one.gone_since is None]
    yield _forecast_lines(services, width, now)
    yield _graphs(here, width)
    yield _table(services, "producer", PRODUCER, _producer, width, now)
    yield _strangers(services, width, now)
    yield _table(services, "consumer", CONSUMER, _consumer, width, now)
    yield _waiting(services, width)
    yield _drifts(services, width)
    yield _alarms(services, width)
    yield _log(services, width)


def _title(services: Sequence[Service], width: int, now: float) -> Text:
    counts = [
        f"{count} {name}{'s' * (count != 1)}"
        for name in ("producer", "consumer")
        if (count := sum(_kind(one) == name for one in services))
    ]
    gone = sum(one.gone_since is not None for one in services)
    words = ", ".join([*counts, *([f"{gone} gone"] if gone else [])])
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    return Text(_fit(f"draftfeed top   {words}", width - 10) + f"  {clock}", HEAD)


def _kind(service: Service) -> str:
    return service.document.service if service.document else ""


def _forecast_lines(services: Sequence[Service], width: int, now: float) -> Iterator[Text]:
    """One for each stream: producers of another run end when they do."""
    producers = [one for one in services if one.document and one.document.producer]
    streams = sorted({_stream(one) for one in producers})
    for stream in streams:
        run = [one for one in producers if _stream(one) == stream]
        here = [one.document for one in run if one.gone_since is None and one.document]
        if here:
            words = outlook_words(together(map(outlook_of, here)), now)
            gone = len(run) - len(here)
            without = f" (of those that answer: {gone} gone)" if gone else ""
            which = f"{stream or 'no stream yet'}: " if len(streams) > 1 else ""
            yield from _wrapped(which + words + without, width, "")


def _stream(one: Service) -> str:
    """Its model and the beginning of its id; empty before it is known."""
    document = one.document
    if document is None or not document.stream_id:
        return ""
    return f"{document.model} {document.stream_id[:8]}"


def outlook_of(document: Document) -> Outlook:
    match document.forecast:
        case Outcome() as found:
            latest = float("inf") if found.latest is None else found.latest
            return Forecast(
                found.left,
                found.seconds,
                found.earliest,
                latest,
                found.rows_per_second,
                found.recent_rows_per_second,
                found.window_seconds,
            )
    return TooEarly(document.too_early or "it has only just begun")


def _graphs(documents: Sequence[Document], width: int) -> Iterator[Text]:
    summed = totals(documents)
    yield from _graph("states", summed.logical_bytes, _bytes, GRAPH_ROWS, width, LOGICAL)
    yield from _graph("wire", summed.wire_bytes, _bytes, GRAPH_ROWS, width, WIRE)
    yield from _graph("tokens", summed.tokens, _count, 1, width, TOKENS)
    seconds = len(summed.logical_bytes) * summed.interval_seconds
    yield Text(f"the last {_seconds(seconds)}".rjust(width), DIM)


def _graph(
    label: str,
    values: Sequence[float],
    words: Callable[[float], str],
    rows: int,
    width: int,
    style: str,
) -> Iterator[Text]:
    """With its rate now beside the lowest line, and the largest beside the highest."""
    heads = [" " * HEADS] * rows
    heads[0] = f"{'most':<7}{words(max(values, default=0.0)) + '/s':>11}".ljust(HEADS)
    heads[-1] = f"{label:<7}{words(_recent(values)) + '/s':>11}".ljust(HEADS)
    for head, line in zip(heads, graph(values, width - HEADS, rows), strict=True):
        yield Text.assemble((head, DIM if head.startswith("most") else style), (line, style))


def graph(values: Sequence[float], width: int, rows: int) -> list[str]:
    """Bars from zero to the largest, the newest at the right: one for each value, or, where those
    are more than columns, for the mean of what falls into it."""
    columns = _columns(values, width)
    top = max(columns, default=0.0) or 1.0
    eighths = [round(value / top * rows * 8) for value in columns]
    lines = []
    for row in range(rows - 1, -1, -1):
        lines.append("".join(BARS[min(8, max(0, one - 8 * row))] for one in eighths).rjust(width))
    return lines


def _columns(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]


class Seen(NamedTuple):
    """What is shown of a service: a row of a table, and a line below it."""

    state: str
    figures: tuple[str, ...]
    words: str
    style: str


def _table(
    services: Sequence[Service],
    kind: str,
    heads: tuple[str, ...],
    look: Callable[[Document], Seen | None],
    width: int,
    now: float,
) -> Iterator[Text]:
    found = [(one, one.document) for one in services if one.document and _kind(one) == kind]
    if found:
        yield _row(width, HEAD, kind, "", *heads)
    for one, document in found:
        if (seen := look(document)) is None:
            continue
        yield _row(width, _style(one), one.name, _state(one, seen.state), *seen.figures)
        if one.gone_since is not None:
            yield from _gone(one, width, now)
            continue
        yield from _unwell(document, width)
        yield Text(_fit(seen.words, width), seen.style)


def _producer(document: Document) -> Seen | None:
    state = document.producer
    if state is None:
        return None
    figures = (
        f"{state.made:,}/{state.prompts:,}",
        f"{_recent(document.rates.tokens):,.0f}",
        _bytes(_recent(document.rates.wire_bytes)),
        _share(state.spool_bytes, state.spool_quota_bytes),
        f"{state.leased:,}",
    )
    names = " ".join(state.members[:MEMBERS_SHOWN])
    members = f"members {names}" if state.members else "no members"
    members += here(len(state.same_host), len(state.members))
    words = f"  term {state.term}, commit {_seconds(state.commit_age_seconds)} ago, {members}"
    return Seen(document.state, figures, words, DIM if state.members else WARNING)


def _consumer(document: Document) -> Seen | None:
    state = document.consumer
    if state is None:
        return None
    figures = (
        f"{state.trained:,}",
        f"{_recent(document.rates.tokens):,.0f}",
        _bytes(_recent(document.rates.wire_bytes)),
        _share(state.buffer_bytes, state.buffer_capacity_bytes),
        f"{state.held:,}",
    )
    away = [f"{name} {link}" for name, link in state.producers.items() if link not in LINKED]
    words = f"  term {state.term}, step {state.step:,}{_loss(state)}, "
    words += f"{state.uncommitted:,} uncommitted"
    words += here(len(state.same_host), len(state.producers))
    words += f"; {', '.join(away)}" if away else ""
    style = BAD if state.loss_lost else WARNING if away else DIM
    return Seen(_attached(state), figures, words, style)


def _loss(state: ConsumerSnapshot) -> str:
    if state.loss_lost:
        return ", loss is no number"
    if state.loss is None:
        return ""
    return f", loss {state.loss:.3f}" if abs(state.loss) < 1e6 else f", loss {state.loss:.2e}"


def _attached(state: ConsumerSnapshot) -> str:
    return "draining" if state.draining else "attached" if state.attached else "waiting"


LINKED = ("granted", "open", "done")


def _strangers(services: Sequence[Service], width: int, now: float) -> Iterator[Text]:
    """Those that start, and those that have never answered."""
    for one in services:
        if _kind(one) in ("producer", "consumer"):
            continue
        if one.document is not None and one.gone_since is None:
            yield Text(_fit(f"{one.name}  {one.document.state}", width), DIM)
        else:
            yield from _gone(one, width, now)


def _gone(one: Service, width: int, now: float) -> list[Text]:
    ago = _seconds(max(0.0, now - (one.gone_since or now)))
    name = "  gone" if one.document is not None else f"{one.name}  gone"
    return _wrapped(f"{name} for {ago}: {one.why}", width, BAD)


def _unwell(document: Document, width: int) -> list[Text]:
    """A loop that hangs, figures that are old."""
    if document.healthy and document.age_seconds <= STALE_SECONDS:
        return []
    return _wrapped(f"  {document.state}", width, BAD)


def _style(one: Service) -> str:
    if one.gone_since is not None or one.document is None:
        return DIM
    return "" if one.document.ready else BAD if not one.document.healthy else WARNING


def _state(one: Service, state: str) -> str:
    return "gone" if one.gone_since is not None else state


def _waiting(services: Sequence[Service], width: int) -> Iterator[Text]:
    """Causes of the last minute, the worst first."""
    found = [
        (share, f"{one.name} {cause.replace('_', ' ')} {share:.0%}")
        for one in services
        if one.document and one.gone_since is None
        for cause, share in one.document.stalls.items()
        if share >= STALLED_SHARE
    ]
    if found:
        words = ", ".join(text for _, text in sorted(found, reverse=True))
        yield from _wrapped(f"waiting  {words}", width, WARNING if max(found)[0] > 0.5 else "")


def _drifts(services: Sequence[Service], width: int) -> Iterator[Text]:
    found = [
        f"member {drift.name} gets {drift.share:.0%} of the others, says {one.name}"
        for one in services
        if one.document and one.gone_since is None
        for drift in one.document.drifting
    ]
    for _, ranks in groupby(sorted(_trainers(services)), key=lambda rank: rank[0]):
        trained = {name: rate for _, name, rate in ranks}
        found += [f"{one.name} trains {one.share:.0%} of the others" for one in drifting(trained)]
    for words in found[:DRIFTS_SHOWN]:
        yield from _wrapped(f"drift    {words}", width, WARNING)


def _trainers(services: Sequence[Service]) -> Iterator[tuple[str, str, float]]:
    """(run, name, samples a second): consumers of the same producers and term are ranks of one."""
    for one in services:
        if one.document and one.document.consumer and one.gone_since is None:
            state, rates = one.document.consumer, one.document.rates.samples
            if len(rates) >= DRIFT_INTERVALS:
                run = f"{state.term} {sorted(state.producers)}"
                yield run, one.name, _recent(rates, DRIFT_INTERVALS)


def _alarms(services: Sequence[Service], width: int) -> Iterator[Text]:
    for one in services:
        if one.document and one.document.producer and one.gone_since is None:
            state = one.document.producer
            if state.alarm:
                yield from _wrapped(f"alarm    {one.name}: {state.alarm}", width, BAD)
            if bad := sum(state.nonfinite or []):
                yield Text(_fit(f"alarm    {one.name}: {bad:,} values are no numbers", width), BAD)
            if zeros := sum(state.zero_rows or []):
                yield Text(_fit(f"alarm    {one.name}: {zeros:,} rows of zeros", width), BAD)


def _log(services: Sequence[Service], width: int) -> Iterator[Text]:
    """Of all services, the newest first."""
    lines = [
        (line.time_seconds, line.level, f"{one.name}: {line.words}")
        for one in services
        if one.document
        for line in one.document.log
    ]
    for seconds, level, words in sorted(lines, reverse=True)[:LOG_SHOWN]:
        clock = time.strftime("%H:%M:%S", time.localtime(seconds))
        yield from _wrapped(f"{clock} {words}", width, WARNING if level == "warning" else BAD)


def _wrapped(words: str, width: int, style: str) -> list[Text]:
    lines = textwrap.wrap(
        _clean(words),
        width,
        subsequent_indent=" " * 9,
        max_lines=WRAPPED,
        placeholder=" ...",
        break_on_hyphens=False,
    )
    return [Text(_fit(line, width), style) for line in lines]


def _row(width: int, style: str, *cells: str) -> Text:
    name, state, *figures = cells
    room = max(0, width - NAME - STATE - sum(CELLS))
    left = _fit(name, NAME - 1 + room) + " " + _fit(state, STATE - 1) + " "
    right = "".join(_clean(cell).rjust(size) for cell, size in zip(figures, CELLS, strict=True))
    return Text(_fit(left + right, width), style)


def _recent(values: Sequence[float], count: int = RATE_INTERVALS) -> float:
    some = values[-count:]
    return sum(some) / len(some) if some else 0.0


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _count(value: float) -> str:
    return f"{value:,.0f} "


def _bytes(value: float) -> str:
    return show(value, "bytes")


def _seconds(value: float) -> str:
    return show(value, "seconds") if value >= 60 else f"{value:.0f} s"


def _clean(text: str) -> str:
    """What comes from elsewhere must not move the cursor."""
    return "".join(one if one.isprintable() else " " for one in text[:LONGEST])


def _fit(text: str, width: int) -> str:
    return set_cell_size(_clean(text), width)
