"""The shared memory that rows leave the engine through: slabs of fixed size, side by side."""

import mmap
import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftfeed_producer.engines.sglang.memory import available_bytes
from draftfeed_producer.errors import EngineError

COUNTERS = 4
"""As in `tap.reference`, which imports torch; the producer of SGLang needs none."""
_PAGE = mmap.PAGESIZE


class SharedSlab(NamedTuple):
    rows: np.ndarray
    """float16 [n, L, H]"""
    counters: np.ndarray
    """int32 [n, L, 4]"""


@dataclass(frozen=True)
class SlabShape:
    count: int
    rows: int
    layers: int
    hidden: int

    @property
    def row_bytes(self) -> int:
        return 2 * self.layers * self.hidden

    @property
    def counters_at(self) -> int:
        """Offset of the counters in a slab."""
        return _round_up(self.rows * self.row_bytes)

    @property
    def slab_bytes(self) -> int:
        return self.counters_at + _round_up(self.rows * self.layers * COUNTERS * 4)

    @property
    def total_bytes(self) -> int:
        return self.count * self.slab_bytes


class SharedSlabs:
    """Owns a mapping, and the memory when it made it. The memory goes with its last process."""

    def __init__(self, shape: SlabShape, fd: int) -> None:
        self.shape = shape
        self._fd = fd
        self._map = mmap.mmap(fd, shape.total_bytes)

    @classmethod
    def create(cls, shape: SlabShape) -> "SharedSlabs":
        """Raises EngineError when the machine has not that much memory to share.

        Not in /dev/shm, which is 64 MiB in many containers. Taken at once: a page that is not
        there when it is written ends the process that writes it.
        """
        available = available_bytes()
        # Taking more than there is would not fail: it would have this process killed.
        if shape.total_bytes > available:
            raise _no_memory(shape, f"{available / 2**20:.0f} MiB are available")
        fd = os.memfd_create("draftfeed-slabs")
        try:
            os.posix_fallocate(fd, 0, shape.total_bytes)
        except OSError as error:
            os.close(fd)
            raise _no_memory(shape, error.strerror or "") from None
        return cls(shape, fd)

    @classmethod
    def attach(cls, shape: SlabShape, path: str) -> "SharedSlabs":
        return cls(shape, os.open(path, os.O_RDWR))

    @property
    def path(self) -> str:
        """For other processes of this user, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def address(self) -> int:
        return int(np.frombuffer(self._map, np.uint8).ctypes.data)

    def slab(self, index: int) -> SharedSlab:
        shape = self.shape
        start = index * shape.slab_bytes
        rows = np.ndarray((shape.rows, shape.layers, shape.hidden), np.float16, self._map, start)
        counters = np.ndarray(
            (shape.rows, shape.layers, COUNTERS), np.int32, self._map, start + shape.counters_at
        )
        return SharedSlab(rows, counters)

    def close(self) -> None:
        """The memory goes when nobody holds an array of it. Unmapping it here would not see them:
        numpy keeps the mapping alive and does not tell it that it is in use."""
        os.close(self._fd)
        del self._map


def _no_memory(shape: SlabShape, reason: str) -> EngineError:
    size = f"{shape.total_bytes / 2**20:.0f} MiB"
    return EngineError(f"no shared memory of {size}: {reason}; lower [engine] ring_bytes")


def _round_up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
