"""Snapshots of a service as Prometheus metrics, named `draftfeed_producer_*` and
`draftfeed_consumer_*`: bytes, seconds, samples and tokens, counters since the process began."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from draftfeed_deploy.lengths import LENGTH_BOUNDS, no_lengths
from draftfeed_deploy.records import ConsumerSnapshot, ProducerSnapshot, Snapshot
from draftfeed_proto.descriptor import Descriptor

PHASES = ("loading", "generating", "delivering", "done")
"""Of a producer."""
LINK_STATES = ("down", "linked", "fenced", "granted", "open", "done", "out")
"""Of a consumer's link to one producer."""
LOOP_AGE = "Since the loop that moves data last came round; more than a few say that it hangs."


class Identity(NamedTuple):
    """What does not change while a service runs, but may be known only after a while."""

    version: str
    descriptor: Descriptor | None = None
    """None: not known yet."""


def in_utf8(text: str) -> str:
    """Names of files may have bytes that are no text."""
    return text.encode(errors="backslashreplace").decode()


class Snapshots(Collector):
    """One scrape is one snapshot: its figures belong together."""

    def __init__(self, snapshot: Callable[[], Snapshot], identity: Callable[[], Identity]) -> None:
        self._snapshot, self._identity = snapshot, identity

    def collect(self) -> Iterable[Metric]:
        now = self._snapshot()
        match now:
            case ProducerSnapshot():
                yield _info("producer", self._identity())
                yield from producer_metrics(now)
            case ConsumerSnapshot():
                yield _info("consumer", self._identity())
                yield from consumer_metrics(now)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not take a snapshot."""
        return []


def registry(
    snapshot: Callable[[], Snapshot], identity: Callable[[], Identity]
) -> CollectorRegistry:
    result = CollectorRegistry()
    result.register(Snapshots(snapshot, identity))
    return result


def _info(service: str, identity: Identity) -> Metric:
    value = {"version": identity.version}
    if (stream := identity.descriptor) is not None:
        value |= {
            "model": stream.model,
            "stream_id": stream.stream_id(),
            "layer_ids": ",".join(map(str, stream.layer_ids)),
            "final": stream.final,
        }
    return InfoMetricFamily(
        f"draftfeed_{service}",
        "What runs here, and the stream that it serves or gets.",
        {name: in_utf8(text) for name, text in value.items()},
    )


Value = float | int | bool
Values = Value | Mapping[str, Value] | Mapping[tuple[str, ...], Value]
S = TypeVar("S", ProducerSnapshot, ConsumerSnapshot)


@dataclass(frozen=True)
class Row(Generic[S]):
    """A metric, and where its value is in a snapshot."""

    name: str
    words: str
    value: Callable[[S], Values | None]
    """A number; or numbers by the value of its label, or of its labels. None: it is left out."""
    labels: tuple[str, ...] = ()
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily

    def family(self, prefix: str, now: S) -> Metric | None:
        found = self.value(now)
        if found is None:
            return None
        family = self.kind(prefix + self.name, self.words, labels=self.labels)
        if not isinstance(found, Mapping):
            family.add_metric([], float(found))
            return family
        for key, one in found.items():
            labels = [key] if isinstance(key, str) else key
            family.add_metric(list(map(in_utf8, labels)), float(one))
        return family


def _counter(name: str, words: str, value: Callable[[S], Values | None], *labels: str) -> Row[S]:
    return Row(name, words, value, labels, CounterMetricFamily)


def _gauge(name: str, words: str, value: Callable[[S], Values | None], *labels: str) -> Row[S]:
    return Row(name, words, value, labels)


def _families(rows: Iterable[Row[S]], prefix: str, now: S) -> Iterator[Metric]:
    for row in rows:
        if (family := row.family(prefix, now)) is not None:
            yield family


def producer_metrics(now: ProducerSnapshot) -> Iterator[Metric]:
    prefix = "draftfeed_producer_"
    yield from _families(PRODUCER, prefix, now)
    yield _lengths(prefix + "response_tokens", now)


def consumer_metrics(now: ConsumerSnapshot) -> Iterator[Metric]:
    yield from _families(CONSUMER, "draftfeed_consumer_", now)


def _lengths(name: str, now: ProducerSnapshot) -> Metric:
    counts = now.response_lengths or no_lengths()
    bounds = [*map(str, LENGTH_BOUNDS), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
    words = "Samples by the tokens of their response."
    return HistogramMetricFamily(name, words, buckets=buckets, sum_value=now.response_tokens)


def layer_names(stream: Descriptor | None) -> list[str]:
    """Of the layers of a stream, in its order; none before it is known."""
    if stream is None:
        return []
    return [*map(str, stream.layer_ids), *(["final"] if stream.final != "none" else [])]


def _samples(now: ProducerSnapshot) -> Values | None:
    """What the spool knows from before is left out until the spool is read: a step from zero would
    look as if all that happened now."""
    if not now.prompts:
        return None
    ended = {state: now.ended.get(state, 0) for state in ("rejected", "quarantined", "tail")}
    return {"trained": now.committed, "leased": now.leased, "spooled": now.spooled, **ended}


def _values(now: ProducerSnapshot) -> Values:
    kinds = (
        ("saturated", now.saturated),
        ("nonfinite", now.nonfinite or []),
        ("inexact", now.inexact),
    )
    found: dict[tuple[str, ...], int] = {
        (layer, kind): count
        for kind, counts in kinds
        for layer, count in _by_layer(now.layers, counts).items()
    }
    return found


def _by_layer(layers: list[str], counts: list[int]) -> dict[str, int]:
    """Zeros before the first sample: a counter that begins above zero has risen unseen."""
    return dict(zip(layers, counts or [0] * len(layers), strict=False))


def _links(now: ConsumerSnapshot) -> Values:
    found: dict[tuple[str, ...], bool] = {
        (address, state): state == current
        for address, current in now.producers.items()
        for state in LINK_STATES
    }
    return found


_MADE: tuple[Row[ProducerSnapshot], ...] = (
    _gauge(
        "phase",
        "What it is doing: 1 for the phase it is in.",
        lambda now: {phase: phase == now.phase for phase in PHASES},
        "phase",
    ),
    _gauge("prompts", "Prompts of the shards that it owns.", lambda now: now.prompts),
    _gauge(
        "samples",
        "Where samples are. leased and spooled end as trained or as one of the others.",
        _samples,
        "state",
    ),
    _counter("generated_samples", "Samples finished.", lambda now: now.samples),
    _counter("generated_tokens", "Tokens of responses.", lambda now: now.response_tokens),
    _counter(
        "generating_seconds",
        "Time in which the engine was there and prompts were left, with its pauses.",
        lambda now: now.generating_seconds,
    ),
    _counter("fed_tokens", "Tokens fed to the target in finished samples.", lambda now: now.tokens),
    _counter(
        "captured_rows", "Rows captured, those of unfinished samples too.", lambda now: now.captured
    ),
    _counter(
        "recaptured_samples", "Samples that lacked rows, made again.", lambda now: now.recaptured
    ),
    _counter(
        "regenerated_samples",
        "Samples made again because the first record was damaged or lost, since the spool began.",
        lambda now: now.regenerated if now.prompts else None,
    ),
    _counter(
        "logical_bytes", "Hidden states as the target made them.", lambda now: now.logical_bytes
    ),
    _counter("encoded_bytes", "Those samples, compressed.", lambda now: now.encoded_bytes),
)
_SENT: tuple[Row[ProducerSnapshot], ...] = (
    _counter(
        "sent_bytes",
        "Handed to the socket, by member: chunks, messages, what was sent again.",
        lambda now: now.sent_bytes,
        "member",
    ),
    _counter(
        "sent_logical_bytes",
        "Hidden states in those, as the target made them, by member.",
        lambda now: now.sent_logical_bytes,
        "member",
    ),
    _gauge(
        "credit_bytes",
        "Encoded, that a member may be sent before it says that it has received.",
        lambda now: now.credit_bytes,
        "member",
    ),
    _counter(
        "asset_bytes",
        "Of the target's files, sent to trainers; not among sent_bytes.",
        lambda now: now.asset_bytes,
    ),
    _gauge("members", "Ranks that have a session.", lambda now: len(now.members)),
    _gauge(
        "same_host_members",
        "Of these, those that read the spool's files; their bytes count as if they were sent.",
        lambda now: len(now.same_host),
    ),
    _gauge("term", "Rises when another consumer takes the stream.", lambda now: now.term),
    _counter("swaps", "Consumers that took it from one that was attached.", lambda now: now.swaps),
    _counter("commits", "Durable checkpoints of the trainer.", lambda now: now.commits),
    _gauge(
        "commit_age_seconds",
        "Since the last commit; since the start of the process before the first.",
        lambda now: now.commit_age_seconds,
    ),
    _gauge(
        "oldest_uncommitted_seconds",
        "Age of the oldest sample that no durable checkpoint has.",
        lambda now: now.oldest_uncommitted_seconds,
    ),
    _counter(
        "stall_seconds",
        "Time in which something waited, by cause: prompts for the spool (spool_full) or "
        "for the file of conversations (output_full), samples for "
        "room at a member (no_credit) or for what is under way to one (link_full).",
        lambda now: now.stall_seconds,
        "cause",
    ),
    _gauge("loop_age_seconds", LOOP_AGE, lambda now: now.loop_age_seconds),
)
_KEPT: tuple[Row[ProducerSnapshot], ...] = (
    _gauge("spool_bytes", "Of the spool on the disk.", lambda now: now.spool_bytes),
    _gauge("spool_quota_bytes", "What the spool may take.", lambda now: now.spool_quota_bytes),
    _gauge(
        "spool_capacity_bytes",
        "To what the spool can grow, by its quota or the disk, whichever ends first.",
        lambda now: now.spool_capacity_bytes,
    ),
    _gauge(
        "spool_paused",
        "1 when no prompts are admitted for want of space.",
        lambda now: now.spool_paused,
    ),
)
_RIGHT: tuple[Row[ProducerSnapshot], ...] = (
    _gauge(
        "quality_window_samples",
        "Finished samples that the gate looks at.",
        lambda now: now.quality_window,
    ),
    _gauge(
        "quality_degenerate_samples",
        "Of those: stopped at once, short, the same for many prompts, thinking without an end.",
        lambda now: now.quality_degenerate,
    ),
    _gauge(
        "quality_gate_closed",
        "1 when no prompt is begun because of those.",
        lambda now: now.quality_closed,
    ),
    _counter(
        "values",
        "Values that are not what the target computed (saturated, inexact) or no numbers.",
        _values,
        *("layer", "kind"),
    ),
    _counter(
        "zero_rows",
        "Rows of zeros.",
        lambda now: _by_layer(now.layers, now.zero_rows or []),
        "layer",
    ),
)
_ARCHIVED: tuple[Row[ProducerSnapshot], ...] = (
    _counter(
        "replayed_samples",
        "Samples served out of the archive, or once more out of the spool.",
        lambda now: now.replayed,
    ),
    _gauge("archive_bytes", "Of all segments in the archive.", lambda now: now.archive_bytes),
    _gauge(
        "archive_quota_bytes",
        "What the archive may take; 0 when its drives decide, or there is none.",
        lambda now: now.archive_quota_bytes,
    ),
    _gauge("archive_segments", "Files in the archive.", lambda now: now.archive_segments),
    _gauge(
        "archive_samples",
        "Prompts of which the archive has a sample.",
        lambda now: now.archive_samples,
    ),
    _counter(
        "archive_missed_samples",
        "Samples that were not archived: later epochs generate them again.",
        lambda now: now.archive_missed,
    ),
    _gauge(
        "archive_stopped",
        "1 when nothing more is archived, for want of space or of a root that can be written.",
        lambda now: bool(now.archive_alarm),
    ),
)
PRODUCER = (*_MADE, *_SENT, *_KEPT, *_RIGHT, *_ARCHIVED)

_RECEIVED: tuple[Row[ConsumerSnapshot], ...] = (
    _gauge("attached", "1 when every producer that must be there is.", lambda now: now.attached),
    _gauge("link", "The link to a producer: 1 for its state.", _links, "producer", "state"),
    _gauge(
        "same_host",
        "1 when a producer's files are read, which counts as received from it.",
        lambda now: {address: address in now.same_host for address in now.producers},
        "producer",
    ),
    _gauge("term", "The term in which the stream was granted.", lambda now: now.term),
    _gauge("done", "1 when it has trained and committed all there is.", lambda now: now.done),
    _gauge("draining", "1 when it is ending with everything committed.", lambda now: now.draining),
    _counter("received_samples", "Samples received whole.", lambda now: now.samples),
    _counter("received_tokens", "Rows of those.", lambda now: now.tokens),
    _counter(
        "logical_bytes",
        "Hidden states of those, decoded, by producer.",
        lambda now: now.received_logical_bytes,
        "producer",
    ),
    _counter("encoded_bytes", "Chunks received.", lambda now: now.encoded_bytes),
    _counter(
        "received_bytes",
        "Read from the socket, by producer.",
        lambda now: now.received_bytes,
        "producer",
    ),
    _gauge(
        "due_bytes",
        "Decoded, of samples that a producer was asked for and has not sent whole.",
        lambda now: now.due_bytes,
        "producer",
    ),
    _gauge(
        "offered_samples",
        "Samples that a producer has ready and there is no room for.",
        lambda now: now.offered,
        "producer",
    ),
    _gauge("loop_age_seconds", LOOP_AGE, lambda now: now.loop_age_seconds),
)
_TRAINED: tuple[Row[ConsumerSnapshot], ...] = (
    _gauge("buffer_bytes", "Decoded samples that wait or are used.", lambda now: now.buffer_bytes),
    _gauge("buffer_capacity_bytes", "What those may take.", lambda now: now.buffer_capacity_bytes),
    _gauge("held_samples", "Received, not yet trained.", lambda now: now.held),
    _counter("trained_samples", "Samples an optimizer step has used.", lambda now: now.trained),
    _counter("rejected_samples", "Samples that are not trained.", lambda now: now.rejected),
    _gauge("step", "The trainer's optimizer step.", lambda now: now.step),
    _gauge("loss", "What the trainer said of its last step.", lambda now: now.loss),
    _gauge(
        "commit_lag_samples",
        "Trained samples that no durable checkpoint has.",
        lambda now: now.uncommitted,
    ),
    _counter(
        "stall_seconds",
        "Time in which the trainer waited for a sample, with nothing in the buffer or less than "
        "the shuffle window (cause buffer_empty), or a producer was away (link_down).",
        lambda now: now.stall_seconds,
        "cause",
    ),
)
CONSUMER = (*_RECEIVED, *_TRAINED)
