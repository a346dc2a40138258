"""Lossless codecs of chunks of states. Chunk headers carry a codec's number; configuration names
a chooser, which tries codecs for each chunk."""

import math
from typing import Protocol

import numpy as np

from draftfeed_proto.codecs.packed import Packed
from draftfeed_proto.codecs.raw import Raw
from draftfeed_proto.codecs.rows import Rows
from draftfeed_proto.codecs.zstd import ZstdPlanes
from draftfeed_proto.errors import UnknownCodec

__all__ = ["PACKED", "ROWS", "Chooser", "Codec", "by_name", "by_number", "names", "packing"]


class Codec(Protocol):
    """Thread-safe. States are 16-bit [rows, layers, hidden], the last axis contiguous, the others
    with any strides; float16 for fp16, uint16 for the bit patterns of bf16."""

    name: str
    number: int
    """What a chunk header carries; never reused for another format."""

    def encode(self, states: np.ndarray, out: memoryview) -> int:
        """Bytes written into `out`, which is as large as the states or smaller; 0 when they do
        not fit."""
        ...

    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        """Fill the states `out`. Treats the payload as hostile, and checks every length before it
        is used. Raises MalformedChunk; `out` may then hold anything."""
        ...


RAW, ZSTD, PACKED, ROWS = Raw(), ZstdPlanes(), Packed(), Rows()
_CODECS: tuple[Codec, ...] = (RAW, ZSTD, PACKED, ROWS)


class Chooser:
    """Encodes each chunk with the first of its codecs that saves enough, or else `raw`."""

    def __init__(self, name: str, *codecs: tuple[Codec, float]) -> None:
        """codecs: each with the share of the bytes that it must save to be taken."""
        self.name = name
        self._codecs = codecs

    def encode(self, states: np.ndarray, out: memoryview) -> tuple[int, int]:
        """(number of the codec that was taken, bytes it wrote into `out`).

        out: at least as large as the states, so that `raw` fits.
        """
        size = states.nbytes
        for codec, saving in self._codecs:
            most = size - max(1, math.ceil(size * saving))
            if written := codec.encode(states, out[:most]):
                return codec.number, written
        return RAW.number, RAW.encode(states, out[:size])


def packing(codec: Codec) -> Chooser:
    """What configuration calls `packed`. codec: PACKED, or one of its implementations."""
    # zstd takes several times as long, so it gets only what `packed` makes next to nothing of.
    return Chooser(PACKED.name, (codec, 0.03), (ZSTD, 0.0))


_CHOOSERS = (Chooser("raw"), Chooser("zstd", (ZSTD, 0.0)), packing(PACKED))


def names() -> list[str]:
    return [chooser.name for chooser in _CHOOSERS]


def by_name(name: str) -> Chooser:
    """Raises UnknownCodec."""
    for chooser in _CHOOSERS:
        if chooser.name == name:
            return chooser
    raise UnknownCodec(name, names())


def by_number(number: int) -> Codec:
    """Raises UnknownCodec."""
    for codec in _CODECS:
        if codec.number == number:
            return codec
    raise UnknownCodec(number, names())
