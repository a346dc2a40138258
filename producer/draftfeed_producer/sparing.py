"""Warnings that a peer can cause as often as it likes."""

import logging
import threading
import time

WARN_SECONDS = 10.0


class Sparing:
    """One line in ten seconds, with the number of those in between. Any thread may use it."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._warned_at, self._unsaid = float("-inf"), 0

    def warn(self, words: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._warned_at < WARN_SECONDS:
                self._unsaid += 1
                return
            more = f" ({self._unsaid} more like it since the last time)" if self._unsaid else ""
            self._warned_at, self._unsaid = now, 0
        self._logger.warning("%s%s", words, more)
