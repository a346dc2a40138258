"""One engine of capture.py, which stands still but for its turns."""

import os
import queue
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from capture_host import ARM
from draftfeed_producer.engines.sglang import process
from draftfeed_producer.engines.sglang.engine import KNOWN_VERSIONS
from draftfeed_producer.engines.sglang.messages import (
    Failed,
    Finished,
    Response,
    Start,
    Started,
    Submit,
    Told,
)
from draftfeed_producer.engines.sglang.process import Died, HostProcess
from draftfeed_producer.engines.sglang.rows import PositionRows
from draftfeed_producer.engines.sglang.slabs import SlabShape
from draftfeed_producer.errors import EngineError
from rounds import cpu_seconds

_WAIT_SECONDS = 600.0
"""For an engine to start, and for the next of a round's responses."""
_AUXILIARY = (
    "speculative_algorithm",
    "enable_return_aux_hidden_states",
    "return_aux_hidden_state_layer_ids",
)
"""The arguments that make SGLang keep the layers."""


class Turn(NamedTuple):
    """What one arm did in one round."""

    tokens: int
    seconds: float
    scheduler_cpu_seconds: float
    receiver_cpu_seconds: float
    rows: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.scheduler_cpu_seconds / self.tokens


class _TimedHost(HostProcess):
    receiver_cpu_seconds = 0.0
    """Of the thread that takes rows out of the slabs."""

    def _dispatch(self, message: Told) -> None:
        start = time.thread_time()
        super()._dispatch(message)
        self.receiver_cpu_seconds += time.thread_time() - start


@contextmanager
def _our_host() -> Iterator[None]:
    """The module that is started, for this engine only: others in this process have their own."""
    before = process._HOST
    process._HOST = "capture_host"
    try:
        yield
    finally:
        process._HOST = before


class Arm:
    def __init__(self, name: str, python: str, arguments: dict[str, Any], slabs: SlabShape) -> None:
        """off: SGLang keeps no layers. aux: it does, and nobody takes them. on, timed: we do."""
        if name == "off":
            arguments = {key: arguments[key] for key in arguments if key not in _AUXILIARY}
        self.name = name
        self._captures = name in ("on", "timed")
        self._rows = PositionRows(slabs.layers, slabs.hidden)
        self._row_count = 0
        self._told: queue.SimpleQueue[Told | Died | EngineError] = queue.SimpleQueue()
        os.environ[ARM] = name
        with _our_host():
            self._host = _TimedHost(
                python,
                Start(args=arguments, known_versions=KNOWN_VERSIONS),
                slabs,
                by_slot=False,
                final=False,
                put=self._put,
                hear=lambda _, message: self._told.put(message),
            )
        try:
            self._await_start()
        except BaseException:
            self._host.close()
            raise
        self._scheduler = _scheduler_of(self._host.pid)
        self.pause()

    def pause(self) -> None:
        """An idle scheduler looks for requests all the time, and would take a core for that."""
        os.killpg(self._host.pid, signal.SIGSTOP)

    def turn(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Turn:
        os.killpg(self._host.pid, signal.SIGCONT)
        rows, received = self._row_count, self._host.receiver_cpu_seconds
        cpu, start = cpu_seconds(self._scheduler), time.perf_counter()
        sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        for handle, ids in enumerate(prompts):
            self._rows.open(handle, len(ids) + new_tokens)
            self._host.send(Submit(handle=handle, input_ids=list(ids), sampling=sampling))
        responses = self._responses(len(prompts))
        seconds = time.perf_counter() - start
        cpu = cpu_seconds(self._scheduler) - cpu
        self.pause()
        self._check(prompts, responses)
        return Turn(
            sum(len(response.output_ids) for response in responses.values()),
            seconds,
            cpu,
            self._host.receiver_cpu_seconds - received,
            self._row_count - rows,
        )

    def close(self) -> None:
        os.killpg(self._host.pid, signal.SIGCONT)
        self._host.close()

    def _put(self, arrived: Any) -> None:
        self._rows.put(arrived)
        self._row_count += len(arrived.handles)

    def _await_start(self) -> None:
        while not isinstance(self._next(), Started):
            pass

    def _next(self) -> Told:
        """Ends the run when there will be none."""
        try:
            message = self._told.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            raise SystemExit(f"nothing came from the arm {self.name!r} in time") from None
        match message:
            case Failed(reason) | Died(reason):
                raise SystemExit(f"the engine of the arm {self.name!r} has ended: {reason}")
            case EngineError():
                raise SystemExit(f"the engine of the arm {self.name!r}: {message}")
        return message

    def _responses(self, count: int) -> dict[int, Response]:
        """When every response is there, and with a capture the word that all rows are."""
        responses: dict[int, Response] = {}
        finished: set[int] = set() if self._captures else set(range(count))
        while len(responses) < count or len(finished) < count:
            match self._next():
                case Response() as response if response.finish_reason == "length":
                    responses[response.handle] = response
                case Finished(handle=handle):
                    finished.add(handle)
                case Response(error=reason):
                    raise SystemExit(f"a request of the arm {self.name!r} broke off: {reason}")
        return responses

    def _check(self, prompts: Sequence[Sequence[int]], responses: dict[int, Response]) -> None:
        """A capture that leaves rows out would be a cheap one."""
        for handle, ids in enumerate(prompts):
            if self._captures:
                fed = np.array([*ids, *responses[handle].output_ids], np.int32)[:-1]
                collected = self._rows.collect(handle, fed)
                assert not isinstance(collected, int), f"{collected} of {len(fed)} rows are missing"
            self._rows.drop(handle)


def _scheduler_of(host: int) -> int:
    """The process that SGLang's scheduler is, among those the host has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name = (entry / "cmdline").read_bytes()
            if name.startswith(b"sglang::scheduler") and os.getpgid(int(entry.name)) == host:
                return int(entry.name)
        except OSError:
            continue
    raise SystemExit("SGLang runs, but none of its processes is named sglang::scheduler")
