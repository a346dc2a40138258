"""Which prompt the engine gets next, and when."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from draftfeed_producer.archive.shelf import Shelf
from draftfeed_producer.delivery import QUARANTINED_BEFORE
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.quality import GateFigures
from draftfeed_producer.responses import Gatekeeper
from draftfeed_producer.server import Server
from draftfeed_producer.sources import PromptSource
from draftfeed_producer.spool import Spool
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.5


class _Prompts(Iterator[Prompt]):
    """Other iterators stay at their end. Engines ask again while they run, and what could not be
    given before may be there then."""

    def __init__(self, prompt_now: Callable[[], Prompt | None]) -> None:
        self._prompt_now = prompt_now

    def __next__(self) -> Prompt:
        prompt = self._prompt_now()
        if prompt is None:
            raise StopIteration
        return prompt


class Admission:
    """Gives out every owned prompt that is not finished, once, while the spool has room.

    Samples to be generated again come first. Those of a spool that is gone come last and only when
    a trainer has said what it trained: nobody else knows. One thread uses it.
    """

    def __init__(
        self,
        source: PromptSource,
        spool: Spool,
        server: Server,
        stopped: threading.Event,
        gate: Gatekeeper | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        """gate: when it closes, no prompt is given out any more; until it has judged its first
        window, no more at a time than it allows. shelf: where samples that exist already are to be
        had; those are not given out."""
        self._gate, self._shelf = gate, shelf
        self._source, self._spool, self._server, self._stopped = source, spool, server, stopped
        self._owned = source.ids.within(spool.shards)
        self.prompts = len(self._owned)
        self._epochs = deque(spool.shards.each_epoch)
        """Not begun yet."""
        self._fresh: Iterator[SampleId] | None = None
        """Of the epoch; None when all were given out."""
        self._lost: Iterator[SampleId] | None = None
        """Of the epoch. None: there are none, or they are the fresh ones by now."""
        self._again: deque[SampleId] = deque()
        self._begun: dict[SampleId, int] = {}
        """Given out, and neither stored nor given up yet, and how many were before each."""
        self._given = 0
        self._alarm = ""
        self.full_seconds = 0.0
        """Time in which the spool had no room."""
        self.output_full_seconds = 0.0
        """Time in which what is written beside the stream had none."""
        self._begin_epoch()

    def prompts_now(self) -> Iterator[Prompt]:
        """Ends when nothing may be generated now, and goes on when it is asked later, or called
        again."""
        return _Prompts(self._prompt_now)

    def finished(self, sample: Sample) -> None:
        """Before it is stored, which it is, whatever the gate says of it."""
        if self._gate is not None:
            self._gate.look_at(sample, self._begun.get(sample.id, self._given))

    def _prompt_now(self) -> Prompt | None:
        while not self._enough_begun and (id := self._next()) is not None:
            self.wait(self._spool.wait_for_space)
            if self._stopped.is_set() or self._server.failure is not None or self.closed:
                return None
            prompt = self._prompt(id)
            if prompt is not None:
                self._begun[id] = self._given
                self._given += 1
                return prompt
        return None

    @property
    def _enough_begun(self) -> bool:
        most = self._gate.most_running if self._gate is not None else None
        return most is not None and len(self._begun) >= most

    @property
    def closed(self) -> bool:
        return bool(self.closed_because)

    @property
    def closed_because(self) -> str:
        """Of the quality gate; empty while it is open."""
        return self._gate.alarm if self._gate is not None else ""

    @property
    def quality(self) -> GateFigures:
        return self._gate.figures if self._gate is not None else GateFigures()

    def stored(self, id: SampleId) -> None:
        """Or given up."""
        self._begun.pop(id, None)

    @property
    def ready(self) -> bool:
        """Whether `prompts_now` has something to give again."""
        if self.closed:
            return False
        self._begin_epoch()
        fresh = self._fresh is not None or self._may_begin_lost
        return fresh or bool(self._again) or not self._server.regenerate.empty()

    @property
    def over(self) -> bool:
        """Whether every prompt of every epoch was given out."""
        return self._given_out and not self._epochs

    @property
    def _given_out(self) -> bool:
        """Of the epoch, by the engine's samples or the shelf's."""
        on_shelf = self._shelf is not None and not self._shelf.exhausted
        return self._fresh is None and self._lost is None and not on_shelf

    def _begin_epoch(self) -> None:
        """When all of the last one is stored: what exists of a line is known only then."""
        waiting = self._begun or self._again or not self._server.regenerate.empty()
        if not self._given_out or waiting or not self._epochs:
            return
        epoch = self._epochs.popleft()
        ids = self._owned.within(self._spool.shards.one_epoch(epoch)) - self._spool.committed
        if self._shelf is not None:
            there = ids & self._shelf.lines().in_epoch(epoch)
            self._shelf.begin(epoch, there)
            ids = ids - there
        lost = ids.within(self._spool.lost)
        self._fresh = iter(ids - lost)
        self._lost = iter(lost) if lost else None

    def wait(self, done: Callable[[float], bool], *, for_output: bool = False) -> None:
        """Until done, or stopped, or the server has failed; all but the first try is counted as a
        stall, of the spool or of the output. `done` is given the seconds it may take to find
        out."""
        if done(0.0):
            self._tell_alarm()
            return
        since = time.monotonic()
        waiting = True
        while waiting and not self._stopped.is_set() and self._server.failure is None:
            self._tell_alarm()
            waiting = not done(WAIT_SECONDS)
            now = time.monotonic()
            if for_output:  # seen while it lasts
                self.output_full_seconds += now - since
            else:
                self.full_seconds += now - since
            since = now
        self._tell_alarm()

    @property
    def _may_begin_lost(self) -> bool:
        return self._lost is not None and self._server.ledger_known.is_set()

    def _next(self) -> SampleId | None:
        while not self._server.regenerate.empty():
            self._again.extend(self._server.regenerate.get())
        if self._again:
            return self._again.popleft()
        if self._fresh is None and self._may_begin_lost:
            self.wait(self._settle)
            self._fresh, self._lost = self._lost, None
        id = next(self._fresh, None) if self._fresh is not None else None
        if id is None:
            self._fresh = None
        return id

    def _settle(self, pause_seconds: float) -> bool:
        """Write down that what the trainer does not have of the lost shards is made again."""
        try:
            again = self._spool.settle_lost(self._source.ids)
        except OSError as error:
            logger.error("the control log cannot be written (%s); trying again", error)
            self._stopped.wait(pause_seconds)
            return False
        logger.warning("%d samples of lost shards are generated again", len(again))
        self._server.settled(again)
        return True

    def _prompt(self, id: SampleId) -> Prompt | None:
        """None when it has become finished by now, in another epoch for good, or turns out to be no
        prompt."""
        if id in self._begun or self._spool.finished(id):
            return None
        if self._spool.quarantined(id):
            self._server.quarantine(id, QUARANTINED_BEFORE)
            return None
        prompt = self._source.find(id)
        if prompt is None:
            self._server.skip(IdSet([id]))
        return prompt

    def _tell_alarm(self) -> None:
        """Once when it begins and once when it ends."""
        alarm = self._spool.alarm
        if bool(alarm) == bool(self._alarm):  # its figures change all the time
            return
        if alarm:
            logger.error("generation is paused: %s", alarm)
        else:
            used = self._spool.statistics()
            figures = (used.bytes, used.quota_bytes)
            logger.warning("generation goes on: the spool is back at %d of %d bytes", *figures)
        self._alarm = alarm
