"""Watching a running service: its statistics as lines in a file and as a live view."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from draftfeed_deploy.records import Snapshot

INTERVAL_SECONDS = 0.5


class View(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...


class JsonLines:
    """An append-only file of JSON objects, one a line, each flushed when written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, value: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")

    def close(self) -> None:
        self._file.close()


class Monitor:
    """Takes a snapshot twice a second while it is entered, and a last one when it is left."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], log: JsonLines | None, views: Sequence[View]
    ) -> None:
        self._snapshot, self._log, self._views = snapshot, log, views
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
        for view in self._views:
            view.show(snapshot)
