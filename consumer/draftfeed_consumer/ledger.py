"""What one member holds and has trained: the ids that its checkpoints and messages speak of."""

import threading
from typing import Any, NamedTuple

import msgspec

from draftfeed_consumer.errors import StateError
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import IdSet, SampleId, Shards, WireRanges

FORMAT = 3


class LedgerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes into a trainer's checkpoint, as plain JSON-able values. It speaks for the whole
    group, so that any number of ranks can load it."""

    format: int
    stream_id: str
    term: int
    """In which it was made."""
    number: int
    """Commit number; rises with every state."""
    parent: int
    """Number of the state it descends from; 0 for the first."""
    trained: WireRanges


class Opening(NamedTuple):
    """What a member says when it begins to take samples of one producer."""

    trained: WireRanges
    """In a durable checkpoint."""
    held: list[SampleId]
    """Everything else this member has."""
    term: int
    number: int
    """Of that checkpoint."""


class Ledger:
    """held: received and not yet trained. at work: held, and the trainer has taken it. trained:
    an optimizer step used all of it.

    Thread-safe: the trainer acknowledges while the receiving thread adds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[SampleId] = set()
        self._at_work: set[SampleId] = set()
        self._refused: set[SampleId] = set()
        """Never to be trained. Claimed like held ones, or the producer would send them again
        before it has heard the verdict."""
        self._trained = IdSet()
        self._committed = IdSet()
        self._durable = (0, 0)
        """(term, number) of the checkpoint that holds `_committed`."""
        self._number = 0
        """Highest known, here or at a producer."""
        self._parent = 0
        self._term = 0
        self.began = (0, 0)
        """(term, number) of the checkpoint this process began with; zeros without one."""
        self.trained_count = 0
        """Since this process began."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    # the receiving thread

    def hold(self, id: SampleId) -> bool:
        """Whether it is new. A sample that is held or was trained must not be trained again,
        whatever made the producer send it."""
        with self._lock:
            known = id in self._held or id in self._trained or id in self._refused
            if not known:
                self._held.add(id)
            return not known

    def drop(self, id: SampleId) -> None:
        """Given back: no longer this member's."""
        with self._lock:
            self._held.discard(id)
            self._at_work.discard(id)

    def refuse(self, id: SampleId) -> None:
        """It will not be trained."""
        with self._lock:
            self._held.discard(id)
            self._at_work.discard(id)
            self._refused.add(id)

    def follow(self, term: int, number: int) -> None:
        """States made from now on are of this term, with a number above this one."""
        with self._lock:
            self._term = term
            self._number = max(self._number, number)

    def opening(self, shards: Shards | None = None) -> Opening:
        """shards: leave out what lies elsewhere."""
        with self._lock:
            committed, uncommitted = self._committed, self._trained - self._committed
            held = self._held | self._refused | set(uncommitted)
            if shards is not None:
                committed = committed.within(shards)
                held = {id for id in held if id.partition in shards}
            return Opening(committed.to_wire(), sorted(held), *self._durable)

    # the trainer

    def take(self, id: SampleId) -> None:
        """The trainer has it."""
        with self._lock:
            self._at_work.add(id)

    def train(self, ids: list[SampleId]) -> None:
        """Raises ValueError for an id that is not held: it would be trained twice, or was never
        delivered."""
        with self._lock:
            strange = [id for id in ids if id not in self._held]
            if strange or len(set(ids)) != len(ids):
                raise ValueError(f"not held, so not to be acknowledged: {strange or ids}")
            self._held.difference_update(ids)
            self._at_work.difference_update(ids)
            self._trained.update(ids)
            self.trained_count += len(ids)

    def state(self, stream_id: str) -> dict[str, Any]:
        """State for a checkpoint that is being made at an optimizer boundary."""
        with self._lock:
            trained = self._trained.to_wire()
            number, parent = self._number + 1, self._parent
            state = LedgerState(FORMAT, stream_id, self._term, number, parent, trained)
            self._number = self._parent = number
        return plain(state)

    def join(self, state: LedgerState) -> None:
        """The group's ranks made one state of theirs: go on from its number."""
        with self._lock:
            self._number = self._parent = state.number

    def load(self, state: dict[str, Any]) -> LedgerState:
        """Go on from a checkpoint. Raises StateError when it is not such a state."""
        loaded = parse(state)
        with self._lock:
            self._trained = IdSet.from_wire(loaded.trained)
            self._committed = self._trained.copy()
            self._durable = (loaded.term, loaded.number)
            self.began = self._durable
            self._number = max(self._number, loaded.number)
            self._parent = loaded.number
        return loaded

    def committed(self, state: LedgerState) -> None:
        """That checkpoint is durable. What other ranks trained is in it too."""
        durable = IdSet.from_wire(state.trained)
        with self._lock:
            self._committed = durable
            self._trained.update(durable)
            self._durable = (state.term, state.number)

    # anyone

    @property
    def at_work(self) -> list[SampleId]:
        """What the trainer has taken and not yet trained."""
        with self._lock:
            return sorted(self._at_work & self._held)

    @property
    def uncommitted(self) -> bool:
        """Whether a checkpoint made now would hold more than the last durable one."""
        with self._lock:
            return bool(self._trained - self._committed)

    @property
    def uncommitted_count(self) -> int:
        """Samples that such a checkpoint would add."""
        with self._lock:
            return len(self._trained - self._committed)

    @property
    def held_count(self) -> int:
        return len(self._held)


def plain(state: LedgerState) -> dict[str, Any]:
    """As it goes into a checkpoint."""
    values: dict[str, Any] = msgspec.to_builtins(state)
    return values


def parse(state: dict[str, Any]) -> LedgerState:
    """Raises StateError when a checkpoint's state is not one of ours."""
    if isinstance(state, dict) and state.get("format", FORMAT) != FORMAT:
        raise StateError(f"a state of format {state['format']}, this draftfeed reads {FORMAT}")
    try:
        loaded = msgspec.convert(state, LedgerState)
        IdSet.from_wire(loaded.trained)
    except (msgspec.ValidationError, ProtoError) as error:
        raise StateError(f"not a draftfeed state: {error}") from error
    return loaded


def union(states: list[LedgerState]) -> LedgerState:
    """One state of a group: the first rank's, with what all of them trained."""
    trained = IdSet()
    for state in states:
        trained.update(IdSet.from_wire(state.trained))
    return msgspec.structs.replace(states[0], trained=trained.to_wire())
