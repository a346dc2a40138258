"""Messages of the stream: one tagged Struct each, MessagePack on the wire.

Within a major version unknown fields are ignored and new fields have defaults, so that either end
may be upgraded first.
"""

from typing import Annotated, TypeVar

import msgspec

from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.errors import IncompatibleVersion
from draftfeed_proto.ids import SampleId, Shards, WireRanges
from draftfeed_proto.limits import (
    MAX_ASSET_PIECE_BYTES,
    MAX_FRAME_BYTES,
    MAX_MEMBERS,
    MAX_PLACES,
    MAX_SAMPLE_BYTES,
)
from draftfeed_proto.sample import SampleHeader
from draftfeed_proto.wire import Count, Name, pack, unpack_message

VERSION = (3, 0)

SampleBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLE_BYTES)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Members = Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)]
FrameBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAME_BYTES)]
Places = Annotated[
    tuple[tuple[Count, FrameBytes], ...], msgspec.Meta(min_length=1, max_length=MAX_PLACES)
]
PieceBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_ASSET_PIECE_BYTES)]


class AssetFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file that belongs to the target."""

    name: Name
    """Anything: who writes it to a disk decides first which names it takes."""
    bytes: Count
    digest: Name
    """SHA-256 of its bytes, in lower-case hex."""


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
    """The training run."""
    member: Name
    """One rank of it."""
    members: Members = 1
    """How many the group has."""
    leader: bool = True
    """The member whose `Open` and `Commit` speak for the group; it begins terms."""
    incarnation: Name
    """Random, the same for all members that were started together: one life of the group."""
    process: Name
    """Random, one per process: a rank that was started again alone has lost what it trained."""
    term: Positive
    """The fencing number asked for."""
    takeover: bool = False
    """Take the stream from whoever holds it."""
    expect: Expectation = Expectation()


class Open(InSession, frozen=True, kw_only=True):
    """The member has loaded its checkpoint; offers may begin."""

    trained: WireRanges
    held: list[SampleId] = []
    """What else this member has: received, or trained since that checkpoint; not given back."""
    ledger_term: Count = 0
    """Term in which the loaded checkpoint was made; 0 without one."""
    ledger_number: Count = 0
    rollback: Name = ""
    """What to do with samples committed after the loaded checkpoint: "" refuses, "deliver"
    delivers again those that still exist, "regenerate" also makes the others again."""
    checkpoint_samples: Count = 0
    """Samples of the whole group between two checkpoints; 0 = not known."""


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
    """This sample will not be trained: it is terminal, and reported."""

    id: SampleId
    reason: str
    state: Name = "rejected"
    """"rejected" by the trainer's policy, or "tail": it did not fill an optimizer step."""


class AtWork(InSession, frozen=True, kw_only=True):
    """All samples the trainer has taken and not yet trained; each replaces the one before.

    One that is there whenever a trainer dies is probably what kills it.
    """

    ids: list[SampleId]


class Release(InSession, frozen=True, kw_only=True):
    """Samples given back before the trainer saw them."""

    ids: list[SampleId]


class Commit(InSession, frozen=True, kw_only=True):
    """A durable checkpoint contains the effect of exactly these samples."""

    number: Count
    trained: WireRanges


class Bye(InSession, frozen=True, kw_only=True):
    """The member leaves for good."""

    reason: str = ""
    failed: bool = False
    """Its trainer did: what it was at work on may be why."""


class Inquire(Message, frozen=True, kw_only=True):
    """Anyone may ask where the samples are; no session is needed, and none is touched."""


class ListAssets(Message, frozen=True, kw_only=True):
    """Anyone may ask which of the target's files there are; like `Inquire`, in no session."""


class FetchAsset(Message, frozen=True, kw_only=True):
    """A piece of one of the files that `Assets` named; answered with one `AssetPiece`."""

    name: Name
    offset: Count
    bytes: PieceBytes


# producer -> member


class Granted(InSession, frozen=True, kw_only=True, omit_defaults=False):
    """The stream is the member's; what it is, and the last commit stored here."""

    version: tuple[Count, Count] = VERSION
    descriptor: Descriptor
    stream_id: Name
    """When it is not the descriptor's own, the descriptor has a field this build does not know."""
    shards: Shards
    """The prompts this producer owns. Two producers of a group must not own the same."""
    max_sample_bytes: Count = 0
    """Decoded bytes of the largest sample that can come; 0 = not known."""
    committed: WireRanges
    local: Name = ""
    """Where a member of the same host finds the files that chunks lie in; empty: nowhere."""
    commit_term: Count = 0
    commit_number: Count


