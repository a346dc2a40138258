"""What running producers say of a plan, as text and for programs."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from draftfeed_deploy.forecast import Forecast, Outlook, TooEarly
from draftfeed_deploy.forecast_words import outlook_words
from draftfeed_deploy.plan_live import Deviation, Running, Seen, outlook_of
from draftfeed_deploy.plan_units import plain, show


def running_lines(running: Sequence[Running]) -> Iterator[str]:
    """running: at least one."""
    seconds = max(one.last.seconds - one.first.seconds for one in running)
    many = f"{len(running)} producers" if len(running) > 1 else "1 producer"
    yield f"{many}, asked twice within {show(seconds, 'seconds')}"
    width = max(len(one.url) for one in running)
    for one in running:
        yield f"  {one.url:<{width}}  {_state(one)}"
    yield f"  {outlook_words(outlook_of(running), time.time())}"


def _state(one: Running) -> str:
    now = one.now
    what = ", ".join(filter(None, [one.model, one.phase])) or "starting"
    made = f"{what}, {now.done:,} of {now.prompts:,} prompts"
    match one.outlook:
        case TooEarly(why):
            return f"{made}; too early: {why}"
        case Forecast(left=0):
            return made
        case Forecast() as found:
            return (
                f"{made}; {found.rows_per_second:,.0f} rows/s so far, "
                f"{found.recent_rows_per_second:,.0f} in the last "
                f"{show(found.window_seconds, 'seconds')}"
            )


def deviation_lines(rows: Iterable[Deviation]) -> Iterator[str]:
    yield f"{'how far the assumptions were off':<34}{'assumed':>12}{'measured':>13}   factor"
    for row in rows:
        shown = [_figure(value, row) for value in (row.assumed, row.measured)]
        line = f"  {row.key:<32}{shown[0]:>12} {shown[1]:>12}{row.factor:>9.2f}"
        yield f"{line}  {row.note}".rstrip()


def _figure(value: float, row: Deviation) -> str:
    return plain(float(f"{value:.4g}")) if row.unit == "number" else show(value, row.unit)


def as_json(
    running: Sequence[Running], found: Seen | None, rows: Sequence[Deviation]
) -> dict[str, Any]:
    """Seconds from now; an end that cannot be told is null."""
    outlook = outlook_of(running)
    return {
        "producers": [
            {"url": one.url, "model": one.model, "phase": one.phase, **_outlook_json(one.outlook)}
            for one in running
        ],
        **_outlook_json(outlook),
        "measured": found,
        "deviations": [
            {
                "key": row.key,
                "unit": row.unit,
                "assumed": row.assumed,
                "measured": row.measured,
                "factor": row.factor,
                "note": row.note,
            }
            for row in rows
        ],
    }


def _outlook_json(outlook: Outlook) -> dict[str, Any]:
    match outlook:
        case TooEarly(why):
            return {"forecast": None, "too_early": why}
        case Forecast() as found:
            return {"forecast": found._asdict(), "too_early": ""}
