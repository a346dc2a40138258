"""A forecast in a sentence."""

import math
from datetime import datetime

from draftfeed_deploy.forecast import Forecast, Outlook, TooEarly
from draftfeed_deploy.plan_units import show

DATED_SECONDS = 12 * 3600
"""What is farther away is told with its day."""


def outlook_words(outlook: Outlook, now: float) -> str:
    """now: Unix time of the last reading. Moments are in local time."""
    match outlook:
        case TooEarly(why):
            return f"too early to say when it ends: {why}"
        case Forecast(left=0):
            return "every prompt is generated"
        case Forecast() as found:
            seconds = show(found.seconds, "seconds")
            middle, earliest, latest = (
                _moment(found, now + at) for at in (found.seconds, found.earliest, found.latest)
            )
            return (
                f"{_standing(found)}generated in {seconds}, at {middle}; {_range(earliest, latest)}"
            )


def _range(earliest: str | None, latest: str | None) -> str:
    return f"between {earliest} and {latest}" if latest else f"not before {earliest}"


def _standing(found: Forecast) -> str:
    if found.recent_rows_per_second > 0:
        return ""
    window = show(found.window_seconds, "seconds")
    return f"nothing was made in the last {window}; at the rate before: "


def _moment(found: Forecast, seconds: float) -> str | None:
    far = not math.isfinite(found.latest) or found.latest > DATED_SECONDS
    try:
        moment = datetime.fromtimestamp(seconds)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.strftime("%Y-%m-%d %H:%M" if far else "%H:%M:%S")
