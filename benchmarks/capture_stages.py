"""In the scheduler of capture.py's timed arm: how long each stage of the capture takes.

Functions of ours are replaced by ones that look at the clock before and after. A stage's time
contains that of the stages it calls, and the clock's own, half a microsecond or so each.
"""

import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from draftfeed_producer.engines.sglang import plugin, tap
from draftfeed_producer.tap.ring import StagingRing

STEP = "step"
_WRITE_EVERY = 20
"""Passes. The process is killed when it is done with, so figures cannot wait for its end."""
_PLACES: tuple[tuple[str, Any, str], ...] = (
    ("hook", plugin, "_after_sample"),
    ("row map", plugin, "_rows_of"),
    ("reserve", tap.RequestTap, "_reserve"),
    ("gather", tap, "gather_packed"),
    ("copy", tap.RequestTap, "copy_pass"),
    ("ring submit", StagingRing, "submit"),
    ("hand over", plugin._Capture, "hand_over"),
    ("announce", tap.RequestTap, "_announce"),
)
"""Stage, and the function that it is."""

_nanoseconds: dict[str, list[int]] = defaultdict(list)


def install(path: str) -> None:
    """Before the plugin is loaded."""
    for stage, holder, name in _PLACES:
        setattr(holder, name, _timed(stage, getattr(holder, name)))
    plugin._after_sample = _counting_steps(plugin._after_sample, Path(path))


def _timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    taken = _nanoseconds[stage]

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            taken.append(time.perf_counter_ns() - start)

    return timed


def _counting_steps(hook: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """A step lasts from one hook to the next; `path` is written now and then, in between."""
    last = time.perf_counter_ns()

    @functools.wraps(hook)
    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        now = time.perf_counter_ns()
        steps = _nanoseconds[STEP]
        steps.append(now - last)
        result = hook(*args, **kwargs)
        if len(steps) % _WRITE_EVERY == 0:
            _write(path)
            now = time.perf_counter_ns()
        last = now
        return result

    return counting


def _write(path: Path) -> None:
    figures = {
        stage: {"calls": len(taken), "median_us": round(median(taken) / 1000, 1)}
        for stage, taken in _nanoseconds.items()
        if taken
    }
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(figures))
    os.replace(whole, path)
