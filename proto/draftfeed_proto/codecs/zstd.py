"""Codec 1: the low bytes of all values, then the high bytes, compressed as one zstd frame.

In 16-bit floats the high byte holds sign, exponent and top of the mantissa and is what compresses;
interleaved with the low byte it hides from an LZ matcher.
"""

import threading

import numpy as np
import zstandard

from draftfeed_proto.errors import MalformedChunk
from draftfeed_proto.limits import MAX_CHUNK_BYTES

LEVEL = 1
"""Higher levels gain under 2% on hidden states and cost several times the time."""
MAX_RATIO = 1 << 15
"""zstd's densest block: 4 bytes that stand for 128 KiB of one value."""


class ZstdPlanes:
    name = "zstd"
    number = 1

    def __init__(self) -> None:
        self._local = _Local()

    def encode(self, states: np.ndarray, out: memoryview) -> int:
        scratch = self._local.planes(states.nbytes)
        words = states.view(np.uint16)
        low, high = _planes(scratch.data, states)
        np.copyto(low, words, casting="unsafe")
        np.right_shift(words, 8, out=high, casting="unsafe")
        payload = self._local.compressor.compress(scratch.data)
        if len(payload) > out.nbytes:
            return 0
        out[: len(payload)] = payload
        return len(payload)

    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        _check(payload, out.nbytes)
        try:
            plain = self._local.decompressor.decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise MalformedChunk(f"zstd: {error}") from error
        assert len(plain) == out.nbytes, "the library holds a frame to its claim"
        low, high = _planes(memoryview(plain), out)
        words = out.view(np.uint16)
        np.left_shift(high, 8, out=words, dtype=np.uint16)
        np.bitwise_or(words, low, out=words)


class _Local(threading.local):
    """A thread's own: contexts of the library are not thread-safe, and each holds a window worth
    keeping."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(
            level=LEVEL, write_content_size=True, write_checksum=False
        )
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_CHUNK_BYTES)
        self._scratch = np.empty(0, np.uint8)

    def planes(self, size_bytes: int) -> np.ndarray:
        if len(self._scratch) < size_bytes:
            self._scratch = np.empty(size_bytes, np.uint8)
        return self._scratch[:size_bytes]


def _planes(data: memoryview, states: np.ndarray) -> np.ndarray:
    """The low and the high bytes of values that lie layer after layer, each an array like
    `states`."""
    rows, layers, hidden = states.shape
    return np.frombuffer(data, np.uint8).reshape(2, layers, rows, hidden).transpose(0, 2, 1, 3)


def _check(payload: memoryview, decoded_bytes: int) -> None:
    """The library allocates what a frame claims to hold, so the claim is checked first."""
    try:
        claimed = zstandard.frame_content_size(payload)
    except zstandard.ZstdError as error:
        raise MalformedChunk(f"zstd: {error}") from error
    if claimed != decoded_bytes or claimed > MAX_RATIO * payload.nbytes:
        raise MalformedChunk(
            f"zstd frame of {payload.nbytes} bytes claims {claimed}, not {decoded_bytes}"
        )
