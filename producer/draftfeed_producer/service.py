"""The producer: prompts -> engine -> spool -> server, until every prompt is terminal."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from draftfeed_producer.admission import Admission
from draftfeed_producer.archive import Archive, ArchivedSpool, ArchiveStatistics
from draftfeed_producer.archive.roots import same_contents
from draftfeed_producer.archive.sealed import Interrupted
from draftfeed_producer.archive.shelf import Shelf
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.conversations import Conversations, Writer
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.engines import Engine, ReplayConfig, SyntheticConfig, make_engine
from draftfeed_producer.engines.replay import ReplayEngine
from draftfeed_producer.errors import ArchiveError, ProducerError, SpoolFull
from draftfeed_producer.listener import Listener
from draftfeed_producer.prompts import PromptFile, prompt_limit
from draftfeed_producer.quality import GateFigures
from draftfeed_producer.responses import Gatekeeper, ResponseReader
from draftfeed_producer.server import Server, ServerStatistics
from draftfeed_producer.sources import PromptSource, file_source, replay_source, synthetic_source
from draftfeed_producer.spool import Spool, SpoolStatistics
from draftfeed_producer.spool.control import Tombstone
from draftfeed_producer.target import Target, end_tokens, load_target
from draftfeed_proto import codecs
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import SampleId
from draftfeed_proto.limits import MAX_SAMPLE_BYTES
from draftfeed_proto.sample import LayerCounters, Sample, decoded_bytes, longest_rows

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
FAREWELL_SECONDS = 60.0
"""A member that has just attached may be loading its checkpoint."""


class ProducerStatistics(NamedTuple):
    phase: str
    """loading, generating, delivering or done"""
    prompts: int
    """Of the shards that are owned."""
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
    closed_because: str = ""
    """Of the quality gate; empty while it is open."""
    quality: GateFigures = GateFigures()
    output_full_seconds: float = 0.0
    output_alarm: str = ""
    """Why [output] conversations cannot be written; empty while they can."""
    replayed: int = 0
    """Samples that came out of the archive, or once more out of the spool, since it began."""
    archive: ArchiveStatistics | None = None
    unsealed: int = 0
    """Segments that are not archived though it is done: the next start does that."""


class ProducerService:
    """Runs in the calling thread; `stop` and `statistics` may be called from others."""

    def __init__(
        self, config: ProducerConfig, observe: Callable[[Sample], None] | None = None
    ) -> None:
        """observe: called with every sample before it is encoded."""
        self._config, self._observe = config, observe
        self._stopped = threading.Event()
        self._listener: Listener | None = None
        self._engine: Engine | None = None
        self._spool: Spool | None = None
        self._shelf: Shelf | None = None
        self._server: Server | None = None
        self._admission: Admission | None = None
        self._conversations: Conversations | None = None
        self._output_alarm = ""
        self._last: ProducerStatistics | None = None
        """When it has ended, and the spool is closed."""
        self._phase = "loading"
        self._unsealed = 0
        self._samples = self._tokens = self._response_tokens = 0
        self._counters: tuple[LayerCounters, ...] = ()

    def run(self) -> None:
        """Returns when every prompt is terminal, or after `stop`. Raises ProducerError, and
        UnavailableISA when the environment asks for a codec that cannot run here."""
        codecs.PACKED.prepare()
        with suppress(Interrupted), ExitStack() as stack:
            source = open_prompts(self._config, stack, self._stopped.is_set)
            listener = self._listener = Listener(self._config.server)
            stack.callback(listener.close)
            self._conversations = self._output(source, stack)  # what is wrong costs no loading
            engine = self._load_engine(source, stack)
            spool, shelf = self._open_spool(engine, source, stack)
            if self._conversations is not None:
                self._conversations.reconcile(spool, source.ids.within(spool.shards))
            delivery = self._delivery(engine, source, spool, listener.handover.name)
            target, no_target = self._target_directory()
            server = Server(listener, spool, delivery, target, shelf, no_target=no_target)
            stack.callback(lambda: server.close(self._goodbye()))
            gate = self._gate(source)
            admission = Admission(source, spool, server, self._stopped, gate, shelf)
            self._spool, self._server, self._admission = spool, server, admission
            self._shelf = shelf
            stack.callback(self._keep_statistics)
            server.skip(source.skipped.within(spool.shards))
            server.start()
            logger.info("serving %s at %s", describe(engine.descriptor), listener.address)
            self._serve(engine, admission, spool, server)

    def stop(self) -> None:
        """Generation stops within one forward pass; what is not finished is made again later.

        Safe in a signal handler: the thread it interrupts may hold the very lock that setting an
        event takes, so another thread sets it.
        """
        threading.Thread(target=self._stop, name="stop", daemon=True).start()

    def reload(self) -> None:
        """Read again what may change while it runs: the keys of the clients."""
        access = self._listener.access if self._listener else None
        if access is None:
            logger.info("nothing to reload: there are no keys")
            return
        clients, faults = access.reload()
        for fault in faults:
            logger.error("%s; what was known of it stays", fault)
        logger.log(logging.INFO if clients else logging.WARNING, "%d clients are known", clients)
        if self._server is not None:
            self._server.shut_out()

    def _stop(self) -> None:
        self._stopped.set()
        if self._engine is not None:
            self._engine.stop()
        if isinstance(self._spool, ArchivedSpool):
            self._spool.interrupt()

    def statistics(self) -> ProducerStatistics:
        return self._last or self._statistics()

    def _keep_statistics(self) -> None:
        self._last = self._statistics()

    def _statistics(self) -> ProducerStatistics:
        spool = self._spool
        return ProducerStatistics(
            "loading" if self._engine and self._engine.loading else self._phase,
            self._admission.prompts if self._admission else 0,
            self._samples,
            self._tokens,
            self._engine.captured if self._engine else 0,
            self._engine.recaptured if self._engine else 0,
            self._response_tokens,
            self._counters,
            self._admission.full_seconds if self._admission else 0.0,
            spool.statistics() if spool else None,
            self._server.statistics() if self._server else None,
            self._admission.closed_because if self._admission else "",
            self._admission.quality if self._admission else GateFigures(),
            self._admission.output_full_seconds if self._admission else 0.0,
            self._output_alarm,
            self._shelf.served if self._shelf else 0,
            spool.archive_statistics() if isinstance(spool, ArchivedSpool) else None,
            self._unsealed,
        )

    @property
    def descriptor(self) -> Descriptor | None:
        """None until the engine knows it."""
        return self._engine.descriptor if self._engine else None

    def tombstones(self) -> list[Tombstone]:
        """Prompts that ended without being trained."""
        return list(self._spool.tombstones.values()) if self._spool else []

    def _gate(self, source: PromptSource) -> Gatekeeper | None:
        if source.responses is None:
            return None
        return Gatekeeper(source.responses, self._config.quality)

    def _output(self, source: PromptSource, stack: ExitStack) -> Conversations | None:
        path = self._config.output.conversations
        if source.writer is None or path is None:
            return None
        conversations = Conversations(Path(path).expanduser(), source.writer)
        stack.callback(conversations.close)
        return conversations

    def _open_spool(
        self, engine: Engine, source: PromptSource, stack: ExitStack
    ) -> tuple[Spool, Shelf | None]:
        """(the spool, where samples of later epochs come from)"""
        config, descriptor = self._config, engine.descriptor
        if config.archive is None:
            spool = Spool(config.spool, descriptor, source.shards)
            stack.callback(spool.close)
            return spool, None
        archive = source.archive
        if archive is None:
            archive = Archive(
                config.archive, descriptor, source.shards, source.ids, self._stopped.is_set
            )
            stack.callback(archive.close)
        archived = ArchivedSpool(config.spool, descriptor, source.shards, archive)
        stack.callback(archived.close)
        return archived, Shelf(archived)

    def _load_engine(self, source: PromptSource, stack: ExitStack) -> Engine:
        config = self._config
        if source.archive is not None:
            self._engine = ReplayEngine(source.archive)
            return self._engine
        self._engine = engine = make_engine(config.engine, config.target, config.capture)
        stack.callback(engine.close)
        if self._stopped.is_set():
            engine.stop()
        return engine

    def _target_directory(self) -> tuple[Path | None, str]:
        """(of which trainers get some files, why there is none)"""
        if isinstance(self._config.engine, ReplayConfig):
            return None, "an archive has no files of its target: give [trainer] target"
        if self._config.target is None:
            return None, "the synthetic engine has no target"
        return Path(self._config.target.path).expanduser(), ""

    def _delivery(self, engine: Engine, source: PromptSource, spool: Spool, local: str) -> Delivery:
        config, descriptor = self._config.server, engine.descriptor
        rows = engine.max_rows(source.longest_prompt)
        if isinstance(spool, ArchivedSpool):
            rows = max(rows, spool.archive.longest_rows)
        largest = decoded_bytes(rows, descriptor.layers, descriptor.hidden_size)
        return Delivery.of(
            spool,
            descriptor,
            source.ids.within(spool.shards),
            max_sample_bytes=min(largest, MAX_SAMPLE_BYTES),
            session_timeout_seconds=config.session_timeout_seconds,
            quarantine_after_terms=config.quarantine_after_terms,
            local=local,
            now=time.monotonic(),
        )

    def _serve(self, engine: Engine, admission: Admission, spool: Spool, server: Server) -> None:
        """Until every prompt is terminal. The engine runs whenever there is something to make:
        the list once, and then whatever proves to be lost."""
        self._phase = "generating"
        while not self._over(server):
            if admission.ready:
                self._generate(engine, admission, spool, server)
            elif admission.over and self._phase == "generating":
                self._phase = "delivering"
                server.finish()
            else:
                if admission.closed:
                    self._phase = "delivering"  # and more may come, after a restart
                self._stopped.wait(POLL_SECONDS)
        self._check(server)
        if not self._stopped.is_set():
            self._phase = "done"
            self._await_farewell(server)
            if isinstance(spool, ArchivedSpool):
                self._unsealed = spool.archive_rest()

    def _over(self, server: Server) -> bool:
        return server.all_terminal.is_set() or self._stopped.is_set()

    def _generate(self, engine: Engine, admission: Admission, spool: Spool, server: Server) -> None:
        give_up = partial(self._give_up, admission, server)
        for sample in engine.run(admission.prompts_now(), give_up):
            self._check(server)
            self._count(sample)
            if self._observe is not None:
                self._observe(sample)
            admission.finished(sample)
            admission.wait(partial(self._stored, sample, spool, server))
            admission.wait(partial(self._written, sample), for_output=True)
            admission.stored(sample.id)

    def _stored(self, sample: Sample, spool: Spool, server: Server, pause_seconds: float) -> bool:
        """A full disk is waited out: the sample stays in memory until it can be written."""
        try:
            server.stored(spool.append(sample).header)
        except SpoolFull:
            self._stopped.wait(pause_seconds)
            return False
        return True

    def _written(self, sample: Sample, pause_seconds: float) -> bool:
        """Beside the stream. A full disk is waited out, too; what a stop leaves out is written at
        the next start."""
        if self._conversations is None:
            return True
        try:
            self._conversations.write(sample)
        except OSError as error:
            if not self._output_alarm:
                alarm = f"[output] conversations cannot be written: {error.strerror}"
                logger.error("%s; generation waits for it", alarm)
                self._output_alarm = alarm
            self._stopped.wait(pause_seconds)
            return False
        if self._output_alarm:
            logger.warning("[output] conversations can be written again")
            self._output_alarm = ""
        return True

    def _give_up(self, admission: Admission, server: Server, id: SampleId, reason: str) -> None:
        """A prompt that cannot be made ends here, and holds nobody up."""
        logger.error("sample %s is given up: %s", id, reason)
        server.quarantine(id, reason)
        admission.stored(id)

    def _await_farewell(self, server: Server) -> None:
        """The member leaves when it has heard that all is terminal. Closing before that could
        take the words back: ZeroMQ drops what lies unread when a peer disconnects."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        while server.statistics().members and time.monotonic() < deadline:
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


