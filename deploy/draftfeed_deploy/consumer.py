"""`draftfeed consumer`: the consumer and its trainer in the foreground."""

import importlib.metadata
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from msgspec import structs
from rich.console import Console

from draftfeed_consumer.actions import Attach
from draftfeed_consumer.assets import Stopped
from draftfeed_consumer.assets_fetch import fetch_target
from draftfeed_consumer.config import ConsumerConfig
from draftfeed_consumer.errors import ConsumerError, NoAssets, StreamClosed
from draftfeed_consumer.memory import keep_chunks_mapped
from draftfeed_consumer.ranks import Ranks
from draftfeed_consumer.stream import HiddenStateStream, check_without
from draftfeed_consumer.trainers import Train, TrainerRun, expectation
from draftfeed_consumer.trainers import load as load_trainer
from draftfeed_deploy import exits
from draftfeed_deploy.conditions import ConsumerLook
from draftfeed_deploy.consumer_file import ConsumerFile
from draftfeed_deploy.drain import Claim, claimed
from draftfeed_deploy.errors import CommitUnknown, ConfigError
from draftfeed_deploy.foreground import (
    GentleStop,
    interrupt,
    on_hangup,
    on_signal,
    open_log,
    watched,
)
from draftfeed_deploy.metrics import Identity, registry
from draftfeed_deploy.monitor import JsonLines
from draftfeed_deploy.notify import Condition, Silent, announced
from draftfeed_deploy.records import ConsumerSnapshot, ReceivedSample, Step
from draftfeed_deploy.status import Pages, Probe, Status, loop_probe
from draftfeed_proto import codecs
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

STOPPED_BEFORE = "stopped before any producer had granted the stream: nothing was trained"
FETCHING = "asking producers for the target's files"
COMMIT_SECONDS = 30.0
"""How long to wait at the end for the producers to confirm the last checkpoint."""
FAREWELL_SECONDS = 15.0
"""For the rest of an end: threads, sockets, what is in their queues."""


def run_consumer(
    config: ConsumerFile,
    run_dir: Path | None,
    console: Console,
    attach: Attach = Attach(),  # noqa: B008 - frozen
) -> None:
    """Returns when the trainer has, at the end of the samples or after a signal, and the producers
    know its last checkpoint. One of several ranks writes into a directory of its own in `run_dir`.

    Raises ConsumerError, CommitUnknown, OutputError, DirectoryInUse, StatusBindError, and
    KeyboardInterrupt after a second signal or when a drain takes too long.
    """
    keep_chunks_mapped()
    codecs.PACKED.prepare()
    train, run = load_trainer(config.trainer)
    _check(attach, config)
    over = False

    def give_up() -> None:
        if not over:
            interrupt()

    with ExitStack() as stack:
        stack.enter_context(on_signal(give_up))
        stack.enter_context(on_hangup(lambda: logger.info("a consumer has nothing to reload")))
        ranks = Ranks.from_environment()
        if ranks is not None:  # panels would overwrite each other, and lines get mixed up
            run_dir = run_dir and run_dir / f"rank{ranks.rank}"
            console = Console(file=console.file, force_terminal=False)
        # Of several ranks on a machine one speaks for all.
        leads = ranks is None or ranks.leader
        claim = None
        if leads:
            claim = stack.enter_context(claimed(run.output_dir, takeover=attach.takeover))
        status = stack.enter_context(Status(config.status, ranks.rank if ranks else 0))
        streams: list[HiddenStateStream] = []
        look = Look(streams)
        end_seconds = config.trainer.drain_seconds + COMMIT_SECONDS + FAREWELL_SECONDS
        announcer = stack.enter_context(announced(look, end_seconds)) if leads else Silent()

        def drain() -> None:
            announcer.stopping = True
            for stream in streams:
                stream.drain()

        # Before anything can be said of us that makes somebody end us.
        with GentleStop(drain, config.trainer.drain_seconds) as stop, on_signal(stop.begin):
            status.show(look.pages())
            try:
                wanted, run = _with_target(config, run, attach, look.fetching(stop))
            except StreamClosed:
                _finish(STOPPED_BEFORE, claim)
                return
            expect = expectation(config.trainer, run, wanted.expect)
            wanted = structs.replace(wanted, expect=expect)
            stream = _open_stream(stack, wanted, run_dir, attach, ranks)
            streams.append(stream)
            if stop.asked:
                stream.drain()
            status.show(_pages(stream, look))
            stack.enter_context(
                watched(
                    "consumer",
                    lambda: consumer_snapshot(stream),
                    run_dir,
                    console,
                    status.board,
                )
            )
            _finish(_train(stream, train, run, stop), claim)
            over = True  # who tells us now to stop comes too late to change how it ended
            if not stop.asked:
                look.done = True
                status.finished()


