"""A training run: the real membership core and ledger of each rank, a trainer that is modelled.

The trainer's weights are the multiset of ids that it trained on, along the lineage of the
checkpoint it began with. They never pass through the ledger: what the ledger says is compared with
them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from draftfeed_consumer import actions as a
from draftfeed_consumer.attachment import Options
from draftfeed_consumer.ledger import Ledger, LedgerState, parse, plain, union
from draftfeed_consumer.membership import Membership
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId
from model_link import Link, Violation
from model_samples import STREAM

BEFORE_THE_FIRST = LedgerState(3, STREAM, 0, 0, 0, [])


class Checkpoint(NamedTuple):
    """On the disk of the trainer."""

    state: LedgerState
    weights: tuple[SampleId, ...]

    @property
    def key(self) -> tuple[int, int]:
        return (self.state.term, self.state.number)


SCRATCH = Checkpoint(BEFORE_THE_FIRST, ())


class Room:
    """A buffer with room for so many samples; 0 = any number."""

    def __init__(self, samples: int) -> None:
        self.samples, self.taken = samples, 0

    def reserve(self, size_bytes: int) -> bool:
        free = not self.samples or self.taken < self.samples
        self.taken += free
        return free

    def cancel(self, size_bytes: int) -> None:
        self.taken -= 1

    def empty(self, shape: tuple[int, ...], dtype: type[Any]) -> np.ndarray:
        return np.empty(shape, dtype)


class Rank:
    """One process."""

    def __init__(self, number: int, membership: Membership, ledger: Ledger, room: Room) -> None:
        self.number, self.membership, self.ledger, self.room = number, membership, ledger, room
        self.links: dict[str, Link] = {}
        """By address; those that this end has not let go of."""
        self.held: list[SampleId] = []
        """Received, in order."""
        self.at_work: list[SampleId] = []
        """Taken by the trainer, and in no finished step."""
        self.attached = self.finished = False
        self.failure: tuple[str, str] | None = None
        """(code of the refusal, in words): why it ended."""
        self.alive = True

    def perform(self, actions: Sequence[a.Action]) -> None:
        for action in actions:
            match action:
                case a.Say(address, message):
                    if (link := self.links.get(address)) is not None:
                        link.send_up(message)
                case a.Drop(address) | a.Closing(address) | a.Leave(address):
                    self._unlink(address)
                case a.Deliver(sample):
                    self.held.append(sample.id)
                case a.Attached():
                    self.attached = True
                case a.Finished():
                    self.finished = True
                case a.Fail(error):
                    self.failure = (getattr(error, "code", type(error).__name__), str(error))
                    self.die()
                case _:
                    pass

    def received(self, address: str, data: bytes, frame: bytes | None) -> None:
        message = m.decode_from_producer(data)
        frames = [memoryview(frame)] if frame is not None else None
        self.perform(self.membership.received(address, message, frames))

    def linked(self, address: str, link: Link) -> None:
        self.links[address] = link
        self.perform(self.membership.linked(address))

    def unlinked(self, address: str) -> None:
        self._unlink(address)
        self.perform(self.membership.unlinked(address))

    def missing(self) -> list[str]:
        """Addresses that it is not connected to and should be."""
        wanted = [peer.address for peer in self.membership.peers if peer.wanted]
        return [one for one in wanted if one not in self.links] if self.alive else []

    def die(self) -> None:
        self.alive = False
        for address in list(self.links):
            self._unlink(address)

    def _unlink(self, address: str) -> None:
        if (link := self.links.pop(address, None)) is not None:
            link.close_member()


class Group:
    """One life of the training run: all ranks were started together."""

    def __init__(
        self,
        life: int,
        ranks: int,
        addresses: list[str],
        attach: a.Attach,
        new_name: Callable[[], str],
        room_samples: int = 0,
    ) -> None:
        self.life, self.size, self.addresses, self.attach = life, ranks, addresses, attach
        self._new_name, self._room_samples = new_name, room_samples
        self.incarnation = new_name()
        self.loaded: Checkpoint | None = None
        self.weights: list[SampleId] = []
        self.saving: list[Checkpoint] = []
        """State was taken, the files are not yet durable."""
        self.saved: list[Checkpoint] = []
        """Durable, and not yet said to be."""
        self.safe: LedgerState = BEFORE_THE_FIRST
        """Of the last durable checkpoint."""
        self.draining = False
        self.ranks: list[Rank] = []
        self._add_rank(0, 1)

    @property
    def alive(self) -> bool:
        """Whether every rank that was started still runs."""
        return all(rank.alive for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """Every rank was told that everything is terminal."""
        return len(self.ranks) == self.size and all(rank.finished for rank in self.ranks)

    @property
    def training(self) -> bool:
        return self.alive and self.loaded is not None and len(self.ranks) == self.size

    def _add_rank(self, number: int, term: int) -> Rank:
        name, room, ledger = self._new_name(), Room(self._room_samples), Ledger()
        identity = a.Identity(
            group="run",
            member=str(number),
            members=self.size,
            leader=number == 0,
            incarnation=self.incarnation,
            process=name,
        )
        options = Options(attach=self.attach, term=term)
        membership = Membership(self.addresses, identity, room, ledger, options)
        self.ranks.append(Rank(number, membership, ledger, room))
        return self.ranks[-1]

    @property
    def may_load(self) -> bool:
        return self.alive and self.ranks[0].attached and self.loaded is None

    def load(self, checkpoint: Checkpoint) -> None:
        """Chosen when the leader has the stream; it has told the others its term by then."""
        self.loaded = checkpoint
        self.weights = list(checkpoint.weights)
        self.safe = checkpoint.state
        term = self.ranks[0].membership.term
        self._open(self.ranks[0])
        for number in range(1, self.size):
            self._open(self._add_rank(number, term))

    def _open(self, rank: Rank) -> None:
        assert self.loaded is not None
        if self.loaded.key > (0, 0):
            rank.ledger.load(plain(self.loaded.state))
        rank.perform(rank.membership.open())

    # the trainer

    def take(self, rank: Rank) -> None:
        id = rank.held.pop(0)
        rank.at_work.append(id)
        rank.ledger.take(id)
        rank.perform(rank.membership.at_work(rank.ledger.at_work))

    def train(self, rank: Rank) -> None:
        """The rank's sample alone: the others have a batch of weight zero."""
        ids = rank.at_work
        rank.at_work = []
        rank.ledger.train(ids)
        self.weights += ids
        self.check_weights()
        rank.room.taken -= len(ids)
        rank.perform([*rank.membership.at_work(rank.ledger.at_work), *rank.membership.grant()])

    def reject(self, rank: Rank) -> None:
        rank.perform(rank.membership.reject(rank.held.pop(0), "policy"))
        rank.room.taken -= 1
        rank.perform(rank.membership.grant())

    def drain(self) -> None:
        """Nothing more is asked for, and what the trainer has not seen goes back."""
        self.draining = True
        for rank in self.ranks:
            unseen, rank.held = rank.held, []
            rank.room.taken -= len(unseen)
            rank.perform(rank.membership.drain(unseen))

    @property
    def may_leave(self) -> bool:
        """Drained, and everything that was trained is in a commit that was said."""
        saving = self.saving or self.saved or self.may_save
        return self.draining and self.training and not saving

    def leave(self) -> None:
        for rank in self.ranks:
            rank.perform(rank.membership.leave())
            rank.die()

    @property
    def may_save(self) -> bool:
        """There is something new, and nobody is in the middle of a step."""
        fresh = IdSet(self.weights) != IdSet.from_wire(self.safe.trained)
        between = not any(rank.at_work for rank in self.ranks)
        return self.training and fresh and between and not self.saving and not self.saved

    def save(self) -> None:
        states = [parse(rank.ledger.state(STREAM)) for rank in self.ranks]
        state = union(states)
        for rank in self.ranks:
            rank.ledger.join(state)
        checkpoint = Checkpoint(state, tuple(sorted(self.weights)))
        check(checkpoint)
        self.saving.append(checkpoint)

    def durable(self) -> Checkpoint:
        checkpoint = self.saving.pop(0)
        self.saved.append(checkpoint)
        self.safe = checkpoint.state
        return checkpoint

    def commit(self) -> None:
        """All that is durable was said to be."""
        (checkpoint,) = self.saved
        self.saved = []
        for rank in self.ranks:
            rank.ledger.committed(checkpoint.state)
            rank.perform(rank.membership.commit(checkpoint.state))

    def check_weights(self) -> None:
        twice = [id for id in set(self.weights) if self.weights.count(id) > 1]
        if twice:
            raise Violation(f"trained twice in one lineage: {', '.join(map(str, twice))}")


def check(checkpoint: Checkpoint) -> None:
    """What the ledger says is trained is what the weights have seen, each once."""
    said = list(IdSet.from_wire(checkpoint.state.trained))
    if said != list(checkpoint.weights):
        raise Violation(
            f"checkpoint {checkpoint.key} was trained on {list(map(str, checkpoint.weights))} "
            f"and says {list(map(str, said))}"
        )
