"""What the producer, its SGLang host and the plugin in the scheduler tell each other.

MessagePack over ZeroMQ, between processes of one user on one machine that start from one
version of this package: no limits, no evolution.
"""

from typing import Any

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the plugin needs, in the environment variable `VARIABLE` of the engine's processes."""

    told: str
    """Address that host and plugin push to."""
    freed: str
    """Address that the plugin hears on which slabs are free again."""
    memory: str
    """Path of the shared memory."""
    slabs: int
    slab_rows: int
    layers: int
    hidden: int
    by_slot: bool
    """Rows go by KV slot: the prefix cache is on."""
    final: bool
    """The last layer is the final state, which the engine keeps beside the tapped ones."""


VARIABLE = "DRAFTFEED_CAPTURE"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Producer to host, on its standard input."""

    args: dict[str, Any]
    """Of `sgl.Engine`."""
    known_versions: tuple[str, ...]
    captures: bool = True
    """Without, the plugin is not told what it needs, and does nothing."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    handle: int
    input_ids: list[int]
    sampling: dict[str, Any]
    uncached: bool = False
    """It finds nothing in the prefix cache, and nobody finds what it leaves there."""
    watched: bool = False
    """`Progress` of it is wanted."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """All requests."""


class Quit(msgspec.Struct, frozen=True, tag=True):
    pass


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Host: the engine takes requests."""

    version: str
    kv_tokens: int
    """Tokens that the KV cache holds."""
    most_input_tokens: int
    """Of the longest request that is taken; it and its response have a few more."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Host: the engine cannot start, and why, in one line."""

    reason: str


class Response(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Host: a request has ended."""

    handle: int
    output_ids: list[int]
    finish_reason: str
    """stop, length or abort"""
    error: str = ""
    """With abort."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Host: the response has so many tokens, which is told of the first and of the last, too."""

    handle: int
    tokens: int
    at: float
    """`time.monotonic()`, the same for all processes of a machine."""


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Plugin: it saw a forward pass."""

    kv_slots: int
    """Slots of the KV cache, numbered from 0."""
    device: str


class Copied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Plugin: rows lie in a slab. Arrays are little-endian int32."""

    slab: int
    handles: bytes
    positions: bytes
    tokens: bytes
    """The token fed at each row, to tell a row that belongs to another."""
    kv_slots: bytes = b""
    """Where `Settings.by_slot`."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Plugin: every row of the request was announced before this."""

    handle: int
    kv_slots: bytes = b""
    """int32[n], the slots of its n rows, where `Settings.by_slot`."""


class Freed(msgspec.Struct, frozen=True, tag=True):
    """Producer to plugin."""

    slab: int


Command = Submit | Abort | Quit
Told = Started | Failed | Response | Progress | Attached | Copied | Finished

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_told = msgspec.msgpack.Decoder(Told).decode
decode_freed = msgspec.msgpack.Decoder(Freed).decode
