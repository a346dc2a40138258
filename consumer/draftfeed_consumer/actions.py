"""What `Membership` wants done, and who it speaks for."""

from typing import Literal, NamedTuple

import msgspec

from draftfeed_consumer.errors import ConsumerError
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.sample import Sample


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """How to begin, when it is not the usual way. From the command line, never configuration: a
    service that takes over whenever it starts would fight with its own successor."""

    takeover: bool = False
    """Take the stream from whoever holds it."""
    rollback: Literal["", "deliver", "regenerate"] = ""
    """Go back behind a commit: "deliver" has the samples that still exist delivered again,
    "regenerate" also has the others made again."""
    without: tuple[str, ...] = ()
    """Addresses that need not be there when training begins."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a training run."""

    group: str
    member: str = "0"
    """Its rank."""
    members: int = 1
    """How many ranks the run has."""
    leader: bool = True
    """Begins terms, commits."""
    incarnation: str
    """Random, the same for all ranks started together."""
    process: str
    """Random, one per process."""


class Say(NamedTuple):
    address: str
    message: m.FromMember


class Drop(NamedTuple):
    """Close this link, and connect again after a pause. The membership has let go of it already."""

    address: str
    reason: str


class Closing(NamedTuple):
    """The producer shuts down: as `Drop`, but it said so."""

    address: str
    reason: str


class Leave(NamedTuple):
    """This producer needs nothing more: close the link when all is sent, and stay away."""

    address: str


class Deliver(NamedTuple):
    """A sample for which room was reserved."""

    sample: Sample


class Attached(NamedTuple):
    """Every producer that must be there has granted the stream. Once."""

    descriptor: Descriptor


class Acknowledged(NamedTuple):
    """Every producer has made the commit of this number durable."""

    number: int


class CheckpointWanted(NamedTuple):
    """A producer is short of disk space."""


class Ended(NamedTuple):
    """Every producer has delivered everything it has for us, and it was received."""


class EndWithdrawn(NamedTuple):
    """A producer offers more after all. Comes before it is asked for any of that."""


class Finished(NamedTuple):
    """Every prompt of every producer is terminal: nothing more is needed of us."""


class Fail(NamedTuple):
    """Stop everywhere and commit nowhere."""

    error: ConsumerError


Action = (
    Say
    | Drop
    | Closing
    | Leave
    | Deliver
    | Attached
    | Acknowledged
    | CheckpointWanted
    | Ended
    | EndWithdrawn
    | Finished
    | Fail
)
