"""`draftfeed producer`: the producer in the foreground."""

import importlib.metadata
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from draftfeed_consumer.memory import keep_chunks_mapped
from draftfeed_deploy.conditions import ProducerLook
from draftfeed_deploy.foreground import on_hangup, on_signal, open_log, watched
from draftfeed_deploy.lengths import class_of, no_lengths
from draftfeed_deploy.metrics import Identity, layer_names, registry
from draftfeed_deploy.monitor import JsonLines
from draftfeed_deploy.notify import announced
from draftfeed_deploy.producer_file import ProducerFile
from draftfeed_deploy.records import GeneratedSample, ProducerSnapshot, Rejection
from draftfeed_deploy.status import Pages, Probe, Status, loop_probe
from draftfeed_producer.archive import ArchiveStatistics
from draftfeed_producer.figures import DeliveryFigures
from draftfeed_producer.service import ProducerService, ProducerStatistics
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

END_SECONDS = 600.0
"""A forward pass over the longest prompts, the engine's processes, and a slow disk."""


class Generated:
    """Sees every sample before it is encoded; writes a line about each when there is a log."""

    def __init__(self, log: JsonLines | None) -> None:
        self._log = log
        self.logical_bytes = 0
        self.lengths = no_lengths()

    def __call__(self, sample: Sample) -> None:
        self.logical_bytes += sample.hidden_states.nbytes
        self.lengths[class_of(int(sample.loss_mask.sum()))] += 1
        if self._log is not None:
            self._log.write(_record(sample))


