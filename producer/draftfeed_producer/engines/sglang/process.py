"""The producer's end of its engine: starts it, hears it, and ends it with all it has started."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import numpy as np
import zmq

from draftfeed_producer.engines.sglang import messages
from draftfeed_producer.engines.sglang.messages import (
    VARIABLE,
    Command,
    Copied,
    Freed,
    Quit,
    Settings,
    Start,
    Started,
    Told,
)
from draftfeed_producer.engines.sglang.rows import Arrived
from draftfeed_producer.engines.sglang.slabs import SharedSlabs, SlabShape
from draftfeed_producer.errors import EngineError

logger = logging.getLogger(__name__)

_TAIL_LINES = 40
_POLL_MS = 100
_LINE_BYTES = 1 << 16
_LOG_SECONDS = 5.0
"""A process that left the engine's group may hold its output open."""
_QUIT_SECONDS = 20.0
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_HOST = "draftfeed_producer.engines.sglang.host"


class Died(msgspec.Struct, frozen=True):
    """The host has ended without being told to."""

    reason: str


class HostProcess:
    """One life of the engine.

    A thread of its own takes rows out of the shared memory as they come, so that the engine
    never waits for whoever stores samples.
    """

    def __init__(
        self,
        python: str | None,
        start: Start,
        slabs: SlabShape,
        *,
        by_slot: bool,
        final: bool,
        put: Callable[[Arrived], None],
        hear: Callable[["HostProcess", Told | Died | EngineError], None],
    ) -> None:
        """put: called with rows as they come. hear: with everything else, in the order in which
        it was told. Both from the thread; what they raise ends it, and is the last that is heard.
        Raises EngineError."""
        self._put, self._hear = put, hear
        self._closing = threading.Event()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._is_up = False
        with ExitStack() as resources:
            self._slabs = SharedSlabs.create(slabs)
            resources.callback(self._slabs.close)
            directory = tempfile.TemporaryDirectory(prefix="draftfeed-engine-")
            self._directory = resources.enter_context(directory)
            self._context: zmq.Context[Any] = zmq.Context()
            resources.callback(self._context.destroy, linger=0)
            self._commands = self._bind(zmq.PUSH, "commands")
            self._told = self._bind(zmq.PULL, "told")
            self._freed = self._bind(zmq.PUSH, "freed")
            self._freed.setsockopt(zmq.SNDTIMEO, _POLL_MS)
            settings = self._settings(slabs, by_slot=by_slot, final=final)
            self._process = self._launch(python or sys.executable, settings, start)
            self._resources = resources.pop_all()
        self._views = [self._slabs.slab(index) for index in range(slabs.count)]
        self._log_thread = threading.Thread(target=self._read_log, name="engine-log", daemon=True)
        self._thread = threading.Thread(target=self._receive, name="engine-rows", daemon=True)
        self._log_thread.start()
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Not from the thread that hears. Lost when the engine has died, which will be heard."""
        with suppress(zmq.Again):
            self._commands.send(messages.encode(command), zmq.NOBLOCK)

    def close(self) -> None:
        """Ends the engine, politely if it listens: not while it starts. Nothing is heard any
        more."""
        self._closing.set()
        if self._is_up and self._process.poll() is None:
            self.send(Quit())
            try:
                self._process.wait(_QUIT_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("the engine did not end within %.0f s: killed", _QUIT_SECONDS)
        self._kill_group()
        self._process.wait()
        with suppress(BrokenPipeError):  # what it had never read is still to be written
            self._lifeline.close()
        self._thread.join()
        self._log_thread.join(_LOG_SECONDS)
        self._views.clear()
        self._resources.close()

    def _settings(self, slabs: SlabShape, *, by_slot: bool, final: bool) -> Settings:
        return Settings(
            told=self._address("told"),
            freed=self._address("freed"),
            memory=self._slabs.path,
            slabs=slabs.count,
            slab_rows=slabs.rows,
            layers=slabs.layers,
            hidden=slabs.hidden,
            by_slot=by_slot,
            final=final,
        )

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def _bind(self, kind: int, name: str) -> Any:
        socket = self._context.socket(kind)
        # Bounded by the slabs and by the requests in the engine.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        try:
            socket.bind(self._address(name))
        except zmq.ZMQError as error:
            address = self._address(name)
            raise EngineError(f"{address}: {error.strerror}; choose another TMPDIR") from None
        return socket

    def _launch(self, python: str, settings: Settings, start: Start) -> "subprocess.Popen[bytes]":
        """In a process group of its own: a Ctrl-C at the terminal is for the producer, which
        ends the engine when it is done with it. Raises EngineError."""
        command = [python, "-m", _HOST, self._address("commands"), self._address("told")]
        environment = {**_ENVIRONMENT, **os.environ}
        environment.pop(VARIABLE, None)
        if start.captures:
            environment[VARIABLE] = msgspec.json.encode(settings).decode()
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"[engine] python {python}: {error.strerror}") from None
        assert process.stdin is not None
        self._lifeline = process.stdin
        with suppress(BrokenPipeError):
            self._lifeline.write(msgspec.json.encode(start) + b"\n")
            self._lifeline.flush()
        return process

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        # Not line by line: who writes no line end must not fill the memory.
        while raw := self._process.stdout.readline(_LINE_BYTES):
            line = raw.decode(errors="replace").rstrip()
            self._tail.append(line)
            logger.debug("engine: %s", line)
        self._process.stdout.close()

    def _receive(self) -> None:
        try:
            self._hear_all()
        except EngineError as error:
            self._hear(self, error)
        # Whoever waits for this thread must not wait for ever.
        except Exception as error:
            logger.exception("the engine's rows cannot be used")
            words = str(error).strip().partition("\n")[0]
            self._hear(self, EngineError(f"the engine tells nonsense: {words}"))

    def _hear_all(self) -> None:
        while not self._closing.is_set():
            if self._told.poll(_POLL_MS):
                self._dispatch(messages.decode_told(self._told.recv()))
            elif self._process.poll() is not None:
                self._hear(self, Died(self._obituary()))
                return

    def _dispatch(self, message: Told) -> None:
        if isinstance(message, Copied):
            self._put(self._arrived(message))
            self._give_back(message.slab)
            return
        self._is_up |= isinstance(message, Started)
        self._hear(self, message)

    def _give_back(self, slab: int) -> None:
        """The engine has fewer slabs for ever if it does not hear of it; it may still be
        connecting, or dead."""
        word = messages.encode(Freed(slab))
        while not self._closing.is_set() and self._process.poll() is None:
            with suppress(zmq.Again):
                self._freed.send(word)
                return

    def _arrived(self, message: Copied) -> Arrived:
        slab = self._views[message.slab]
        handles, positions, tokens, kv_slots = (
            np.frombuffer(raw, "<i4")
            for raw in (message.handles, message.positions, message.tokens, message.kv_slots)
        )
        m = len(handles)
        return Arrived(handles, positions, tokens, kv_slots, slab.rows[:m], slab.counters[:m])

    def _obituary(self) -> str:
        self._kill_group()
        self._log_thread.join(_LOG_SECONDS)
        code, tail = self._process.returncode, list(self._tail)
        how = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        errors = [line for line in tail if "Error" in line or "error" in line]
        last = (errors or tail or ["it printed nothing"])[-1].strip()
        return f"the engine ended with {how}; last words: {last}"

    def _kill_group(self) -> None:
        """Whatever it has started that is still there."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return str(number)
