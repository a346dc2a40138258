"""How a member gets the stream: one term, granted by every producer. No I/O.

Part of `Membership`, which goes on where this ends.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from draftfeed_consumer.actions import (
    Action,
    Attach,
    Attached,
    Drop,
    Fail,
    Identity,
    Leave,
    Say,
)
from draftfeed_consumer.errors import BufferTooSmall, Fenced, StreamRefused
from draftfeed_consumer.ledger import Ledger
from draftfeed_consumer.peer import Peer
from draftfeed_consumer.reception import Room
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.errors import DescriptorMismatch, IncompatibleVersion, ProtoError
from draftfeed_proto.ids import IdSet
from draftfeed_proto.workers import INLINE, Workers

logger = logging.getLogger(__name__)

PASSING_REFUSALS = ("held", "malformed", "session")
"""After these it is worth attaching again; every other refusal but "fenced" is final."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a member attaches."""

    attach: Attach = Attach()
    expect: Expectation = Expectation()
    capacity_bytes: int = 0
    """Of the buffer; 0 leaves its size unchecked."""
    batch_samples: int = 1
    """Samples that the trainer holds at once."""
    term: int = 1
    """To begin with; that of the leader when this is another rank."""

    def check_room(self, sample_bytes: int) -> None:
        """A trainer that waits for its next sample holds those of a step, and nothing would ever
        make room for the one it waits for. Raises BufferTooSmall."""
        needed_bytes = sample_bytes * (1 + self.batch_samples)
        if 0 < self.capacity_bytes < needed_bytes:
            why = (
                f"samples of {sample_bytes} bytes can come (the producer's max_prompt_tokens and "
                f"max_new_tokens say so), and the trainer may hold {self.batch_samples} while the "
                "next one arrives"
            )
            raise BufferTooSmall(needed_bytes, self.capacity_bytes, why)


