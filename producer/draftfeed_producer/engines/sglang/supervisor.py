"""The life of the engine: it is started, tried once, and started again when it dies."""

import itertools
import logging
import queue
import time
from typing import Any

import numpy as np

from draftfeed_producer.engines.sglang.messages import (
    Abort,
    Attached,
    Failed,
    Finished,
    Progress,
    Response,
    Start,
    Started,
    Submit,
    Told,
)
from draftfeed_producer.engines.sglang.process import Died, HostProcess
from draftfeed_producer.engines.sglang.rows import (
    Arrived,
    NoRows,
    PositionRows,
    RowStore,
    SlotRows,
    check_memory,
)
from draftfeed_producer.engines.sglang.slabs import SlabShape
from draftfeed_producer.errors import EngineError

logger = logging.getLogger(__name__)

MOST_DEATHS = 3
"""In a row, without a sample in between."""
_HOOK_SECONDS = 30.0
_POLL_SECONDS = 0.2

Event = Response | Progress | Finished | Died
"""Died: whatever was submitted before is lost."""


class Supervisor:
    """One thread uses it; only `interrupt` may be called from others."""

    def __init__(
        self,
        python: str | None,
        start: Start,
        slabs: SlabShape,
        *,
        by_slot: bool,
        final: bool,
        start_timeout_seconds: float,
        response_tokens: int,
    ) -> None:
        """final: the last layer of a row is the final state. response_tokens: of the longest one
        that is generated."""
        self._python, self._start_command, self._slabs = python, start, slabs
        self._by_slot, self._final = by_slot, final
        self._start_timeout_seconds = start_timeout_seconds
        self._response_tokens = response_tokens
        self.most_input_tokens = 0
        """Of one request, once it has been started."""
        self._host: HostProcess | None = None
        self._events: queue.SimpleQueue[tuple[HostProcess, Told | Died | EngineError] | None]
        self._events = queue.SimpleQueue()
        self._handles = itertools.count()
        self._deaths = 0
        self._interrupted = False
        self.rows: RowStore = self._no_rows()
        self.captured = 0
        """Rows that came, those of requests that were given up included."""
        self.starting = False

    @property
    def session(self) -> int | None:
        """Of the engine's processes: the id of their host. None: it is not running."""
        return None if self._host is None else self._host.pid

    def submit(
        self,
        fed: list[int],
        most_rows: int,
        sampling: dict[str, Any],
        *,
        uncached: bool = False,
        watched: bool = False,
    ) -> int:
        """Its handle. The engine must have been started."""
        assert self._host is not None
        handle = next(self._handles)
        self.rows.open(handle, most_rows)
        self._host.send(
            Submit(
                handle=handle, input_ids=fed, sampling=sampling, uncached=uncached, watched=watched
            )
        )
        return handle

    def abort_all(self) -> None:
        if self._host is not None:
            self._host.send(Abort())

    def start(self) -> None:
        """Returns when a first request has brought its rows, or when it is interrupted; at once
        when the engine runs. Raises EngineError."""
        if self._host is not None or self._interrupted:
            return
        self.starting = True
        try:
            self._start_host()
        except EngineError:
            self._end_host()
            raise
        finally:
            self.starting = False

    def _start_host(self) -> None:
        # Those of the life before go first: there may be memory for one of them only.
        self.rows = self._no_rows()
        self._host = HostProcess(
            self._python,
            self._start_command,
            self._slabs,
            by_slot=self._by_slot,
            final=self._final,
            put=self._put,
            hear=self._hear,
        )
        logger.info("starting SGLang, process %d", self._host.pid)
        deadline = time.monotonic() + self._start_timeout_seconds
        if (started := self._await_start(deadline)) is not None:
            if self._by_slot and self._start_command.captures:
                check_memory(started.kv_tokens, self._slabs.layers, self._slabs.hidden)
            self._check_room(started)
            self._try_hook(deadline)
            figures = (started.version, started.kv_tokens)
            logger.info("SGLang %s is up, %d tokens of KV cache", *figures)

    def _check_room(self, started: Started) -> None:
        """SGLang cuts responses short that its context or its KV cache cannot hold, and calls
        them finished. Raises EngineError."""
        self.most_input_tokens = started.most_input_tokens
        if self._response_tokens > started.most_input_tokens:
            raise EngineError(
                f"max_new_tokens is {self._response_tokens}, the engine holds "
                f"{started.most_input_tokens} tokens: raise memory_fraction or lower it"
            )

    def start_again(self, reason: str) -> None:
        """Raises EngineError when it has died too often. It came up before: that it does not come
        up now, while the GPU's memory is still being freed for instance, is one more death."""
        while self._died(reason):
            try:
                return self.start()
            except EngineError as error:
                reason = str(error)
        raise EngineError(f"{reason}; {MOST_DEATHS} times in a row without a sample")

    def _died(self, reason: str) -> bool:
        """Whether to go on."""
        logger.error("%s", reason)
        self._deaths += 1
        self._end_host()
        return self._deaths < MOST_DEATHS

    def works(self) -> None:
        """A sample came out of it."""
        self._deaths = 0

    def next_event(self) -> Event | None:
        """None: nothing yet, or interrupted. Raises EngineError."""
        message = self._next(_POLL_SECONDS)
        return message if isinstance(message, Event) else None

    def interrupt(self) -> None:
        """Nothing is waited for any more."""
        self._interrupted = True
        self._events.put(None)

    def close(self) -> None:
        self.interrupt()
        self._end_host()

    def _end_host(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None

    def _put(self, arrived: Arrived) -> None:
        self.rows.put(arrived)
        self.captured += len(arrived.handles)

    def _no_rows(self) -> RowStore:
        if not self._start_command.captures:
            return NoRows(self._slabs.hidden)
        store = SlotRows if self._by_slot else PositionRows
        return store(self._slabs.layers, self._slabs.hidden)

    def _hear(self, host: HostProcess, message: Told | Died | EngineError) -> None:
        """In the host's own thread: what concerns rows must be done before the next are put.
        Raises EngineError, which will be heard."""
        if isinstance(message, Attached) and isinstance(self.rows, SlotRows):
            check_memory(message.kv_slots, self._slabs.layers, self._slabs.hidden)
            self.rows.attach(message.kv_slots)
        elif isinstance(message, Finished):
            self.rows.finish(message.handle, np.frombuffer(message.kv_slots, "<i4"))
        self._events.put((host, message))

    def _next(self, timeout_seconds: float) -> Told | Died | None:
        """Of this host. None: nothing came. Raises EngineError."""
        try:
            event = self._events.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if event is None or event[0] is not self._host:
            return None
        message = EngineError(event[1].reason) if isinstance(event[1], Failed) else event[1]
        if isinstance(message, EngineError):
            self._end_host()
            raise message
        return message

    def _await_start(self, deadline: float) -> Started | None:
        """None when interrupted. Raises EngineError."""
        while not self._interrupted:
            match self._next(_POLL_SECONDS):
                case Started() as started:
                    return started
                case Died(reason):
                    raise EngineError(f"SGLang did not start: {reason}")
            if time.monotonic() > deadline:
                seconds = self._start_timeout_seconds
                raise EngineError(
                    f"SGLang did not start within {seconds:.0f} s; [engine] start_timeout_seconds"
                )
        return None

    def _try_hook(self, deadline: float) -> None:
        """One request whose rows must come: SGLang only logs when a hook is missed.

        Raises EngineError.
        """
        fed = [1, 2, 3, 4]
        sampling = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
        handle = self.submit(fed, len(fed) + 1, sampling)
        response, finished = self._await_first(deadline)
        if response is None:
            return
        if response.finish_reason == "abort":
            raise EngineError(f"SGLang did not answer a first request: {response.error}")
        if not finished:
            raise EngineError("SGLang answers, but the capture hook did not run in its scheduler")
        ids = np.array([*fed, *response.output_ids], np.int32)[:-1]
        if isinstance(missing := self.rows.collect(handle, ids), int):
            raise EngineError(f"a first request left {missing} of {len(ids)} rows out")
        self.rows.drop(handle)

    def _await_first(self, deadline: float) -> tuple[Response | None, bool]:
        """The response, and whether its rows are said to be there. Raises EngineError."""
        response: Response | None = None
        finished = not self._start_command.captures
        while not self._interrupted and not (response and finished):
            match self._next(_POLL_SECONDS):
                case Response() as answer:
                    response = answer
                    deadline = time.monotonic() + _HOOK_SECONDS
                case Finished():
                    finished = True
                case Died(reason):
                    raise EngineError(f"SGLang did not answer a first request: {reason}")
            if time.monotonic() > deadline:
                if response is None:
                    raise EngineError("SGLang did not answer a first request in time")
                break
        return (None, False) if self._interrupted else (response, finished)
