"""Memory for the states and the frames of samples."""

import logging
import math
import mmap
import sys
import weakref
from bisect import bisect
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which the module names from Python 3.13 on: a mapping may be larger than the
memory, and counts only with what is used of it."""
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
_ROOM = 1.25
"""Times the capacity: a full buffer's samples of many sizes leave gaps that none of them fits in,
and so much is taken for gaps before a sample takes new memory beside them."""


class Slabs:
    """Memory of arrays, which is used again when nothing refers to an array any more.

    New memory is cleared by the kernel first, which takes longer than to decode into it. So all
    arrays lie in one mapping, as low in it as there is room: what was never used is not there.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Bytes of all arrays; one for which there is no room gets memory of its own."""
        size = _pages(int(_ROOM * capacity_bytes))
        self._memory: mmap.mmap | None = None
        self._gaps: list[tuple[int, int]] = []
        """(start, stop) of what is free, in order, never side by side."""
        self._returned: deque[tuple[int, int]] = deque()
        """Free, too. No lock: the last reference may go at any time, in any thread."""
        try:
            self._memory = mmap.mmap(-1, size, flags=_FLAGS)
        except OSError as error:  # a limit of address space
            logger.info(
                "no mapping of %d bytes, so each sample takes new memory: %s", size, error.strerror
            )
            return
        self._gaps = [(0, size)]
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any]) -> np.ndarray:
        """As numpy.empty. For one thread; the array may go to any."""
        values = math.prod(shape)
        size = _pages(values * np.dtype(dtype).itemsize)
        start = self._take(size)
        if start is None or self._memory is None:
            self._give_back(size)
            return np.empty(shape, dtype)
        # Whatever is made of it refers to this one, for what lies below is no array.
        whole = np.frombuffer(memoryview(self._memory), dtype, values, start)
        over = weakref.finalize(whole, self._returned.append, (start, start + size))
        over.atexit = False
        return whole.reshape(shape)

    def _take(self, size: int) -> int | None:
        while self._returned:
            self._add(*self._returned.popleft())
        for at, (start, stop) in enumerate(self._gaps):
            if stop - start >= size:
                self._gaps[at : at + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def _add(self, start: int, stop: int) -> None:
        at = bisect(self._gaps, (start, stop))
        if at < len(self._gaps) and self._gaps[at][0] == stop:
            stop = self._gaps.pop(at)[1]
        if at and self._gaps[at - 1][1] == start:
            start = self._gaps.pop(at - 1)[0]
            at -= 1
        self._gaps.insert(at, (start, stop))

    def _give_back(self, size: int) -> None:
        """An array lies beside the mapping: as much less shall lie in it. From its end, which is
        used again last."""
        for start, stop in reversed(self._gaps):
            assert self._memory is not None
            length = min(size, stop - start)
            self._memory.madvise(mmap.MADV_DONTNEED, stop - length, length)
            size -= length
            if not size:
                return


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
