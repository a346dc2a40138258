"""`draftfeed consumer`: the consumer and its trainer in the foreground."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from draftfeed_consumer.config import ConsumerConfig
from draftfeed_consumer.stream import HiddenStateStream, StreamStatistics
from draftfeed_consumer.trainers import load as load_trainer
from draftfeed_deploy.errors import CommitUnknown
from draftfeed_deploy.foreground import interrupt, on_signal, open_log, watched
from draftfeed_deploy.monitor import JsonLines
from draftfeed_deploy.records import ConsumerSnapshot, ReceivedSample, Step
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample

COMMIT_SECONDS = 30.0
"""How long to wait at the end for the producer to confirm the last checkpoint."""


def run_consumer(config: ConsumerConfig, run_dir: Path | None, console: Console) -> None:
    """Returns when the trainer has and the producer knows its last checkpoint.

    Raises ConsumerError, CommitUnknown, OutputError, or KeyboardInterrupt after a signal.
    """
    train, run = load_trainer(config.trainer)
    with ExitStack() as stack:
        stack.enter_context(on_signal(interrupt))
        samples = open_log(stack, run_dir, "samples.jsonl")
        stream = HiddenStateStream(config.stream, _received_to(samples) if samples else None)
        stack.callback(stream.close)
        steps = open_log(stack, run_dir, "steps.jsonl")
        if steps is not None:
            stream.on_step(_steps_to(steps))
        stack.enter_context(
            watched("consumer", lambda: consumer_snapshot(stream.statistics()), run_dir, console)
        )
        train(stream, run)
        if not stream.wait_committed(COMMIT_SECONDS):
            raise CommitUnknown


def consumer_snapshot(statistics: StreamStatistics) -> ConsumerSnapshot:
    client, buffer = statistics.client, statistics.buffer
    return ConsumerSnapshot(
        time_seconds=round(time.monotonic(), 3),
        attached=client.attached,
        samples=client.samples,
        tokens=client.tokens,
        logical_bytes=client.logical_bytes,
        encoded_bytes=client.encoded_bytes,
        wire_bytes=client.wire_bytes,
        buffer_bytes=buffer.bytes,
        buffer_capacity_bytes=buffer.capacity_bytes,
        held=statistics.held,
        trained=statistics.trained,
        rejected=statistics.rejected,
        step=statistics.step,
        loss=statistics.metrics.get("loss"),
        stall_seconds={
            "buffer_empty": round(buffer.empty_seconds, 3),
            "link_down": round(client.link_down_seconds, 3),
        },
    )


def _received_to(log: JsonLines) -> Callable[[Sample], None]:
    def write(sample: Sample) -> None:
        rows, tokens = len(sample.hidden_states), len(sample.input_ids)
        record = ReceivedSample(id=str(sample.id), rows=rows, tokens=tokens, digest=sample.digest())
        log.write(record)

    return write


def _steps_to(log: JsonLines) -> Callable[[int, list[SampleId], dict[str, float]], None]:
    def write(step: int, ids: list[SampleId], metrics: dict[str, float]) -> None:
        log.write(Step(step=step, ids=[str(id) for id in ids], loss=metrics.get("loss")))

    return write
