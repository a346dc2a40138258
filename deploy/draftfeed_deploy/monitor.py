"""Watching a running service: its statistics as lines in a file and as a live view."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from draftfeed_deploy.records import Snapshot

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.5


class View(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...


class JsonLines:
    """An append-only file of JSON objects, one a line, each flushed when written.

    A full disk costs the lines that do not fit, and says so once: a record of a run must not end
    the run.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("ab", buffering=0)
        self._left_out = 0

    def write(self, value: msgspec.Struct) -> None:
        try:
            self._append(msgspec.json.encode(value) + b"\n")
        except OSError as error:
            if not self._left_out:
                logger.error("lines are left out of %s: %s", self._path, error.strerror)
            self._left_out += 1
            return
        if self._left_out:
            logger.warning("%s lacks %d lines, and goes on", self._path, self._left_out)
            self._left_out = 0

    def _append(self, line: bytes) -> None:
        """All of it, or nothing. Raises OSError."""
        written = self._file.write(line)
        if written < len(line):
            self._file.truncate(self._file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


class Monitor:
    """Takes a snapshot twice a second while it is entered, and a last one when it is left."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], log: JsonLines | None, views: Sequence[View]
    ) -> None:
        self._snapshot, self._log, self._views = snapshot, log, list(views)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> "Monitor":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._take()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_SECONDS):
            self._take()

    def _take(self) -> None:
        snapshot = self._snapshot()
        if self._log is not None:
            self._log.write(snapshot)
        for view in list(self._views):
            try:
                view.show(snapshot)
            except OSError as error:  # a terminal that is gone
                logger.warning("progress is shown there no more: %s", error.strerror)
                self._views.remove(view)