def open_prompts(
    config: ProducerConfig, stack: ExitStack, stopped: Callable[[], bool] = bool
) -> PromptSource:
    """Checks the whole prompt file, or archive; `stack` closes it. Raises ProducerError, and
    Interrupted when `stopped` says so while it is an archive's."""
    engine = config.engine
    if isinstance(engine, SyntheticConfig):
        return synthetic_source(engine)
    if isinstance(engine, ReplayConfig):
        return open_archive(config, engine, stack, stopped)
    target_config, prompts_config = config.needed()
    target, capture = load_target(target_config), config.capture
    descriptor = target.descriptor(target_config.layer_ids, target_config.final)
    to_come = engine.sampling.max_new_tokens if capture.mode == "live" else 0
    held = _staged_rows(descriptor, capture.staging_bytes, to_come)
    positions = _longest_sequence(target, descriptor, held)
    limit = prompt_limit(prompts_config, positions, to_come)
    vocab_size = descriptor.vocab_size
    file = PromptFile(prompts_config, target.tokenizer, limit, capture.mode, vocab_size)
    stack.callback(file.close)
    source = file_source(file, limit, ResponseReader(target.tokenizer))
    if config.output.conversations is None:
        return source
    ends = {*end_tokens(target), *engine.sampling.stop_token_ids}
    return source._replace(writer=Writer(config.output, file, target.tokenizer, ends))


