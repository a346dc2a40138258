"""Messages of the stream: one tagged Struct each, MessagePack on the wire.

Within a major version unknown fields are ignored and new fields have defaults, so that either end
may be upgraded first.
"""

from typing import Annotated

import msgspec

from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.errors import IncompatibleVersion
from draftfeed_proto.ids import SampleId, WireRanges
from draftfeed_proto.limits import MAX_SAMPLE_BYTES
from draftfeed_proto.sample import SampleHeader
from draftfeed_proto.wire import Count, Name, pack, unpack

VERSION = (1, 0)

SampleBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLE_BYTES)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all; the type's name travels in the field `type`."""


class InSession(Message, frozen=True, kw_only=True):
    """Every message after the handshake: ignored unless both are those of the current session."""

    term: Count
    session: Name


# member -> producer


class Fence(Message, frozen=True, kw_only=True, omit_defaults=False):
    """First message of a connection: who is here, and what it expects.

    Defaults are sent, for a reader would take an absent version for its own.
    """

    version: tuple[Count, Count] = VERSION
    group: Name
    member: Name
    incarnation: Name
    """Random, one per process: tells a restarted member from its predecessor."""
    expect: Expectation = Expectation()


class Open(InSession, frozen=True, kw_only=True):
    """The member has loaded its checkpoint; offers may begin."""

    trained: WireRanges
    held: list[SampleId] = []
    """What else this member has: received, or trained since that checkpoint; not given back."""


class Grant(InSession, frozen=True, kw_only=True):
    """Room for these whole samples is reserved: send them."""

    ids: list[SampleId]


class Credit(InSession, frozen=True, kw_only=True):
    total_bytes: Count
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

    number: Count
    trained: WireRanges


class Bye(InSession, frozen=True, kw_only=True):
    reason: str = ""


# producer -> member


class Granted(InSession, frozen=True, kw_only=True, omit_defaults=False):
    """The stream is the member's; what it is, and the last commit stored here."""

    version: tuple[Count, Count] = VERSION
    descriptor: Descriptor
    stream_id: Name
    """When it is not the descriptor's own, the descriptor has a field this build does not know."""
    committed: WireRanges
    commit_number: Count


class Refused(Message, frozen=True, kw_only=True):
    code: Name
    """"mismatch", "version", "held", "rollback" or "malformed"; take one you do not know as final.

    Not an enumeration: an older member could not even read a newer producer's refusal.
    """
    reason: str


class Opened(InSession, frozen=True, kw_only=True):
    pass


class Offer(InSession, frozen=True, kw_only=True):
    """Samples that may be granted."""

    samples: list[tuple[SampleId, SampleBytes]]
    """(id, decoded bytes)"""


class Begin(InSession, frozen=True, kw_only=True):
    """The chunks of one sample follow in order, with no other sample's between them."""

    header: SampleHeader


class Chunk(InSession, frozen=True, kw_only=True):
    """Followed by one payload frame: the chunk."""

    id: SampleId
    index: Count


class Committed(InSession, frozen=True, kw_only=True):
    """The commit is durable at the producer."""

    number: Count


class EndOfSamples(InSession, frozen=True, kw_only=True):
    """Everything was delivered in this term or is terminal."""


class AllTerminal(InSession, frozen=True, kw_only=True):
    """Every prompt of this producer is committed or otherwise terminal; it will exit."""


class Closing(InSession, frozen=True, kw_only=True):
    """The producer is shutting down before the end of its prompts; attach again later."""

    reason: str


class CheckpointWanted(InSession, frozen=True, kw_only=True):
    """The spool fills up: a checkpoint at the next step boundary would let it free space."""


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
    | CheckpointWanted
)


def encode(message: Message) -> bytes:
    """Raises MalformedMessage or LimitExceeded rather than send what the other end must refuse."""
    return pack(message)


def decode_from_member(data: bytes | memoryview) -> FromMember:
    """Raises MalformedMessage or LimitExceeded."""
    message: FromMember = unpack(data, FromMember)
    return message


def decode_from_producer(data: bytes | memoryview) -> FromProducer:
    """Raises MalformedMessage or LimitExceeded."""
    message: FromProducer = unpack(data, FromProducer)
    return message


def check_version(theirs: tuple[int, int]) -> None:
    """Raises IncompatibleVersion when the major versions differ."""
    if theirs[0] != VERSION[0]:
        raise IncompatibleVersion(VERSION, theirs)
