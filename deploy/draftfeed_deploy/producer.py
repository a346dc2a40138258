"""`draftfeed producer`: the producer in the foreground."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from draftfeed_deploy.foreground import on_signal, open_log, watched
from draftfeed_deploy.monitor import JsonLines, Snapshot
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.service import ProducerService, ProducerStatistics
from draftfeed_proto.sample import Sample


def run_producer(config: ProducerConfig, run_dir: Path | None, console: Console) -> bool:
    """Whether every prompt became terminal before a signal. Raises ProducerError."""
    with ExitStack() as stack:
        samples = open_log(stack, run_dir, "samples.jsonl")
        service = ProducerService(config, _generated_to(samples) if samples else None)
        stack.enter_context(on_signal(service.stop))
        stack.enter_context(
            watched("producer", lambda: producer_snapshot(service.statistics()), run_dir, console)
        )
        stack.callback(_write_tombstones, service, run_dir)
        service.run()
        return service.statistics().phase == "done"


def _write_tombstones(service: ProducerService, run_dir: Path | None) -> None:
    """rejected.jsonl: the prompts that ended untrained, if any."""
    tombstones = service.tombstones()
    with ExitStack() as stack:
        log = open_log(stack, run_dir if tombstones else None, "rejected.jsonl")
        for one in tombstones:
            if log is not None:
                log.write({"id": str(one.id), "reason": f"{one.state}: {one.reason}"})


def producer_snapshot(statistics: ProducerStatistics) -> Snapshot:
    """Counters since the process began, levels now. Bytes and seconds."""
    spool, server = statistics.spool, statistics.server
    counters = statistics.counters
    return {
        "phase": statistics.phase,
        "prompts": statistics.prompts,
        "samples": statistics.samples,
        "tokens": statistics.tokens,
        "captured": statistics.captured,
        "response_tokens": statistics.response_tokens,
        "logical_bytes": spool.logical_bytes if spool else 0,
        "encoded_bytes": spool.encoded_bytes if spool else 0,
        "wire_bytes": server.wire_bytes if server else 0,
        "spool_bytes": spool.bytes if spool else 0,
        "spool_quota_bytes": spool.quota_bytes if spool else 0,
        "leased": server.leased if server else 0,
        "committed": spool.committed if spool else 0,
        "rejected": spool.tombstones if spool else 0,
        "stall_seconds": {
            "spool_full": round(statistics.spool_full_seconds, 3),
            "no_credit": round(server.no_credit_seconds, 3) if server else 0.0,
        },
        "nonfinite": [layer.nonfinite for layer in counters],
        "saturated": [layer.saturated for layer in counters],
        "zero_rows": [layer.zero_rows for layer in counters],
    }


def _generated_to(log: JsonLines) -> Callable[[Sample], None]:
    def write(sample: Sample) -> None:
        rows = len(sample.hidden_states)
        log.write(
            {
                "id": str(sample.id),
                "key": sample.key,
                "rows": rows,
                "tokens": len(sample.input_ids),
                "prompt_tokens": rows + 1 - int(sample.loss_mask.sum()),
                "finish_reason": sample.finish_reason,
                "digest": sample.digest(),
                "missing_rows": len(sample.input_ids) - 1 - rows,
            }
        )

    return write