class Stopwatch:
    """Seconds in which a service was generating, by the snapshots that are taken of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """The monitor and whoever asks for metrics take snapshots."""
        self._seconds = 0.0
        self._last: tuple[float, str] | None = None

    def at(self, now: float, phase: str) -> float:
        """now: monotonic seconds. phase: what it does from now on."""
        with self._lock:
            before = self._last or (now, "")
            now = max(now, before[0])  # two may come in another order than they looked
            if before[1] == "generating":
                self._seconds += now - before[0]
            self._last = now, phase
            return self._seconds


def run_producer(config: ProducerFile, run_dir: Path | None, console: Console) -> bool:
    """Whether every prompt became terminal, and was archived if it is to be, before a signal.
    Raises ProducerError, OutputError, StatusBindError."""
    keep_chunks_mapped()
    with ExitStack() as stack:
        status = stack.enter_context(Status(config.status))
        generated = Generated(open_log(stack, run_dir, "samples.jsonl"))
        service = ProducerService(config, generated)
        stopwatch = Stopwatch()

        def snapshot() -> ProducerSnapshot:
            statistics = service.statistics()
            seconds = stopwatch.at(time.monotonic(), statistics.phase)
            return producer_snapshot(statistics, generated, seconds, service.descriptor)

        look = ProducerLook(snapshot, lambda: _turn_seconds(service))
        announcer = stack.enter_context(announced(look, END_SECONDS))

        def stop() -> None:
            announcer.stopping = True
            service.stop()

        stack.enter_context(on_signal(stop))
        stack.enter_context(on_hangup(lambda: announcer.reload(service.reload)))
        status.show(_pages(service, snapshot))
        stack.enter_context(watched("producer", snapshot, run_dir, console, status.board))
        stack.callback(_write_tombstones, service, run_dir)
        service.run()
        done = _done(service.statistics())
        if done:
            status.finished()
        return done


def _pages(service: ProducerService, snapshot: Callable[[], ProducerSnapshot]) -> Pages:
    def identity() -> Identity:
        return Identity(importlib.metadata.version("draftfeed"), service.descriptor)

    def healthy() -> Probe:
        return loop_probe("server", _turn_seconds(service))

    def ready() -> Probe:
        phase = service.statistics().phase
        return Probe(phase in ("generating", "delivering"), phase)

    return Pages(registry(snapshot, identity), healthy, ready, identity)


def _turn_seconds(service: ProducerService) -> float:
    server = service.statistics().server
    return server.turn_seconds if server else 0.0


def _done(statistics: ProducerStatistics) -> bool:
    if statistics.phase != "done":
        logger.info("stopped: what is generated is in the spool, and the next start goes on there")
        return False
    assert statistics.spool is not None
    logger.info(
        "all %d prompts are terminal: %d trained and in a durable checkpoint, %d rejected",
        statistics.prompts,
        statistics.spool.committed,
        sum(statistics.spool.ended.values()),
    )
    if statistics.unsealed:
        words = "stopped: %d segments are not archived yet, and the next start does that"
        logger.error(words, statistics.unsealed)
    return not statistics.unsealed


def _write_tombstones(service: ProducerService, run_dir: Path | None) -> None:
    """rejected.jsonl: the prompts that ended untrained, if any."""
    tombstones = service.tombstones()
    with ExitStack() as stack:
        log = open_log(stack, run_dir if tombstones else None, "rejected.jsonl")
        for one in tombstones:
            if log is not None:
                log.write(Rejection(id=str(one.id), reason=f"{one.state}: {one.reason}"))


def producer_snapshot(
    statistics: ProducerStatistics,
    generated: Generated,
    generating_seconds: float,
    stream: Descriptor | None,
) -> ProducerSnapshot:
    spool, server = statistics.spool, statistics.server
    counters = statistics.counters
    figures = server.figures if server else DeliveryFigures()
    return ProducerSnapshot(
        time_seconds=round(time.monotonic(), 3),
        phase=statistics.phase,
        prompts=statistics.prompts,
        samples=statistics.samples,
        tokens=statistics.tokens,
        captured=statistics.captured,
        recaptured=statistics.recaptured,
        response_tokens=statistics.response_tokens,
        response_lengths=list(generated.lengths),
        generating_seconds=round(generating_seconds, 3),
        logical_bytes=generated.logical_bytes,
        encoded_bytes=spool.encoded_bytes if spool else 0,
        wire_bytes=server.wire_bytes if server else 0,
        spool_bytes=spool.bytes if spool else 0,
        spool_quota_bytes=spool.quota_bytes if spool else 0,
        spool_capacity_bytes=spool.capacity_bytes if spool else 0,
        spool_paused=bool(spool and spool.alarm),
        alarm="; ".join(filter(None, _alarms(statistics))),
        term=server.term if server else 0,
        members=list(server.members) if server else [],
        same_host=list(server.same_host) if server else [],
        leased=server.leased if server else 0,
        spooled=figures.spooled,
        committed=spool.committed if spool else 0,
        rejected=sum(spool.ended.values()) if spool else 0,
        ended=spool.ended if spool else {},
        regenerated=spool.regenerated if spool else 0,
        quality_window=statistics.quality.looked_at,
        quality_degenerate=statistics.quality.degenerate,
        quality_closed=statistics.quality.closed,
        oldest_uncommitted_seconds=round(figures.oldest_seconds, 3),
        commit_age_seconds=round(figures.commit_age_seconds, 3),
        commits=figures.commits,
        swaps=figures.swaps,
        sent_bytes=dict(figures.sent_bytes),
        sent_logical_bytes=dict(figures.sent_logical_bytes),
        credit_bytes=dict(figures.credit_bytes),
        asset_bytes=server.asset_bytes if server else 0,
        loop_age_seconds=round(server.turn_seconds, 3) if server else 0.0,
        stall_seconds={
            "spool_full": round(statistics.spool_full_seconds, 3),
            "output_full": round(statistics.output_full_seconds, 3),
            **{cause: round(seconds, 3) for cause, seconds in figures.wait_seconds},
        },
        layers=layer_names(stream),
        nonfinite=[layer.nonfinite for layer in counters],
        saturated=[layer.saturated for layer in counters],
        inexact=[layer.inexact for layer in counters],
        zero_rows=[layer.zero_rows for layer in counters],
        replayed=statistics.replayed,
        **_archive_values(statistics.archive),
    )


def _archive_values(archive: ArchiveStatistics | None) -> dict[str, Any]:
    if archive is None:
        return {}
    return {f"archive_{name}": value for name, value in archive._asdict().items()}


def _record(sample: Sample) -> GeneratedSample:
    rows = len(sample.hidden_states)
    return GeneratedSample(
        id=str(sample.id),
        key=sample.key,
        rows=rows,
        tokens=len(sample.input_ids),
        digest=sample.digest(),
        prompt_tokens=rows + 1 - int(sample.loss_mask.sum()),
        finish_reason=sample.finish_reason,
        time_seconds=round(time.monotonic(), 3),
    )


def _alarms(statistics: ProducerStatistics) -> tuple[str, ...]:
    spool = statistics.spool
    return statistics.closed_because, spool.alarm if spool else "", statistics.output_alarm
