"""What the CPU time of draftfeed's two ends goes into.

Functions of ours are replaced by ones that look at their thread's clock before and after. A stage
does not contain the stages that it calls; ZeroMQ's own threads are the sockets. What is left of the
process's time is the control plane: Python between the stages, messages, locks.
"""

import functools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from draftfeed_consumer.local import FrameAt
from draftfeed_producer.spool import Spool, entries
from draftfeed_producer.spool.samples import Samples
from draftfeed_producer.spool.segments import Segment
from draftfeed_proto import chunk
from transport_check import Check
from transport_orders import Talk

SOCKET = {"producer": "socket send", "consumer": "socket receive"}
CONTROL = "control"
_PLACES: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "producer": (
        ("encode", chunk, "encode_states"),
        ("encode", chunk, "lay_rows"),
        ("checksum", chunk, "_checksum"),
        ("spool write", entries, "write"),
        ("spool write", Segment, "reserve"),
        ("spool write", Segment, "seal"),
        ("free", Samples, "discard"),
        ("sync", os, "fdatasync"),
        ("sync", os, "fsync"),
        ("spool read", Spool, "read_chunk"),
        ("socket send", zmq.Socket, "send_multipart"),
    ),
    "consumer": (
        ("socket receive", zmq.Socket, "recv_multipart"),
        ("checksum", chunk, "_checksum"),
        ("decode", chunk, "decode_states"),
        ("decode", chunk, "decode_placed"),
        ("file read", FrameAt, "read"),
        ("check", Check, "_add"),
    ),
}
"""Stage, and the function that it is. On the same host the checksum is taken between the pieces of
a read, and counts as decoding."""


class _Clock(threading.local):
    """How much of the stage under way belongs to those that it called."""

    inner = 0.0


_clock = _Clock()
_adding = threading.Lock()
_seconds: dict[str, float] = defaultdict(float)


def install(role: str, talk: Talk) -> Callable[[str], None]:
    """Returns what listens to the words of a measurement: it tells the stages at each `end`."""
    for stage, holder, name in _PLACES[role]:
        setattr(holder, name, timed(stage, getattr(holder, name)))
    before: dict[str, float] = {}

    def on_word(word: str) -> None:
        nonlocal before
        now = _now(role)
        if word == "end":
            talk.tell("stages", seconds={stage: now[stage] - before.get(stage, 0) for stage in now})
        before = now

    return on_word


def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        outer, _clock.inner = _clock.inner, 0.0
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent = time.thread_time() - began
            with _adding:
                _seconds[stage] += spent - _clock.inner
            _clock.inner = outer + spent

    return wrapped


def _now(role: str) -> dict[str, float]:
    """CPU seconds of each stage so far."""
    with _adding:
        stages = dict(_seconds)
    for stage, _, _ in _PLACES[role]:
        stages.setdefault(stage, 0.0)
    stages[SOCKET[role]] += _sockets()
    return {**stages, CONTROL: time.process_time() - sum(stages.values())}


def _sockets() -> float:
    """Of ZeroMQ's own threads."""
    found = 0.0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("ZMQbg"):
            found += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found
