"""The configured engine, with capture and without, ready to be measured."""

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec.structs import replace

from draftfeed_deploy.bench_target_machine import (
    CardMemory,
    Memory,
    Others,
    ProcessMemory,
    TorchMemory,
    cards,
    nvidia_smi,
    processor,
    session,
)
from draftfeed_deploy.bench_target_result import Turn
from draftfeed_deploy.bench_target_turn import (
    OutOfTime,
    Response,
    Unusable,
    Watch,
    first_token_seconds,
    output_rate,
    prefill_rate,
)
from draftfeed_deploy.errors import BenchmarkFailed
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import Engine, SGLangConfig, TransformersConfig, make_engine
from draftfeed_producer.engines.trial import Trial
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.target import load_target
from draftfeed_proto.descriptor import Descriptor

if TYPE_CHECKING:
    from draftfeed_producer.engines.sglang.engine import SGLangEngine

TURN_SECONDS = 900.0
"""An engine that takes longer for one set of requests hangs, or nobody wants its figures."""


class Arm:
    """One engine, and what it does with a set of requests."""

    def __init__(
        self,
        engine: Engine,
        watch: Watch,
        memory: Memory,
        *,
        captures: bool,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """forget: called before memory is looked at."""
        self.captures = captures
        self._engine, self._watch = engine, watch
        self._memory, self._forget = memory, forget
        self._first = True

    def begin(self) -> None:
        """The next turn is the first at its batch, and the one whose memory is told."""
        self._first = True

    def turn(
        self, prompts: Sequence[Prompt], tokens: int, left_seconds: float | None = None
    ) -> Turn:
        """All prompts at once, `tokens` new ones each; and then their prefill alone.

        left_seconds: it is ended then, and so is the engine; None: as long as it takes, unless
        the engine hangs. Raises Unusable, OutOfTime, BenchmarkFailed, ProducerError.
        """
        began = time.monotonic()
        end = None if left_seconds is None else began + left_seconds
        if self._first:
            self._forget()
            self._memory.reset()
        generated = self._run(prompts, tokens, end)
        prefilled = self._run([_alone(prompt) for prompt in prompts], 1, end)
        memory = self._memory.peak_bytes() if self._first else None
        self._first = False
        return Turn(
            output_tokens_per_second=output_rate(generated),
            prefill_tokens_per_second=prefill_rate(prefilled),
            first_token_seconds=first_token_seconds(generated),
            memory_bytes=memory,
            seconds=time.monotonic() - began,
        )

    def warm_up(self, prompt: Prompt, start_seconds: float) -> None:
        """Starts the engine, if it starts with its first request, and touches its memory."""
        self._run_all([_alone(prompt)], TURN_SECONDS + start_seconds)

    def _run(self, prompts: Sequence[Prompt], tokens: int, end: float | None) -> list[Response]:
        self._run_all(prompts, TURN_SECONDS, end)
        return self._watch.responses(len(prompts), tokens)

    def _run_all(
        self, prompts: Sequence[Prompt], most_seconds: float, end: float | None = None
    ) -> None:
        left = math.inf if end is None else max(0.0, end - time.monotonic())
        limit_seconds = min(most_seconds, left)
        self._watch.begin()
        overdue = threading.Event()

        def give_up() -> None:
            overdue.set()
            self._engine.stop()

        timer = threading.Timer(limit_seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            for _ in self._engine.run(self._watch.feed(prompts)):
                pass
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
                raise
            raise Unusable("the GPU has not enough memory for so many at a time") from None
        finally:
            timer.cancel()
        if overdue.is_set() and left < most_seconds:
            raise OutOfTime
        if overdue.is_set():
            raise BenchmarkFailed(
                f"{len(prompts)} requests were not answered within {limit_seconds:.0f} s; try "
                "--tokens or --max-batch with less"
            )


class Machine(Protocol):
    """Where a target is measured, and how."""

    descriptor: Descriptor
    device: str
    gpus: int
    """Of a replica; a CPU counts as one."""
    dtype: str
    memory_of: str
    in_turns: bool
    others: Others

    def arms(self) -> Generator[list[Arm]]:
        """The arms that take turns; once more when others come after them. Engines of the ones
        before are closed by then, and when the iterator is."""
        ...


class TransformersMachine:
    """One engine, whose hooks are there in every other turn."""

    in_turns = True
    gpus = 1

    def __init__(self, config: ProducerConfig, engine: TransformersConfig) -> None:
        """Loads the weights. Raises what `make_engine` raises."""
        from draftfeed_producer.engines.transformers import TransformersEngine, resolve_dtype

        self._watch = Watch()
        made = make_engine(engine, config.target, config.capture, Trial(progress=self._watch))
        assert isinstance(made, TransformersEngine)
        self._engine = made
        self.descriptor = made.descriptor
        self.dtype = str(resolve_dtype(engine.dtype, engine.device)).removeprefix("torch.")
        self._memory: Memory = ProcessMemory(lambda: [os.getpid()], "this process")
        self.device = f"cpu: {processor()}"
        if engine.device != "cpu":
            import torch

            self._memory = TorchMemory(engine.device)
            self.device = torch.cuda.get_device_name(engine.device)
        self.memory_of = self._memory.what
        self.others = Others(list)

    def arms(self) -> Generator[list[Arm]]:
        bare = self._engine.uncaptured()
        try:
            yield [
                # First, when what the capture keeps for its next batch is gone.
                Arm(bare, self._watch, self._memory, captures=False, forget=self._engine.forget),
                Arm(self._engine, self._watch, self._memory, captures=True),
            ]
        finally:
            self._engine.close()


class SGLangMachine:
    """Two engines: on a CPU side by side, on a GPU, which has room for one, one by one."""

    def __init__(self, config: ProducerConfig, engine: SGLangConfig) -> None:
        assert config.target is not None
        self._config, self._engine_config = config, engine
        self._engines: list[SGLangEngine] = []
        self._cards = cards(engine.replica * engine.tp_size, engine.tp_size)
        self.in_turns = engine.args.get("device") == "cpu"
        if self.in_turns:
            # One that waits for its turn would take a core for looking whether it is there.
            args = {"sleep_on_idle": True, **engine.args}
            self._engine_config = replace(engine, args=args)
        names = [] if self.in_turns else nvidia_smi("name", self._cards)
        self.gpus = engine.tp_size
        self.device = names[0] if names else f"cpu: {processor()}"
        self.memory_of = self._memory_of([]).what
        self.others = Others(lambda: _processes(self._engines))
        self.dtype: str = "bfloat16" if engine.dtype == "auto" else engine.dtype
        target = config.target
        self.descriptor = load_target(target).descriptor(target.layer_ids, target.final)

    def arms(self) -> Generator[list[Arm]]:
        if self.in_turns:
            with self._started(False) as bare, self._started(True) as captured:
                yield [bare, captured]
            return
        for captures in (True, False):
            with self._started(captures) as arm:
                yield [arm]

    @contextmanager
    def _started(self, captures: bool) -> Iterator[Arm]:
        from draftfeed_producer.engines.sglang.engine import SGLangEngine

        watch = Watch()
        trial = Trial(progress=watch, captures=captures)
        config = self._config
        engine = make_engine(self._engine_config, config.target, config.capture, trial)
        assert isinstance(engine, SGLangEngine)
        self._engines.append(engine)
        try:
            yield Arm(engine, watch, self._memory_of([engine]), captures=captures)
        finally:
            self._engines.remove(engine)
            engine.close()

    def _memory_of(self, engines: "list[SGLangEngine]") -> Memory:
        if self.device.startswith("cpu"):
            whose = "the engine's processes, added up"
            return ProcessMemory(lambda: _processes(engines), whose)
        return CardMemory(self._cards)


def _processes(engines: "list[SGLangEngine]") -> list[int]:
    leaders = [engine.session for engine in engines if engine.session is not None]
    return [pid for leader in leaders for pid in session(leader)]


def _alone(prompt: Prompt) -> Prompt:
    """One pass over it, as in prefill mode, for one token that is not kept."""
    return replace(prompt, response_ids=np.zeros(1, np.int32))
