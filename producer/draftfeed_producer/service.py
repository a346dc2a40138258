"""The producer: prompts -> engine -> spool -> server, until every prompt is terminal."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.engines import Engine, SyntheticConfig, make_engine
from draftfeed_producer.engines.synthetic import synthetic_prompts
from draftfeed_producer.errors import SpoolFull
from draftfeed_producer.prompts import Prompt, PromptFile, prompt_limit
from draftfeed_producer.server import Listener, Server, ServerStatistics
from draftfeed_producer.spool import Spool, SpoolStatistics
from draftfeed_producer.spool.control import Tombstone
from draftfeed_producer.target import load_target
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import LayerCounters, Sample

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.5
POLL_SECONDS = 0.05
FAREWELL_SECONDS = 60.0
"""A member that has just attached may be loading its checkpoint."""


class ProducerStatistics(NamedTuple):
    phase: str
    """loading, generating, delivering or done"""
    prompts: int
    samples: int
    """Generated since the process began."""
    tokens: int
    """Fed tokens of those: their rows."""
    captured: int
    """Rows captured, of samples still being generated too."""
    recaptured: int
    """Samples made again because a row was missing. Anything but 0 deserves a look."""
    response_tokens: int
    counters: tuple[LayerCounters, ...]
    """Per layer, summed over those."""
    spool_full_seconds: float
    spool: SpoolStatistics | None
    server: ServerStatistics | None


class PromptSource(NamedTuple):
    """Prompts of one data set, and which of them exist."""

    dataset: str
    prompts: int
    unfinished: Callable[[Callable[[SampleId], bool]], Iterator[Prompt]]
    """Given `finished`, the prompts that are not, in order."""


class ProducerService:
    """Runs in the calling thread; `stop` and `statistics` may be called from others."""

    def __init__(
        self, config: ProducerConfig, observe: Callable[[Sample], None] | None = None
    ) -> None:
        """observe: called with every sample before it is encoded."""
        self._config, self._observe = config, observe
        self._stopped = threading.Event()
        self._engine: Engine | None = None
        self._spool: Spool | None = None
        self._server: Server | None = None
        self._phase = "loading"
        self._prompts = 0
        self._samples = self._tokens = self._response_tokens = 0
        self._counters: tuple[LayerCounters, ...] = ()
        self._spool_full_seconds = 0.0

    def run(self) -> None:
        """Returns when every prompt is terminal, or after `stop`. Raises ProducerError."""
        with ExitStack() as stack:
            source = self._open_prompts(stack)
            self._prompts = source.prompts
            listener = Listener(self._config.server)
            stack.callback(listener.close)
            engine = self._load_engine(stack)
            spool = Spool(self._config.spool, engine.descriptor, source.dataset)
            stack.callback(spool.close)
            server = Server(listener, spool, Delivery.of(spool, engine.descriptor))
            stack.callback(lambda: server.close(self._goodbye()))
            self._spool, self._server = spool, server
            server.start()
            logger.info("serving %s at %s", describe(engine.descriptor), listener.address)
            self._generate(engine, source, spool, server)
            self._deliver(server)

    def stop(self) -> None:
        """Generation stops within one forward pass; what is not finished is made again later.

        Safe in a signal handler: the thread it interrupts may hold the very lock that setting an
        event takes, so another thread sets it.
        """
        threading.Thread(target=self._stop, name="stop", daemon=True).start()

    def _stop(self) -> None:
        self._stopped.set()
        if self._engine is not None:
            self._engine.stop()

    def statistics(self) -> ProducerStatistics:
        return ProducerStatistics(
            self._phase,
            self._prompts,
            self._samples,
            self._tokens,
            self._engine.captured if self._engine else 0,
            self._engine.recaptured if self._engine else 0,
            self._response_tokens,
            self._counters,
            self._spool_full_seconds,
            self._spool.statistics() if self._spool else None,
            self._server.statistics() if self._server else None,
        )

    def tombstones(self) -> list[Tombstone]:
        """Prompts that ended without being trained."""
        return list(self._spool.tombstones.values()) if self._spool else []

    def _open_prompts(self, stack: ExitStack) -> PromptSource:
        engine = self._config.engine
        if isinstance(engine, SyntheticConfig):
            return synthetic_source(engine)
        target_config, prompts_config = self._config.needed()
        target = load_target(target_config)
        limit = prompt_limit(prompts_config, target.max_positions, engine.sampling.max_new_tokens)
        file = PromptFile(prompts_config, target.tokenizer, limit)
        stack.callback(file.close)
        return file_source(file)

    def _load_engine(self, stack: ExitStack) -> Engine:
        self._engine = engine = make_engine(self._config.engine, self._config.target)
        stack.callback(engine.close)
        if self._stopped.is_set():
            engine.stop()
        return engine

    def _generate(self, engine: Engine, source: PromptSource, spool: Spool, server: Server) -> None:
        self._phase = "generating"
        prompts = self._admitted(source.unfinished(spool.finished), spool, server)
        for sample in engine.run(prompts):
            self._check(server)
            self._count(sample)
            if self._observe is not None:
                self._observe(sample)
            self._store(sample, spool, server)

    def _admitted(
        self, prompts: Iterator[Prompt], spool: Spool, server: Server
    ) -> Iterator[Prompt]:
        """Back-pressure: while the spool is at its quota no prompt is given out."""
        for prompt in prompts:
            self._wait(lambda: spool.wait_for_space(WAIT_SECONDS), server)
            if self._stopped.is_set():
                return
            yield prompt

    def _store(self, sample: Sample, spool: Spool, server: Server) -> None:
        """A full disk is waited out: the sample stays in memory until it can be written."""

        def stored() -> bool:
            try:
                server.stored(spool.append(sample).header)
            except SpoolFull as error:
                logger.error("%s; generation waits for commits to free space", error)
                self._stopped.wait(WAIT_SECONDS)
                return False
            return True

        self._wait(stored, server)

    def _wait(self, done: Callable[[], bool], server: Server) -> None:
        """Until done, or stopped, or the server has failed; time beyond the first try is counted
        as a stall."""
        since = time.monotonic()
        if done():
            return
        waiting = True
        while waiting and not self._stopped.is_set():
            waiting = not done()
            self._check(server)
            now = time.monotonic()
            self._spool_full_seconds += now - since  # seen while it lasts
            since = now

    def _deliver(self, server: Server) -> None:
        if self._stopped.is_set():
            return
        self._phase = "delivering"
        server.finish()
        while not server.all_terminal.wait(WAIT_SECONDS) and not self._stopped.is_set():
            pass
        self._check(server)
        if not self._stopped.is_set():
            self._phase = "done"
            self._await_farewell(server)

    def _await_farewell(self, server: Server) -> None:
        """The member leaves when it has heard that all is terminal. Closing before that could
        take the words back: ZeroMQ drops what lies unread when a peer disconnects."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        while server.statistics().member and time.monotonic() < deadline:
            if self._stopped.wait(POLL_SECONDS):
                return

    def _check(self, server: Server) -> None:
        if server.failure is not None:
            raise server.failure

    def _goodbye(self) -> str:
        return "every prompt is terminal" if self._phase == "done" else "stopped"

    def _count(self, sample: Sample) -> None:
        self._samples += 1
        self._tokens += len(sample.hidden_states)
        self._response_tokens += int(sample.loss_mask.sum())
        before = self._counters or (LayerCounters(0, 0, 0, 0),) * len(sample.counters)
        self._counters = tuple(
            LayerCounters(*(old + new for old, new in zip(was, seen, strict=True)))
            for was, seen in zip(before, sample.counters, strict=True)
        )


def file_source(file: PromptFile) -> PromptSource:
    def unfinished(finished: Callable[[SampleId], bool]) -> Iterator[Prompt]:
        return file.prompts(k for k in range(file.lines) if not finished(file.id(k)))

    return PromptSource(file.dataset, len(file), unfinished)


def synthetic_source(config: SyntheticConfig) -> PromptSource:
    def unfinished(finished: Callable[[SampleId], bool]) -> Iterator[Prompt]:
        return (p for p in synthetic_prompts(config) if not finished(p.id))

    first = next(synthetic_prompts(config))
    return PromptSource(first.id.dataset, config.samples, unfinished)


def describe(descriptor: Descriptor) -> str:
    """One line for people."""
    ids = ",".join(map(str, descriptor.layer_ids))
    return (
        f"{descriptor.model} (layers {ids} of {descriptor.num_layers}, hidden "
        f"{descriptor.hidden_size}, {descriptor.dtype}, stream {descriptor.stream_id()[:8]})"
    )
