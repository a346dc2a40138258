"""Messages of the stream: one tagged Struct each, MessagePack on the wire.

msgpack reads the bytes, because it can be told limits; msgspec gives them their meaning, because
it has types. Within a major version unknown fields are ignored and new fields have defaults, so
that either end may be upgraded first.
"""

from typing import Any, Literal

import msgpack
import msgspec

from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.errors import IncompatibleVersion, LimitExceeded, MalformedMessage
from draftfeed_proto.ids import SampleId, WireRanges
from draftfeed_proto.limits import (
    MAX_ARRAY_ITEMS,
    MAX_MAP_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_STRING_BYTES,
)
from draftfeed_proto.sample import SampleHeader

VERSION = (1, 0)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all; the type's name travels in the field `type`."""


class InSession(Message, frozen=True, kw_only=True):
    """Every message after the handshake: ignored unless both are those of the current session."""

    term: int
    session: str


# member -> producer


class Fence(Message, frozen=True, kw_only=True):
    """First message of a connection: who is here, and what it expects."""

    version: tuple[int, int] = VERSION
    group: str
    member: str
    incarnation: str
    """Random, one per process: tells a restarted member from its predecessor."""
    expect: Expectation = Expectation()


class Open(InSession, frozen=True, kw_only=True):
    """The member has loaded its checkpoint; offers may begin."""

    trained: WireRanges
    held: list[SampleId] = []
    """Received in this term and neither trained nor given back."""


class Grant(InSession, frozen=True, kw_only=True):
    """Room for these whole samples is reserved: send them."""

    ids: list[SampleId]


class Credit(InSession, frozen=True, kw_only=True):
    total_bytes: int
    """Cumulative since the session began: encoded bytes of chunks the member has ever allowed."""


class Nack(InSession, frozen=True, kw_only=True):
    """A sample arrived damaged; it is to be sent again whole."""

    id: SampleId
    reason: str


class Reject(InSession, frozen=True, kw_only=True):
    """The trainer's policy refuses this sample for good."""

    id: SampleId
    reason: str


class Release(InSession, frozen=True, kw_only=True):
    """Samples given back before the trainer saw them."""

    ids: list[SampleId]


class Commit(InSession, frozen=True, kw_only=True):
    """A durable checkpoint contains the effect of exactly these samples."""

    number: int
    trained: WireRanges


class Bye(InSession, frozen=True, kw_only=True):
    reason: str = ""


# producer -> member


class Granted(InSession, frozen=True, kw_only=True):
    version: tuple[int, int] = VERSION
    descriptor: Descriptor
    stream_id: str
    committed: WireRanges
    commit_number: int


class Refused(Message, frozen=True, kw_only=True):
    code: Literal["mismatch", "version", "held", "rollback", "malformed"]
    reason: str


class Opened(InSession, frozen=True, kw_only=True):
    pass


class Offer(InSession, frozen=True, kw_only=True):
    """Samples that may be granted."""

    samples: list[tuple[SampleId, int]]
    """(id, decoded bytes)"""


class Begin(InSession, frozen=True, kw_only=True):
    """The chunks of one sample follow, in order, nothing between them."""

    header: SampleHeader


class Chunk(InSession, frozen=True, kw_only=True):
    """Followed by one payload frame: the chunk."""

    id: SampleId
    index: int


class Committed(InSession, frozen=True, kw_only=True):
    """The commit is durable at the producer."""

    number: int


class EndOfSamples(InSession, frozen=True, kw_only=True):
    """Everything was delivered in this term or is terminal."""


class AllTerminal(InSession, frozen=True, kw_only=True):
    """Every prompt of this producer is committed or otherwise terminal; it will exit."""


class Closing(InSession, frozen=True, kw_only=True):
    """The producer is shutting down before the end of its prompts; attach again later."""

    reason: str


class Ping(InSession, frozen=True, kw_only=True):
    """Nothing to say: it finds out whether the member is still there."""


FromMember = Fence | Open | Grant | Credit | Nack | Reject | Release | Commit | Bye
FromProducer = (
    Granted
    | Refused
    | Opened
    | Offer
    | Begin
    | Chunk
    | Committed
    | EndOfSamples
    | AllTerminal
    | Closing
    | Ping
)


def encode(message: Message) -> bytes:
    """Raises LimitExceeded rather than send what the other end must refuse."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise LimitExceeded(f"{type(message).__name__} message bytes", len(data), MAX_MESSAGE_BYTES)
    return data


def decode_from_member(data: bytes | memoryview) -> FromMember:
    """Raises MalformedMessage or LimitExceeded."""
    message: FromMember = _convert(_unpack(data), FromMember)
    return message


def decode_from_producer(data: bytes | memoryview) -> FromProducer:
    """Raises MalformedMessage or LimitExceeded."""
    message: FromProducer = _convert(_unpack(data), FromProducer)
    return message


def check_version(theirs: tuple[int, int]) -> None:
    """Raises IncompatibleVersion when the major versions differ."""
    if theirs[0] != VERSION[0]:
        raise IncompatibleVersion(VERSION, theirs)


def _unpack(data: bytes | memoryview) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise LimitExceeded("message bytes", len(data), MAX_MESSAGE_BYTES)
    try:
        return msgpack.unpackb(
            data,
            max_str_len=MAX_STRING_BYTES,
            max_bin_len=MAX_STRING_BYTES,
            max_array_len=MAX_ARRAY_ITEMS,
            max_map_len=MAX_MAP_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(str(error) or type(error).__name__) from error


def _convert(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
