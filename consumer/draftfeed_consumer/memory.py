"""How this process gets the memory of samples and gives it back."""

import ctypes
import logging

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
MMAP_THRESHOLD_BYTES = 16 << 20
"""Frames of chunks (8 MiB at most) stay below it: glibc would map each anew, and the page faults
cost more than the decoding. What is above it goes back when it is freed."""
TRIM_THRESHOLD_BYTES = 64 << 20
"""Freed memory at the end of a heap that is kept for the next chunk."""
ARENAS = 2
"""A heap for each thread would keep its own share of freed chunks."""


def keep_chunks_mapped() -> bool:
    """Tell the allocator to use the memory of freed chunks again. Once, before any thread starts.

    Whether it did: only glibc has these options, and other allocators need none.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        logger.debug("this C library has no mallopt")
        return False
    options = (
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (_M_ARENA_MAX, ARENAS),
    )
    return all(mallopt(option, value) == 1 for option, value in options)
