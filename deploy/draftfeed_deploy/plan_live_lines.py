"""What running producers say of a plan, as text and for programs."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from draftfeed_deploy.forecast import Forecast, Outlook, TooEarly
from draftfeed_deploy.plan_live import Deviation, Running, Seen, outlook_of
from draftfeed_deploy.plan_units import plain, show

STANDING = "nothing was made in the last {}; at the rate before that, "


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


def outlook_words(outlook: Outlook, now: float) -> str:
    """now: Unix time of the last reading."""
    match outlook:
        case TooEarly(why):
            return f"too early to say when it ends: {why}"
        case Forecast(left=0):
            return "every prompt is generated"
        case Forecast() as found:
            earliest, latest = (_moment(found, now + at) for at in (found.earliest, found.latest))
            standing = ""
            if found.recent_rows_per_second == 0:
                standing = STANDING.format(show(found.window_seconds, "seconds"))
            return (
                f"{standing}generated in {show(found.seconds, 'seconds')}, at "
                f"{_moment(found, now + found.seconds)}; between {earliest} and {latest}"
            )


def _moment(found: Forecast, seconds: float) -> str:
    """Local time; with the day when it takes that long."""
    far = not math.isfinite(found.latest) or found.latest > 12 * 3600
    try:
        moment = datetime.fromtimestamp(seconds)
    except (OverflowError, ValueError, OSError):
        return "no time that can be told"
    return moment.strftime("%Y-%m-%d %H:%M" if far else "%H:%M:%S")


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
