"""Chunk codecs: lossless transforms of chunks, named in configuration, numbered on disk."""

from typing import Protocol

from draftfeed_proto.codecs.raw import Raw
from draftfeed_proto.codecs.zstd import ZstdPlanes
from draftfeed_proto.errors import UnknownCodec

__all__ = ["Codec", "by_name", "by_number", "names"]


class Codec(Protocol):
    """Thread-safe. `check` and `decode` treat their input as hostile."""

    name: str
    number: int
    """What a chunk header carries; never reused for another format."""

    def encode(self, values: memoryview) -> bytes | memoryview:
        """values: the chunk's decoded bytes."""
        ...

    def check(self, payload: memoryview, decoded_bytes: int) -> None:
        """Called before anything is allocated. Raises MalformedChunk when the payload cannot
        decode to that many bytes."""
        ...

    def decode(self, payload: memoryview, out: memoryview) -> None:
        """Fill `out` with a payload that passed `check`. Raises MalformedChunk."""
        ...


_CODECS: tuple[Codec, ...] = (Raw(), ZstdPlanes())


def names() -> list[str]:
    return [codec.name for codec in _CODECS]


def by_name(name: str) -> Codec:
    """Raises UnknownCodec."""
    for codec in _CODECS:
        if codec.name == name:
            return codec
    raise UnknownCodec(name, names())


def by_number(number: int) -> Codec:
    """Raises UnknownCodec."""
    for codec in _CODECS:
        if codec.number == number:
            return codec
    raise UnknownCodec(number, names())