class Attachment:
    """Fences every producer, in one term that rises until all of them grant it."""

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Identity,
        room: Room,
        ledger: Ledger,
        options: Options = Options(),  # noqa: B008 - frozen
        workers: Workers = INLINE,
    ) -> None:
        self.term = options.term
        self.descriptor: Descriptor | None = None
        self._identity, self._options = identity, options
        self._room, self._ledger, self._workers = room, ledger, workers
        attach = options.attach
        self._peers = {
            address: Peer(address, required=address not in attach.without) for address in addresses
        }
        self._attached = False

    # what others may want to know

    def peer(self, address: str) -> Peer:
        return self._peers[address]

    @property
    def peers(self) -> list[Peer]:
        return list(self._peers.values())

    @property
    def _needed(self) -> list[Peer]:
        """Those that an end and a commit wait for."""
        return [p for p in self._peers.values() if p.state != "out" and (p.required or p.given)]

    @property
    def _open(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.state == "open"]

    @property
    def _begun(self) -> bool:
        """Samples may have been trained in this term."""
        return any(peer.opened for peer in self._peers.values())

    # links

    def linked(self, address: str) -> list[Action]:
        """A new connection is up."""
        peer = self._peers[address]
        if not peer.wanted:
            return [Leave(address)]
        peer.lose()
        peer.state = "linked"
        return self._fences()

    def unlinked(self, address: str) -> list[Action]:
        """The connection is gone; what it had not delivered will come in another one."""
        self._peers[address].lose()
        return []

    def _drop(self, peer: Peer, reason: str) -> Action:
        peer.lose()
        return Drop(peer.address, reason)

    # fencing

    def _fences(self) -> list[Action]:
        """Producers are fenced in the order of their addresses, so that two groups which start at
        once cannot each get one of them and wait for the other."""
        actions: list[Action] = []
        peers = sorted(self._peers.values(), key=lambda peer: (not peer.required, peer.address))
        for peer in peers:
            if peer.state == "linked":
                peer.state = "fenced"
                actions.append(Say(peer.address, self._fence()))
            if self._identity.leader and peer.required and not peer.granted_in(self.term):
                break
        return actions

    def _fence(self) -> m.Fence:
        me = self._identity
        return m.Fence(
            group=me.group,
            member=me.member,
            members=me.members,
            leader=me.leader,
            incarnation=me.incarnation,
            process=me.process,
            term=self.term,
            takeover=self._options.attach.takeover and me.leader,
            expect=self._options.expect,
        )

    def _refused(self, peer: Peer, refused: m.Refused) -> list[Action]:
        if peer.state not in ("fenced", "granted", "open"):
            return []
        if refused.code == "fenced":
            return self._fenced(peer, refused)
        if refused.code in PASSING_REFUSALS:
            dropped = self._drop(peer, refused.reason)
            seen = refused.code == "held" and refused.term >= self.term
            return [dropped, *(self._ask_above(refused.term) if seen and not self._begun else [])]
        if not peer.required and not peer.given and self._begun:
            return self._keep_out(peer, refused.reason)
        reason = refused.reason
        if refused.code == "rollback":
            reason += self._all_forgotten()
        return [Fail(StreamRefused(peer.address, refused.code, reason))]

    def _fenced(self, peer: Peer, refused: m.Refused) -> list[Action]:
        if peer.given:
            if refused.term >= peer.term:  # equal: its spool was lost, and another got the term
                return [Fail(Fenced(peer.address, refused.reason, refused.term))]
            return [self._drop(peer, refused.reason)]
        if self._begun:
            return self._keep_out(peer, refused.reason)
        if not self._identity.leader:
            return [self._drop(peer, refused.reason)]
        peer.state = "linked"
        return self._ask_above(refused.term)

    def _ask_above(self, term: int) -> list[Action]:
        """Begin again with all of them, in one higher term."""
        if not self._identity.leader:
            return []
        return self._raise_to(max(self.term, term) + 1)

    def _raise_to(self, term: int) -> list[Action]:
        self.term = term
        asked = [p for p in self._peers.values() if p.state in ("fenced", "granted")]
        dropped = [self._drop(peer, f"asking for term {term}") for peer in asked]
        return [*dropped, *self._fences()]

    def _keep_out(self, peer: Peer, reason: str) -> list[Action]:
        logger.error(
            "%s stays out until the next start, training goes on without it: %s",
            peer.address,
            reason,
        )
        peer.lose()
        peer.state = "out"
        return [Leave(peer.address)]

    def _all_forgotten(self) -> str:
        """The same of every producer, so that one look shows what a rollback means."""
        trained = IdSet.from_wire(self._ledger.opening().trained)
        parts = [
            f"{len(missing)} at {peer.address}"
            for peer in self._peers.values()
            if peer.granted and (missing := IdSet.from_wire(peer.granted.committed) - trained)
        ]
        return f" (in all: {', '.join(parts)})" if len(parts) > 1 else ""

    # granted, not open

    def _granted(self, peer: Peer, granted: m.Granted) -> list[Action]:
        try:
            m.check_version(granted.version)
            granted.shards.check()
            self._options.expect.check(granted.descriptor)
        except (DescriptorMismatch, IncompatibleVersion) as error:
            return [Fail(StreamRefused(peer.address, "mismatch", str(error)))]
        except ProtoError as error:
            return [self._drop(peer, str(error))]
        if fault := self._misfit(peer, granted):
            return [fault]
        self.descriptor = granted.descriptor
        peer.grant(granted, self._room, self._ledger, self._workers)
        self._ledger.follow(self.term, granted.commit_number)
        actions = self._fences()
        if not self._attached and self._complete:
            self._attached = True
            actions.append(Attached(granted.descriptor))
        return actions

    def _misfit(self, peer: Peer, granted: m.Granted) -> Fail | None:
        """What makes this producer impossible beside the others, or in this buffer."""
        if granted.stream_id != granted.descriptor.stream_id():
            words = "its stream id is not that of its descriptor"
            return Fail(StreamRefused(peer.address, "mismatch", words))
        try:
            self._options.check_room(granted.max_sample_bytes)
        except BufferTooSmall as error:
            return Fail(error)
        others = [other for other in self._peers.values() if other is not peer and other.granted]
        for fault in (_other_stream, _same_shards):
            for other in others:
                if words := fault(peer, granted, other):
                    return Fail(StreamRefused(peer.address, "mismatch", words))
        return None

    @property
    def _complete(self) -> bool:
        return all(p.granted_in(self.term) for p in self._peers.values() if p.required)


_Fault = Callable[[Peer, m.Granted, Peer], str]


def _other_stream(peer: Peer, granted: m.Granted, other: Peer) -> str:
    assert other.granted is not None
    if granted.stream_id == other.granted.stream_id:
        return ""
    for field in granted.descriptor.__struct_fields__:
        mine, theirs = (getattr(g.descriptor, field) for g in (granted, other.granted))
        if mine != theirs:
            return f"its {field} is {mine!r}, that of {other.address} is {theirs!r}"
    return f"its stream is {granted.stream_id}, that of {other.address} {other.granted.stream_id}"


def _same_shards(peer: Peer, granted: m.Granted, other: Peer) -> str:
    assert other.granted is not None
    both = granted.shards & other.granted.shards
    if not both:
        return ""
    ranges = ", ".join(
        str(start) if stop == start + 1 else f"{start}-{stop - 1}"
        for start, stop in zip(both[::2], both[1::2], strict=True)
    )
    return (
        f"{peer.address} and {other.address} both own shards {ranges}, so their samples would be "
        "trained twice; give each its own with [spool] shards"
    )