class Look:
    """At the stream, once there is one, and before that at the loop that fetches what the trainer
    needs of the target."""

    def __init__(self, streams: list[HiddenStateStream]) -> None:
        self._streams, self._of_stream = streams, ConsumerLook()
        self._turned_at = time.monotonic()
        self.done = False
        """All is trained and committed."""

    def fetching(self, stop: GentleStop) -> Stopped:
        """Whether that loop is to end; it asks in each of its turns."""

        def stopped() -> bool:
            self._turned_at = time.monotonic()
            return stop.asked

        return stopped

    def pages(self) -> Pages:
        """Until there is a stream."""

        def identity() -> Identity:
            return Identity(importlib.metadata.version("draftfeed"))

        def snapshot() -> ConsumerSnapshot:
            return ConsumerSnapshot(
                time_seconds=round(time.monotonic(), 3),
                loop_age_seconds=round(self._turn_seconds, 3),
                samples=0,
                tokens=0,
                logical_bytes=0,
                wire_bytes=0,
            )

        return Pages(
            registry(snapshot, identity),
            lambda: loop_probe("client", self._turn_seconds),
            lambda: Probe(False, FETCHING),
            identity,
        )

    @property
    def _turn_seconds(self) -> float:
        return time.monotonic() - self._turned_at

    def __call__(self) -> Condition:
        if not self._streams:
            return Condition("running", FETCHING, self._turn_seconds)
        stream = self._streams[0]
        turn_seconds = stream.statistics().client.turn_seconds
        return self._of_stream(consumer_snapshot(stream), turn_seconds)


def _check(attach: Attach, config: ConsumerConfig) -> None:
    """Before anything is waited for."""
    try:
        check_without(attach, config.producer.addresses)
    except ValueError as error:
        raise ConfigError("command line", str(error)) from None


def _with_target(
    config: ConsumerConfig, run: TrainerRun, attach: Attach, stopped: Stopped
) -> tuple[ConsumerConfig, TrainerRun]:
    """Without a target in the configuration, with the one that the producers serve; no stream but
    theirs is taken then. Nothing is fenced yet, so whoever trains now goes on meanwhile."""
    assets = config.trainer.assets
    if run.target is not None or not assets.fetch:
        return config, run
    try:
        fetched = fetch_target(
            config.producer, assets, expect=config.expect, without=attach.without, stopped=stopped
        )
    except NoAssets as error:
        if config.trainer.function is None:
            raise
        logger.info("run.target is None: %s", error)
        return config, structs.replace(run, partial=False)
    expect = structs.replace(config.expect, stream_id=fetched.stream_id)
    return structs.replace(config, expect=expect), run.with_target(fetched.directory.path)


def _open_stream(
    stack: ExitStack,
    config: ConsumerConfig,
    run_dir: Path | None,
    attach: Attach,
    ranks: Ranks | None,
) -> HiddenStateStream:
    samples = open_log(stack, run_dir, "samples.jsonl")
    observe = _received_to(samples) if samples else None
    try:
        stream = HiddenStateStream(config.stream, observe, attach, ranks)
    except (ConsumerError, ProtoError):
        raise
    except ValueError as error:
        raise ConfigError("command line", str(error)) from None
    stack.callback(stream.close)
    steps = open_log(stack, run_dir, "steps.jsonl")
    if steps is not None:
        stream.on_step(_steps_to(steps))
    return stream


