"""MessagePack with limits: msgpack reads the bytes, because it can be told limits; msgspec gives
them their meaning, because it has types."""

from typing import Annotated, Any

import msgpack
import msgspec

from draftfeed_proto.errors import LimitExceeded, MalformedMessage
from draftfeed_proto.limits import (
    MAX_ARRAY_ITEMS,
    MAX_MAP_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_NAME_CHARS,
    MAX_STRING_BYTES,
)

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
Scalar = str | int | float | bool | None


def pack(value: msgspec.Struct) -> bytes:
    """Bytes that `unpack` takes back.

    Raises MalformedMessage or LimitExceeded rather than give what a reader must refuse.
    """
    try:
        data = msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError) as error:
        raise MalformedMessage(str(error)) from error
    unpack(data, type(value))
    return data


def unpack(data: bytes | memoryview, kind: Any) -> Any:
    """A value of type `kind`. Raises MalformedMessage or LimitExceeded, and nothing else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise LimitExceeded("message bytes", len(data), MAX_MESSAGE_BYTES)
    try:
        return msgspec.convert(_plain(data), kind)
    except (ValueError, msgspec.ValidationError, msgpack.UnpackException) as error:
        raise MalformedMessage(str(error) or type(error).__name__) from error


def _plain(data: bytes | memoryview) -> Any:
    _skip(data)
    return msgpack.unpackb(
        data,
        object_pairs_hook=_unique,
        ext_hook=_no_extension,
        max_str_len=MAX_STRING_BYTES,
        max_bin_len=MAX_STRING_BYTES,
        max_array_len=MAX_ARRAY_ITEMS,
        max_map_len=MAX_MAP_ITEMS,
        max_ext_len=0,
    )


def _skip(data: bytes | memoryview) -> None:
    """Raises unless everything that is claimed is there.

    Reading allocates what an array claims to hold: 5 KB of arrays inside arrays would take 2 GB
    before they are found to be empty. Skipping allocates nothing.
    """
    size = max(1, len(data))
    unpacker = msgpack.Unpacker(max_buffer_size=size, read_size=size)
    unpacker.feed(data)
    unpacker.skip()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a map has one key twice")
    if not all(isinstance(key, str) for key in values):
        raise ValueError("a key is not a string")
    return values


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
