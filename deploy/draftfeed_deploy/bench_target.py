"""`draftfeed bench target`: what the configured engine does at each batch, captured and not.

Nothing of the configured run is touched: there is no spool, no server, and no sample is kept.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from statistics import fmean, median
from typing import NamedTuple

from msgspec.structs import replace
from rich.console import Console

from draftfeed_deploy.bench_target_arms import Arm, Machine, SGLangMachine, TransformersMachine
from draftfeed_deploy.bench_target_result import Result, Turn, point
from draftfeed_deploy.bench_target_sweep import (
    FLAT,
    FLAT_DOUBLINGS,
    Budget,
    Rate,
    batches,
    expected_seconds,
    flat,
)
from draftfeed_deploy.bench_target_turn import OutOfTime, Unusable
from draftfeed_deploy.errors import BenchmarkFailed, ConfigError
from draftfeed_deploy.foreground import phase
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import TARGETLESS, SGLangConfig, TransformersConfig
from draftfeed_producer.errors import ProducerError
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.service import open_prompts
from draftfeed_producer.sources import PromptSource
from draftfeed_producer.target import load_target
from draftfeed_proto.ids import SampleId

logger = logging.getLogger(__name__)

ROUNDS = 3
"""At a batch; fewer where time is short."""
MOST_PROMPTS = 512
"""Different ones; a larger batch has some of them more than once."""


FAILURES = (Unusable, OutOfTime, BenchmarkFailed, ProducerError, RuntimeError, OSError)
"""Of an engine. What was measured before one is worth having."""


class Options(NamedTuple):
    """None: as the engine suggests."""

    most: int | None = None
    """The largest batch."""
    tokens: int | None = None
    """Of each response."""
    minutes: float | None = None
    """Of all of it. At the first batch each engine has one round, however long that takes."""
    began: float | None = None
    """By time.monotonic(). None: now."""


class Size(NamedTuple):
    """Of the whole benchmark."""

    most: int
    tokens: int
    minutes: float
    began: float


def measure(config: ProducerConfig, where: str, options: Options, console: Console) -> Result:
    """Raises ConfigError, BenchmarkFailed, and what the engine raises."""
    engine = config.engine
    if isinstance(engine, TARGETLESS):
        raise ConfigError(where, "bench target runs a target, and this engine has none")
    size = size_of(engine, options)
    with ExitStack() as stack:
        with phase(console, "reading the prompt file"):
            pool = _pool(config, open_prompts(config, stack), size)
        with phase(console, "loading the target"):
            machine = _machine(config, engine, size)
        return Benchmark(machine, engine, pool, size, console).run()


def size_of(engine: TransformersConfig | SGLangConfig, options: Options) -> Size:
    """Small where a CPU has to do it."""
    if isinstance(engine, TransformersConfig):
        most, on_gpu = engine.batch_size, engine.device != "cpu"
    else:
        most, on_gpu = engine.concurrency, engine.args.get("device") != "cpu"
    return Size(
        most=options.most or most,
        tokens=options.tokens or (128 if on_gpu else 32),
        minutes=options.minutes or (20.0 if on_gpu else 2.0),
        began=time.monotonic() if options.began is None else options.began,
    )


class Benchmark:
    def __init__(
        self,
        machine: Machine,
        engine: TransformersConfig | SGLangConfig,
        pool: Sequence[Prompt],
        size: Size,
        console: Console,
    ) -> None:
        self._machine, self._engine, self._pool = machine, engine, pool
        self._size, self._console = size, console
        self._turns: dict[tuple[int, bool], list[Turn]] = {}
        """By batch, and whether it was captured."""

    def run(self) -> Result:
        """Raises BenchmarkFailed when there is nothing at all."""
        cuts: list[str] = []
        with closing(self._machine.arms()) as groups:
            try:
                self._measure_all(groups, cuts)
            except FAILURES as error:
                if not self._turns:
                    raise
                cuts.append(_words(error))
        return self._result("; then ".join(cuts))

    def _measure_all(self, groups: Iterable[list[Arm]], cuts: list[str]) -> None:
        wanted = list(batches(self._size.most))
        for number, arms in enumerate(groups):
            cut = self._measure_group(number, arms, wanted, flat if number == 0 else _never)
            # Those that come after are to be compared: at the same batches, however flat.
            wanted = sorted({batch for batch, _ in self._turns})
            cuts += [cut] if cut else []
            if not wanted:
                raise BenchmarkFailed(f"nothing could be measured: {cut}")

    def _measure_group(
        self,
        number: int,
        arms: Sequence[Arm],
        wanted: Sequence[int],
        ends: Callable[[Sequence[Rate]], bool],
    ) -> str:
        """Why it ended before all that was wanted, or nothing. The first of two that come one after
        the other has half of the time."""
        ways = " and ".join("with capture" if arm.captures else "without" for arm in arms)
        with phase(self._console, f"first requests, {ways}"):
            for arm in arms:
                arm.warm_up(_requests(self._pool, 1, 0)[0], self._start_seconds)
        share = 0.5 if number == 0 and not self._machine.in_turns else 1.0
        budget = Budget(60 * self._size.minutes * share, began=self._size.began)
        self._machine.others.begin()
        try:
            return self._sweep(arms, wanted, ends, budget)
        finally:
            self._machine.others.end()

    def _sweep(
        self,
        arms: Sequence[Arm],
        wanted: Sequence[int],
        ends: Callable[[Sequence[Rate]], bool],
        budget: Budget,
    ) -> str:
        found: list[Rate] = []
        seconds = 0.0
        for batch in wanted:
            if found and not budget.allows(expected_seconds(seconds, found[-1].batch, batch)):
                return f"time was up before batch {batch}: --minutes gives more"
            try:
                with phase(self._console, f"batch {batch}"):
                    first, last = batch == wanted[0], batch == wanted[-1]
                    rounds = self._rounds(arms, batch, budget, first=first, last=last)
            except OutOfTime:
                return f"time was up in batch {batch}: --minutes gives more"
            except FAILURES as error:
                # What was found is worth having, also when a larger batch was too much.
                if not found and not isinstance(error, Unusable):
                    raise
                return f"batch {batch}: {_words(error)}"
            self._keep(batch, rounds)
            seconds = _seconds(rounds[-1])
            found.append(Rate(batch, _output(rounds, arms[-1].captures)))
            if ends(found) and batch != wanted[-1]:
                return f"{FLAT_DOUBLINGS} doublings in a row gave less than {FLAT:.0%} each"
        return ""

    def _rounds(
        self, arms: Sequence[Arm], batch: int, budget: Budget, *, first: bool, last: bool
    ) -> list[dict[bool, Turn]]:
        """One at least. Who is first changes from round to round. Another round must not take the
        time of the next batch. Raises what the first one does, OutOfTime but at the first batch."""
        for arm in arms:
            arm.begin()
        rounds: list[dict[bool, Turn]] = []
        while len(rounds) < ROUNDS:
            prompts = _requests(self._pool, batch, len(rounds))
            order = arms if len(rounds) % 2 == 0 else arms[::-1]
            try:
                rounds.append(
                    {
                        arm.captures: arm.turn(
                            prompts,
                            self._size.tokens,
                            None if first and not rounds else budget.left_seconds,
                        )
                        for arm in order
                    }
                )
            except OutOfTime:
                if not rounds:
                    raise
                break
            except FAILURES as error:
                if not rounds:
                    raise
                logger.warning("batch %d, round %d: %s", batch, len(rounds) + 1, _words(error))
                break
            seconds = _seconds(rounds[-1])
            if not budget.allows(seconds if last else seconds + 2 * seconds):
                break
        return rounds

    def _keep(self, batch: int, rounds: Sequence[dict[bool, Turn]]) -> None:
        words = []
        for captures in sorted(rounds[0], reverse=True):
            self._turns[batch, captures] = [turns[captures] for turns in rounds]
            how = "with capture" if captures else "without"
            words.append(f"{_output(rounds, captures):.1f} tokens/s {how}")
        logger.info("batch %d: %s", batch, ", ".join(words))

    @property
    def _start_seconds(self) -> float:
        engine = self._engine
        return engine.start_timeout_seconds if isinstance(engine, SGLangConfig) else 0.0

    def _result(self, cut: str) -> Result:
        machine = self._machine
        return Result(
            format="draftfeed-bench-target-1",
            target=machine.descriptor.model,
            engine="sglang" if isinstance(self._engine, SGLangConfig) else "transformers",
            device=machine.device,
            gpus_per_replica=machine.gpus,
            output_includes_prefill=False,
            prompt_tokens=fmean(len(prompt.input_ids) for prompt in self._pool),
            response_tokens=self._size.tokens,
            points=tuple(point(*key, turns) for key, turns in sorted(self._turns.items())),
            dtype=machine.dtype,
            layer_ids=machine.descriptor.layer_ids,
            hidden_size=machine.descriptor.hidden_size,
            prompts=len(self._pool),
            memory_of=machine.memory_of,
            in_turns=machine.in_turns,
            most=self._size.most,
            cut=cut,
            cores=len(os.sched_getaffinity(0)),
            others_cores=machine.others.cores,
        )


def _words(error: Exception) -> str:
    """One line, whatever torch has to say."""
    return " ".join((str(error) or type(error).__name__).split())[:500]


def _never(rates: Sequence[Rate]) -> bool:
    return False


def _seconds(turns: dict[bool, Turn]) -> float:
    return sum(turn.seconds for turn in turns.values())


def _output(rounds: Sequence[dict[bool, Turn]], captures: bool) -> float:
    return median(turns[captures].output_tokens_per_second for turns in rounds)


def _pool(config: ProducerConfig, source: PromptSource, size: Size) -> list[Prompt]:
    """Prompts from all over the file, without their responses. Raises ConfigError."""
    target, prompts = config.needed()
    longest = load_target(target).max_positions - size.tokens
    wanted = min(ROUNDS * size.most, MOST_PROMPTS)
    ids = itertools.islice(source.ids, 0, None, max(1, len(source.ids) // wanted))
    found = (prompt for id in ids if (prompt := source.find(id)) is not None)
    fitting = (prompt for prompt in found if len(prompt.input_ids) <= longest)
    pool = [replace(one, response_ids=None) for one in itertools.islice(fitting, wanted)]
    if not pool:
        raise ConfigError(prompts.path, f"no prompt leaves room for {size.tokens} more tokens")
    return pool


def _requests(pool: Sequence[Prompt], batch: int, number: int) -> list[Prompt]:
    """Of that round: others than in the last one, as far as there are. Each with an id of its own,
    which is what an engine draws tokens by."""
    dataset = pool[0].id.dataset
    chosen = itertools.islice(itertools.cycle(pool), number * batch, (number + 1) * batch)
    return [replace(one, id=SampleId(dataset, 0, 0, i)) for i, one in enumerate(chosen)]


def _machine(
    config: ProducerConfig, engine: TransformersConfig | SGLangConfig, size: Size
) -> Machine:
    sampling = replace(engine.sampling, max_new_tokens=size.tokens)
    if isinstance(engine, TransformersConfig):
        changed = replace(engine, sampling=sampling, batch_size=size.most)
        return TransformersMachine(config, changed)
    most = max(engine.concurrency, size.most)
    return SGLangMachine(config, replace(engine, sampling=sampling, concurrency=most))
