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
        # Contexts of the library are not thread-safe, and each holds a window worth keeping.
        self._local = threading.local()

    def encode(self, values: memoryview) -> bytes:
        words = np.frombuffer(values, np.uint16)
        planes = np.empty((2, len(words)), np.uint8)
        np.copyto(planes[0], words, casting="unsafe")
        np.right_shift(words, 8, out=planes[1], casting="unsafe")
        return self._compressor().compress(planes.data)

    def check(self, payload: memoryview, decoded_bytes: int) -> None:
        """The library allocates what a frame claims to hold, so the claim is checked first."""
        try:
            claimed = zstandard.frame_content_size(payload)
        except zstandard.ZstdError as error:
            raise MalformedChunk(f"zstd: {error}") from error
        if claimed != decoded_bytes or claimed % 2 or claimed > MAX_RATIO * payload.nbytes:
            raise MalformedChunk(
                f"zstd frame of {payload.nbytes} bytes claims {claimed}, not {decoded_bytes}"
            )

    def decode(self, payload: memoryview, out: memoryview) -> None:
        try:
            plain = self._decompressor().decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise MalformedChunk(f"zstd: {error}") from error
        assert len(plain) == out.nbytes, "the library holds a frame to its claim"
        low, high = np.frombuffer(plain, np.uint8).reshape(2, -1)
        words = np.frombuffer(out, np.uint16)
        np.left_shift(high, 8, out=words, dtype=np.uint16)
        np.bitwise_or(words, low, out=words)

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._local, "compressor"):
            self._local.compressor = zstandard.ZstdCompressor(
                level=LEVEL, write_content_size=True, write_checksum=False
            )
        compressor: zstandard.ZstdCompressor = self._local.compressor
        return compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_CHUNK_BYTES)
        decompressor: zstandard.ZstdDecompressor = self._local.decompressor
        return decompressor
