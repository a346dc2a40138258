"""A producer: the real delivery core and control state, on a disk and an engine that are modelled.

Durable: what the control log was given (the real `Control` adds it up), and samples that were
synced. One that was only written survives the death of the process, not the loss of power.
"""

from collections.abc import Callable

from draftfeed_producer.delivery import Delivery, Stored
from draftfeed_producer.session import (
    Action,
    Regenerate,
    Send,
    SendChunk,
    Store,
    StoreCommit,
    StoreSuspects,
    StoreTerm,
    StoreTombstone,
    Verify,
    Void,
)
from draftfeed_producer.spool import control
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader
from model_link import Link, Violation
from model_samples import DESCRIPTOR, frames, header, id_of, shards_of

KEEP_COMMITS = 2
TIMEOUT_SECONDS = 10.0


class Producer:
    def __init__(
        self, number: int, samples: int, links: dict[bytes, Link], new_name: Callable[[], str]
    ) -> None:
        self.number = number
        self.prompts = [id_of(number, ordinal) for ordinal in range(samples)]
        self._links, self._new_name = links, new_name
        self.delivery: Delivery | None = None
        """None while the process is down."""
        self.engine: list[SampleId] = []
        """To be generated, in order."""
        self.finished = False
        self.full = False
        """The next record of the control log cannot be written."""
        self.blocked: list[Action] = []
        """What waits behind the record that cannot be written."""
        self.lossy = False
        """Records were lost with a spool or with the power: a rollback may have to regenerate."""
        self.copies: dict[SampleId, int] = {}
        """How often each sample was generated."""
        self.new_disk(lost=False)

    def new_disk(self, *, lost: bool) -> None:
        """lost: its operator says that another one is gone."""
        self.control = control.Control(KEEP_COMMITS)
        shards = shards_of(self.number)
        self.control.apply(control.Owned(shards, shards if lost else _none(self.number)))
        self.records: dict[SampleId, bool] = {}
        """Whether the record was synced, oldest first."""
        self.stores: list[IdSet] = []
        """What each commit since the last rollback contained: to check the control state by."""

    # the process

    def start(self, now: float) -> None:
        state = self.control
        last = state.commits[-1] if state.commits else None
        stored = Stored(
            committed=state.committed,
            commit_term=last.term if last else 0,
            commit_number=last.number if last else 0,
            term=state.term,
            suspects=dict(state.suspects),
            tombstones={id: one.state for id, one in state.tombstones.items()},
            regenerated=state.regenerated,
            samples=[header(id) for id in self.records if self._unfinished(id)],
            header_of=self.header_of,
        )
        self.delivery = Delivery(
            DESCRIPTOR,
            shards_of(self.number),
            IdSet(self.prompts),
            stored,
            session_timeout_seconds=TIMEOUT_SECONDS,
            now=now,
            make_name=self._new_name,
        )
        self.engine = [id for id in self.prompts if not self._known(id)]
        self.finished = False
        self.full, self.blocked = False, []

    def stop(self) -> None:
        self.delivery = None
        self.engine, self.blocked, self.full = [], [], False

    def lose_power(self) -> None:
        self.stop()
        self.lossy = True
        self.records = {id: True for id, synced in self.records.items() if synced}

    def header_of(self, id: SampleId) -> SampleHeader | None:
        return header(id) if id in self.records else None

    @property
    def core(self) -> Delivery:
        assert self.delivery is not None
        return self.delivery

    # the engine

    @property
    def may_generate(self) -> bool:
        waits = self.control.owned is not None and self.control.owned.lost.ranges
        ready = not waits or (self.delivery is not None and self.delivery.ledger_known)
        return self.delivery is not None and bool(self.engine) and not self.blocked and bool(ready)

    def generate(self, *, synced: bool) -> None:
        """The next prompt, when nothing was found out about it meanwhile."""
        id = self.engine.pop(0)
        if not self._known(id):
            self.records[id] = synced
            self.copies[id] = self.copies.get(id, 0) + 1
            self.perform(self.core.stored(header(id)))

    @property
    def may_finish(self) -> bool:
        up = self.delivery is not None and not self.blocked
        return up and not self.engine and not self.finished

    def finish(self) -> None:
        self.finished = True
        self.perform(self.core.finish())

    def _known(self, id: SampleId) -> bool:
        return id in self.records or not self._unfinished(id)

    def _unfinished(self, id: SampleId) -> bool:
        return id not in self.control.committed and id not in self.control.tombstones

    # the server

    def received(self, sender: bytes, data: bytes, now: float) -> None:
        message = m.decode_from_member(data)
        actions = self.core.received(sender, message, now)
        if isinstance(message, m.Commit) and any(isinstance(a, StoreCommit) for a in actions):
            self._check_fence(message)
        self.perform(actions)

    def disconnected(self, sender: bytes, now: float) -> None:
        self.perform(self.core.disconnected(sender, now))

    def perform(self, actions: list[Action]) -> None:
        """In order, up to a record that cannot be written; then all that may be sent."""
        for at, action in enumerate(actions):
            if self.full and isinstance(action, Store):
                self.blocked = actions[at:]
                return
            self._perform(action)
        self._pump()

    def unblock(self) -> None:
        self.full = False
        waiting, self.blocked = self.blocked, []
        self.perform(waiting)

    def _perform(self, action: Action) -> None:
        match action:
            case Send(sender, message):
                self._send(sender, message)
            case SendChunk(sender, message):
                frame = frames(message.id)[message.index] if message.id in self.records else None
                if frame is not None:  # else it became terminal meanwhile
                    self._send(sender, message, frame)
                    self.core.sent(sender, len(frame))
            case Verify(id):
                self.perform(self.core.verified(id, True))
            case Regenerate(ids):
                self.engine[:0] = [id for id in ids if id not in self.engine]
            case _:
                self._store(action)

    def _pump(self) -> None:
        for sender in list(self.core.fencing.attached):
            while actions := self.core.next_chunk(sender):
                for action in actions:
                    self._perform(action)

    def _send(self, sender: bytes, message: m.Message, frame: bytes | None = None) -> None:
        link = self._links.get(sender)
        if link is not None and link.producer_open:
            link.send_down(message, frame)

    def _store(self, action: Store) -> None:
        match action:
            case StoreTerm():
                self.control.apply(control.Term(*action[:4]))
            case StoreSuspects():
                self.control.apply(control.Suspects(list(action.counts.items())))
            case StoreTombstone():
                self.control.apply(control.Tombstone(*action))
            case StoreCommit(number, trained, term, rollback):
                before = self.control.committed
                gone = [id for id in before - trained if id not in self.records] if rollback else []
                again = IdSet(gone).to_wire()
                record = control.Commit(number, trained.to_wire(), term, rollback, again)
                self.control.apply(record)
                self.stores = [*([] if rollback else self.stores), trained.copy()]
            case Void(id, _):
                del self.records[id]
        self._free()

    def _free(self) -> None:
        """At once, though a real spool waits for a segment to fill."""
        free = self.control.freeable
        for id in list(self.records):
            if id in free:
                self._check_freeing(id)
            if id in free or id in self.control.tombstones:
                del self.records[id]

    # what must hold

    def _check_fence(self, commit: m.Commit) -> None:
        assert self.control.term is not None
        if commit.term != self.control.term.term:
            raise Violation(
                f"producer {self.number} took a commit of term {commit.term} in term "
                f"{self.control.term.term}"
            )

    def _check_freeing(self, id: SampleId) -> None:
        kept = self.stores[-KEEP_COMMITS:]
        if len(kept) < KEEP_COMMITS or not all(id in commit for commit in kept):
            raise Violation(f"{id} is freed, and not in each of the last {KEEP_COMMITS} commits")


def _none(number: int) -> Shards:
    shards = shards_of(number)
    return Shards(shards.dataset, shards.epoch, ())
