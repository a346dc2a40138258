"""What one member holds and has trained: the ids that its checkpoints and messages speak of."""

import threading
from typing import Any

import msgspec

from draftfeed_consumer.errors import StateError
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import IdSet, SampleId, WireRanges

FORMAT = 1


class LedgerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes into a trainer's checkpoint, as plain JSON-able values."""

    format: int
    stream_id: str
    number: int
    """Commit number; rises with every state."""
    trained: WireRanges


class Ledger:
    """held: received and not yet trained. trained: an optimizer step used all of it.

    Thread-safe: the trainer acknowledges while the receiving thread adds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[SampleId] = set()
        self._trained = IdSet()
        self._committed = IdSet()
        self._number = 0
        self.trained_count = 0
        """Since this process began."""

    def hold(self, id: SampleId) -> bool:
        """Whether it is new. A sample that is held or was trained must not be trained again,
        whatever made the producer send it."""
        with self._lock:
            new = id not in self._held and id not in self._trained
            if new:
                self._held.add(id)
            return new

    def drop(self, id: SampleId) -> None:
        """Rejected or given back: no longer this member's."""
        with self._lock:
            self._held.discard(id)

    def train(self, ids: list[SampleId]) -> None:
        """Raises ValueError for an id that is not held: it would be trained twice, or was never
        delivered."""
        with self._lock:
            strange = [id for id in ids if id not in self._held]
            if strange or len(set(ids)) != len(ids):
                raise ValueError(f"not held, so not to be acknowledged: {strange or ids}")
            self._held.difference_update(ids)
            self._trained.update(ids)
            self.trained_count += len(ids)

    def state(self, stream_id: str) -> dict[str, Any]:
        """State for a checkpoint that is being made at an optimizer boundary."""
        with self._lock:
            self._number += 1
            state = LedgerState(FORMAT, stream_id, self._number, self._trained.to_wire())
        plain: dict[str, Any] = msgspec.to_builtins(state)
        return plain

    def load(self, state: dict[str, Any]) -> LedgerState:
        """Go on from a checkpoint. Raises StateError when it is not such a state."""
        loaded = parse(state)
        with self._lock:
            self._trained = IdSet.from_wire(loaded.trained)
            self._committed = self._trained.copy()
            self._number = max(self._number, loaded.number)
        return loaded

    def follow(self, number: int) -> None:
        """The producer has already stored a commit of this number."""
        with self._lock:
            self._number = max(self._number, number)

    def committed(self, state: LedgerState) -> None:
        with self._lock:
            self._committed = IdSet.from_wire(state.trained)

    def opening(self) -> tuple[WireRanges, list[SampleId]]:
        """(in a durable checkpoint, everything else this member has)"""
        with self._lock:
            uncommitted = set(self._trained - self._committed)
            return self._committed.to_wire(), sorted(self._held | uncommitted)

    @property
    def held_count(self) -> int:
        return len(self._held)


def parse(state: dict[str, Any]) -> LedgerState:
    """Raises StateError when a checkpoint's state is not one of ours."""
    try:
        loaded = msgspec.convert(state, LedgerState)
        IdSet.from_wire(loaded.trained)
    except (msgspec.ValidationError, ProtoError) as error:
        raise StateError(f"not a draftfeed state: {error}") from error
    if loaded.format != FORMAT:
        raise StateError(f"a state of format {loaded.format}, this draftfeed reads {FORMAT}")
    return loaded
