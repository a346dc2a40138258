"""MessagePack with limits: msgpack reads the bytes, because it can be told limits; msgspec gives
them their meaning, because it has types."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

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
Told = TypeVar("Told", bound=msgspec.Struct)
Held = TypeVar("Held")
Scalar = str | int | float | bool | None


SHORT_BYTES = 512
"""Too few for a string, an array or a map that is beyond its limit."""


def pack(value: msgspec.Struct) -> bytes:
    """Bytes that `unpack` takes back.

    Raises MalformedMessage or LimitExceeded rather than give what a reader must refuse.
    """
    try:
        data = msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError) as error:
        raise MalformedMessage(str(error)) from error
    if len(data) > SHORT_BYTES:
        unpack(data, type(value))
        return data
    try:  # types and ranges are all that can be wrong with it
        msgspec.msgpack.decode(data, type=type(value))
    except msgspec.ValidationError as error:
        raise MalformedMessage(str(error)) from error
    return data


def unpack(data: bytes | memoryview, kind: type[Told]) -> Told:
    """A value of type `kind`. Raises MalformedMessage or LimitExceeded, and nothing else."""
    return _converted(data, lambda plain: msgspec.convert(plain, kind))


def unpack_message(data: bytes | memoryview, holder: type[msgspec.Struct]) -> Any:
    """What a holder has in its only field, `message`, which is a union: msgspec keeps what it
    finds out about a Struct, and about a union it would find it out anew for every message.
    Raises as `unpack`."""
    held: Any = _converted(data, lambda plain: msgspec.convert({"message": plain}, holder))
    return held.message


def _converted(data: bytes | memoryview, convert: Callable[[Any], Held]) -> Held:
    if len(data) > MAX_MESSAGE_BYTES:
        raise LimitExceeded("message bytes", len(data), MAX_MESSAGE_BYTES)
    try:
        return convert(_plain(data))
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
