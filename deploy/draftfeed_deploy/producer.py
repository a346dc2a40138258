"""`draftfeed producer`: the producer in the foreground."""

import logging
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from draftfeed_deploy.foreground import on_signal, open_log, watched
from draftfeed_deploy.monitor import JsonLines
from draftfeed_deploy.records import GeneratedSample, ProducerSnapshot, Rejection
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.service import ProducerService, ProducerStatistics
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)


class Generated:
    """Sees every sample before it is encoded; writes a line about each when there is a log."""

    def __init__(self, log: JsonLines | None) -> None:
        self._log = log
        self.logical_bytes = 0

    def __call__(self, sample: Sample) -> None:
        self.logical_bytes += sample.hidden_states.nbytes
        if self._log is not None:
            self._log.write(_record(sample))


def run_producer(config: ProducerConfig, run_dir: Path | None, console: Console) -> bool:
    """Whether every prompt became terminal before a signal. Raises ProducerError, OutputError."""
    with ExitStack() as stack:
        generated = Generated(open_log(stack, run_dir, "samples.jsonl"))
        service = ProducerService(config, generated)
        stack.enter_context(on_signal(service.stop))

        def snapshot() -> ProducerSnapshot:
            return producer_snapshot(service.statistics(), generated.logical_bytes)

        stack.enter_context(watched("producer", snapshot, run_dir, console))
        stack.callback(_write_tombstones, service, run_dir)
        service.run()
        return _done(service.statistics())


def _done(statistics: ProducerStatistics) -> bool:
    if statistics.phase != "done":
        logger.info("stopped: what is generated is in the spool, and the next start goes on there")
        return False
    assert statistics.spool is not None
    logger.info(
        "all %d prompts are terminal: %d trained and in a durable checkpoint, %d rejected",
        statistics.prompts,
        statistics.spool.committed,
        statistics.spool.tombstones,
    )
    return True


def _write_tombstones(service: ProducerService, run_dir: Path | None) -> None:
    """rejected.jsonl: the prompts that ended untrained, if any."""
    tombstones = service.tombstones()
    with ExitStack() as stack:
        log = open_log(stack, run_dir if tombstones else None, "rejected.jsonl")
        for one in tombstones:
            if log is not None:
                log.write(Rejection(id=str(one.id), reason=f"{one.state}: {one.reason}"))


def producer_snapshot(statistics: ProducerStatistics, logical_bytes: int) -> ProducerSnapshot:
    spool, server = statistics.spool, statistics.server
    counters = statistics.counters
    return ProducerSnapshot(
        time_seconds=round(time.monotonic(), 3),
        phase=statistics.phase,
        prompts=statistics.prompts,
        samples=statistics.samples,
        tokens=statistics.tokens,
        captured=statistics.captured,
        recaptured=statistics.recaptured,
        response_tokens=statistics.response_tokens,
        logical_bytes=logical_bytes,
        encoded_bytes=spool.encoded_bytes if spool else 0,
        wire_bytes=server.wire_bytes if server else 0,
        spool_bytes=spool.bytes if spool else 0,
        spool_quota_bytes=spool.quota_bytes if spool else 0,
        alarm=spool.alarm if spool else "",
        term=server.term if server else 0,
        members=list(server.members) if server else [],
        leased=server.leased if server else 0,
        committed=spool.committed if spool else 0,
        rejected=spool.tombstones if spool else 0,
        regenerated=spool.regenerated if spool else 0,
        stall_seconds={
            "spool_full": round(statistics.spool_full_seconds, 3),
            "no_credit": round(server.no_credit_seconds, 3) if server else 0.0,
        },
        nonfinite=[layer.nonfinite for layer in counters],
        saturated=[layer.saturated for layer in counters],
        zero_rows=[layer.zero_rows for layer in counters],
    )


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
