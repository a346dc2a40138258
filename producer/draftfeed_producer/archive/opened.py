"""Files of an archive that are held open: a sample is asked for chunk by chunk."""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from draftfeed_producer.archive.sealed import INDEX, SEGMENT
from draftfeed_producer.errors import ArchiveGone

OPEN_SEGMENTS = 128
"""Two files each."""


class Opened(NamedTuple):
    index_fd: int
    """-1 where there is no index, but what was found in the segment."""
    segment_fd: int
    path: Path
    """Without the ending."""

    def close(self) -> None:
        for fd in (self.index_fd, self.segment_fd):
            if fd >= 0:
                os.close(fd)


class OpenSegments:
    """The segments used last. Any thread may ask; one that uses descriptors must be the only one
    that does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: OrderedDict[int, Opened] = OrderedDict()

    def get(self, number: int, paths: Iterable[Path], *, indexed: bool) -> Opened:
        """paths: where segment `number` lies, without the ending; the first that can be opened is.
        Raises ArchiveGone when none can."""
        with self._lock:
            if number in self._opened:
                self._opened.move_to_end(number)
                return self._opened[number]
        opened = _first(paths, indexed=indexed)
        with self._lock:
            if number in self._opened:  # another thread was faster
                opened.close()
                return self._opened[number]
            self._opened[number] = opened
            if len(self._opened) > OPEN_SEGMENTS:
                self._opened.popitem(last=False)[1].close()
        return opened

    def forget(self, number: int) -> None:
        """It cannot be read; its drive may be mounted again."""
        with self._lock:
            if opened := self._opened.pop(number, None):
                opened.close()

    def close(self) -> None:
        with self._lock:
            while self._opened:
                self._opened.popitem()[1].close()


def _first(paths: Iterable[Path], *, indexed: bool) -> Opened:
    failed: ArchiveGone | None = None
    for path in paths:
        try:
            return _both(path, indexed=indexed)
        except ArchiveGone as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _both(path: Path, *, indexed: bool) -> Opened:
    index = _fd(path.with_suffix(INDEX)) if indexed else -1
    try:
        return Opened(index, _fd(path.with_suffix(SEGMENT)), path)
    except ArchiveGone:
        Opened(index, -1, path).close()
        raise


def _fd(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ArchiveGone(path, str(error.strerror)) from None