def open_archive(
    config: ProducerConfig,
    replay: ReplayConfig,
    stack: ExitStack,
    stopped: Callable[[], bool] = bool,
) -> PromptSource:
    """The archive's own prompts. Raises ArchiveError."""
    assert config.archive is not None
    contents = same_contents(config.archive.roots)
    archive = Archive(config.archive, contents.descriptor, contents.prompts, stopped=stopped)
    stack.callback(archive.close)
    source = replay_source(archive, contents.prompts, replay)
    if not source.ids:
        raise ArchiveError(config.archive.roots[0], "has no sample to serve")
    return source


def _staged_rows(descriptor: Descriptor, staging_bytes: int, to_come: int) -> int:
    """Rows for which there is memory. Raises ProducerError when a response alone needs more."""
    row_bytes = descriptor.row_bytes()
    rows = staging_bytes // row_bytes
    if rows < max(to_come, 1):
        raise ProducerError(
            f"[capture] staging_bytes = {staging_bytes} holds {rows} rows of {row_bytes} bytes, "
            f"the shortest prompt may need {max(to_come, 1)}; raise it, or lower max_new_tokens"
        )
    return rows


def _longest_sequence(target: Target, descriptor: Descriptor, held_rows: int) -> int:
    """In tokens: of those the target was made for, and so that its sample is one the protocol
    allows and one that can be held."""
    rows = longest_rows(descriptor.layers, descriptor.hidden_size)
    return min(target.max_positions, min(rows, held_rows) + 1)


def describe(descriptor: Descriptor) -> str:
    """One line for people."""
    ids = ",".join(map(str, descriptor.layer_ids))
    final = "" if descriptor.final == "none" else f", final state {descriptor.final}"
    return (
        f"{descriptor.model} (layers {ids} of {descriptor.num_layers}{final}, hidden "
        f"{descriptor.hidden_size}, {descriptor.dtype}, stream {descriptor.stream_id()[:8]})"
    )