def _train(stream: HiddenStateStream, train: Train, run: TrainerRun, stop: GentleStop) -> str:
    """How it ended, in words."""
    try:
        # No trainer looks for its checkpoint before the one in whose place we are can make none.
        _ = stream.descriptor
    except StreamClosed:
        if stop.asked:
            return STOPPED_BEFORE
        raise
    try:
        train(stream, run)
    except ConsumerError:
        raise
    except Exception:
        stream.close(failed=True)
        raise
    if not stream.wait_committed(COMMIT_SECONDS):
        raise CommitUnknown
    how = "drained" if stop.asked else "done"
    return f"{how}: {stream.statistics().trained} samples trained and committed"


def _finish(words: str, claim: Claim | None) -> None:
    logger.info("%s", words)
    if claim is not None:
        claim.code, claim.words = exits.DONE, words


def _pages(stream: HiddenStateStream, look: Look) -> Pages:
    def identity() -> Identity:
        return Identity(importlib.metadata.version("draftfeed"), stream.known_descriptor)

    def healthy() -> Probe:
        return loop_probe("client", stream.statistics().client.turn_seconds)

    def ready() -> Probe:
        attached = stream.statistics().client.attached
        return Probe(attached, "attached" if attached else "waiting for the producer")

    def snapshot() -> ConsumerSnapshot:
        return structs.replace(consumer_snapshot(stream), done=look.done)

    return Pages(registry(snapshot, identity), healthy, ready, identity)


def consumer_snapshot(stream: HiddenStateStream) -> ConsumerSnapshot:
    statistics = stream.statistics()
    client, buffer = statistics.client, statistics.buffer
    loss = statistics.metrics.get("loss")
    return ConsumerSnapshot(
        time_seconds=round(time.monotonic(), 3),
        attached=client.attached,
        term=max((producer.term for producer in client.producers), default=0),
        producers={producer.address: producer.state for producer in client.producers},
        same_host=[producer.address for producer in client.producers if producer.same_host],
        draining=stream.draining,
        samples=client.samples,
        tokens=client.tokens,
        logical_bytes=client.logical_bytes,
        encoded_bytes=client.encoded_bytes,
        wire_bytes=client.wire_bytes,
        received_bytes={producer.address: producer.wire_bytes for producer in client.producers},
        received_logical_bytes={one.address: one.logical_bytes for one in client.producers},
        due_bytes={producer.address: producer.due_bytes for producer in client.producers},
        loop_age_seconds=round(client.turn_seconds, 3),
        offered={producer.address: producer.offers for producer in client.producers},
        buffer_bytes=buffer.bytes,
        buffer_capacity_bytes=buffer.capacity_bytes,
        held=statistics.held,
        trained=statistics.trained,
        uncommitted=statistics.uncommitted,
        rejected=statistics.rejected,
        step=statistics.step,
        loss=loss,
        loss_lost=loss is not None and not math.isfinite(loss),
        stall_seconds={
            "buffer_empty": round(buffer.empty_seconds, 3),
            "link_down": round(client.link_down_seconds, 3),
        },
    )


def _received_to(log: JsonLines) -> Callable[[Sample], None]:
    def write(sample: Sample) -> None:
        rows, tokens = len(sample.hidden_states), len(sample.input_ids)
        now = round(time.monotonic(), 3)
        log.write(
            ReceivedSample(
                id=str(sample.id),
                rows=rows,
                tokens=tokens,
                digest=sample.digest(),
                time_seconds=now,
            )
        )

    return write


def _steps_to(log: JsonLines) -> Callable[[int, list[SampleId], dict[str, float]], None]:
    def write(step: int, ids: list[SampleId], metrics: dict[str, float]) -> None:
        names, now = [str(id) for id in ids], round(time.monotonic(), 3)
        log.write(Step(step=step, ids=names, loss=metrics.get("loss"), time_seconds=now))

    return write
