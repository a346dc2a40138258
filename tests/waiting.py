"""Waiting for something another thread or process does, with a bound."""

import threading
import time
from collections.abc import Callable

_POLL_SECONDS = 0.02


def eventually(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Returns when the condition holds. Raises AssertionError after the time."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        pause.wait(_POLL_SECONDS)
