"""The checks see what they are for: each of these mistakes, made in the real cores, is found."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from draftfeed_consumer.ledger import Ledger
from draftfeed_producer.authority import Authority
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.session import Action, StoreCommit
from draftfeed_producer.spool.control import Control
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet
from model_group import Group
from model_link import Violation
from model_search import Search
from model_world import Scope

Patch = pytest.MonkeyPatch
ONE = Scope(producers=1, ranks=1, samples=1)
LIMIT_STATES = 20_000


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def no_fence(patch: Patch) -> None:
    """Nobody looks at the term and the session of a commit."""
    received = Delivery.received

    def anyone(self: Any, sender: bytes, message: Any, now: float) -> list[Action]:
        if not isinstance(message, m.Commit) or self.fencing.owned(sender, message):
            return received(self, sender, message, now)
        key, trained = (message.term, message.number), IdSet.from_wire(message.trained)
        if self._commit_fault(key, trained):
            return []
        stored = self.authority.advance(key, trained)
        self._out.forget_trained(trained)
        return [stored]

    patch.setattr(Delivery, "received", anyone)


def commit_before_durable(patch: Patch) -> None:
    save = Group.save

    def save_and_commit(self: Group) -> None:
        save(self)
        for rank in self.ranks:
            rank.ledger.committed(self.saving[-1].state)
            rank.perform(rank.membership.commit(self.saving[-1].state))

    patch.setattr(Group, "save", save_and_commit)


def union_merge(patch: Patch) -> None:
    """The producer's commits are added to what the checkpoint says."""
    follow = Authority.follow

    def unite(self: Authority, opening: m.Open, trained: IdSet) -> StoreCommit | None:
        trained = trained.copy()
        trained.update(self.committed)
        return follow(self, opening, trained)

    patch.setattr(Authority, "refusal", lambda *_: None)
    patch.setattr(Authority, "follow", unite)


def lease_expiry(patch: Patch) -> None:
    """A lease of ten seconds, however alive its member."""
    received = Delivery.received
    leased_at = "leased_at"

    def expire(self: Any, sender: bytes, message: Any, now: float) -> list[Action]:
        since = self.__dict__.setdefault(leased_at, {})
        for member in self.fencing.members.values():
            late = {id for id in member.leased if now - since.setdefault(id, now) > 10}
            member.drop(late)
            self.stock.give_back(sorted(late))
        return received(self, sender, message, now)

    patch.setattr(Delivery, "received", expire)


def returned_when_cut(patch: Patch) -> None:
    """A lease ends with the connection of its member."""
    disconnected = Delivery.disconnected

    def give_back(self: Any, sender: bytes, now: float) -> list[Action]:
        member = self.fencing.attached.get(sender)
        actions = disconnected(self, sender, now)
        if member is not None:
            self.stock.give_back(sorted(member.leased))
            member.drop(set(member.leased))
        return [*actions, *self._out.offers()]

    patch.setattr(Delivery, "disconnected", give_back)


def delivered_is_trained(patch: Patch) -> None:
    state = Ledger.state

    def with_held(self: Any, stream_id: str) -> Any:
        self._trained.update(self._held)
        return state(self, stream_id)

    patch.setattr(Ledger, "state", with_held)


def free_at_the_last_commit(patch: Patch) -> None:
    """Without waiting for the oldest checkpoint that may be restored."""
    patch.setattr(Control, "freeable", property(lambda self: self.committed))


def forgotten_lease(patch: Patch) -> None:
    """What a member still has is given to others when it attaches again."""
    opening = Delivery._open

    def deaf(self: Any, member: Any, session: Any, message: m.Open, now: float) -> list[Action]:
        message = msgspec.structs.replace(message, held=[])
        return opening(self, member, session, message, now)

    patch.setattr(Delivery, "_open", deaf)


Mutant = tuple[Callable[[Patch], None], Scope, int, set[str], str]
"""(the mistake, how much to search, faults, their kinds, what is found)"""
MUTANTS: dict[str, Mutant] = {
    "no fence": (no_fence, ONE, 3, {"stall", "take_over"}, "took a commit of term 1"),
    "commit before the save is durable": (commit_before_durable, ONE, 0, set(), "durable"),
    "union merge": (
        union_merge,
        Scope(1, 1, 2, early_saves=True),
        1,
        {"roll_back"},
        "in one place",
    ),
    "leases expire": (lease_expiry, Scope(1, 2, 2), 1, {"cut"}, "trained twice|for ever"),
    "leases end with the link": (returned_when_cut, Scope(1, 2, 2), 1, {"cut"}, "trained twice"),
    "delivered counts as trained": (
        *(delivered_is_trained, Scope(1, 1, 2, early_saves=True), 0, set()),
        "was trained on",
    ),
    "freed at the last commit": (
        *(free_at_the_last_commit, Scope(1, 1, 2, early_saves=True), 0, set()),
        "is freed",
    ),
    "held samples are handed out again": (
        *(forgotten_lease, Scope(1, 2, 2), 1, {"cut"}),
        "trained twice",
    ),
}

SEARCHED = {
    (scope, faults, tuple(sorted(kinds)))
    for _, scope, faults, kinds, _ in MUTANTS.values()
    if faults < 2
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_mistake_is_found(
    mutant: Mutant,
    monkeypatch: Patch,
    record_property: Callable[[str, object], None],
) -> None:
    make, scope, faults, kinds, words = mutant
    make(monkeypatch)
    search = Search(scope, faults, kinds=frozenset(kinds), limit_states=LIMIT_STATES)
    with pytest.raises(Violation, match=words) as caught:
        search.run()
    record_property("found", f"{str(caught.value).splitlines()[0]} ({search.states} states)")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("searched", sorted(SEARCHED))
def test_without_a_mistake_the_same_searches_find_nothing(
    searched: tuple[Scope, int, tuple[str, ...]],
) -> None:
    scope, faults, kinds = searched
    Search(scope, faults, kinds=frozenset(kinds)).run()