class Refused(Message, frozen=True, kw_only=True):
    code: Name
    """See PROTOCOL.md; take one you do not know as final.

    Not an enumeration: an older member could not even read a newer producer's refusal.
    """
    reason: str
    term: Count = 0
    """The term the producer is in: with "fenced" and "held", ask for a higher one."""


class Account(Message, frozen=True, kw_only=True):
    """Where every sample of this producer is. Each id is in exactly one of `committed`, `leased`,
    `deliverable`, `terminal` and `pending`."""

    shards: Shards
    committed: WireRanges
    leased: WireRanges
    """With a member, and in no commit yet."""
    deliverable: WireRanges
    """In the spool or the archive, and with nobody."""
    terminal: dict[Name, WireRanges]
    """By state: "rejected", "quarantined", "tail"."""
    pending: WireRanges
    """Not generated yet, or to be generated again."""
    regenerated: WireRanges = []
    """Made again because the first record was damaged or lost; these are in the sets above too."""
    skipped: WireRanges = []
    """Lines of the prompt file that are no prompts."""
    group: str = ""
    term: Count = 0
    commit_number: Count = 0
    members: list[Name] = []
    """Attached ones."""


class Assets(Message, frozen=True, kw_only=True):
    """The target's files that a trainer needs: not its weights, but its embedding and head."""

    stream_id: Name
    """Of the stream that they belong to."""
    files: list[AssetFile] = []
    reason: str = ""
    """Why there are none."""


class AssetPiece(Message, frozen=True, kw_only=True):
    """Followed by one payload frame: as many bytes as were asked for."""

    name: Name
    offset: Count


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


class ChunksAt(InSession, frozen=True, kw_only=True):
    """Chunks that the member is to read itself, from a file that it was handed."""

    id: SampleId
    index: Count
    """Of the first; the others follow it."""
    file: Count
    """Which of the files of this session."""
    places: Places
    """(offset, bytes) of each."""


class Committed(InSession, frozen=True, kw_only=True):
    """The commit is durable at the producer."""

    number: Count


class EndOfSamples(InSession, frozen=True, kw_only=True):
    """Everything was delivered in this term or is terminal."""

    refused: Count = 0
    """How many `Nack`s of this session the producer had read: one that was on its way then brings a
    sample back, and this is not the end."""


class AllTerminal(InSession, frozen=True, kw_only=True):
    """Every prompt of this producer is committed or otherwise terminal; it will exit."""


class Closing(InSession, frozen=True, kw_only=True):
    """The producer is shutting down before the end of its prompts; attach again later."""

    reason: str


class CheckpointWanted(InSession, frozen=True, kw_only=True):
    """The spool fills up, and a checkpoint at the next step boundary would let it free space; or
    much was trained since the last one."""


class Ping(InSession, frozen=True, kw_only=True):
    """Nothing to say: it finds out whether the member is still there."""


FromMember = (
    Fence
    | Open
    | Grant
    | Credit
    | Nack
    | Reject
    | AtWork
    | Release
    | Commit
    | Bye
    | Inquire
    | ListAssets
    | FetchAsset
)
FromProducer = (
    Granted
    | Refused
    | Opened
    | Offer
    | Begin
    | Chunk
    | ChunksAt
    | Committed
    | EndOfSamples
    | AllTerminal
    | Closing
    | Ping
    | CheckpointWanted
    | Account
    | Assets
    | AssetPiece
)


class _ToProducer(msgspec.Struct, frozen=True):
    message: FromMember


class _ToMember(msgspec.Struct, frozen=True):
    message: FromProducer


def encode(message: Message) -> bytes:
    """Raises MalformedMessage or LimitExceeded rather than send what the other end must refuse."""
    return pack(message)


def decode_from_member(data: bytes | memoryview) -> FromMember:
    """Raises MalformedMessage or LimitExceeded."""
    message: FromMember = unpack_message(data, _ToProducer)
    return _shown(message)


def decode_from_producer(data: bytes | memoryview) -> FromProducer:
    """Raises MalformedMessage or LimitExceeded."""
    message: FromProducer = unpack_message(data, _ToMember)
    return _shown(message)


Told = TypeVar("Told", bound=msgspec.Struct)


def _shown(message: Told) -> Told:
    """Reasons end up in logs and on terminals: what is no character to be seen there, line ends
    and escape sequences, becomes a question mark."""
    reason: str = getattr(message, "reason", "")
    if reason.isprintable():
        return message
    shown = "".join(one if one.isprintable() else "?" for one in reason)
    return msgspec.structs.replace(message, reason=shown)


def check_version(theirs: tuple[int, int]) -> None:
    """Raises IncompatibleVersion when the major versions differ."""
    if theirs[0] != VERSION[0]:
        raise IncompatibleVersion(VERSION, theirs)
