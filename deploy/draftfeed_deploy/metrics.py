"""Snapshots of a service as Prometheus metrics, named `draftfeed_producer_*` and
`draftfeed_consumer_*`: bytes, seconds, samples and tokens, counters since the process began."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

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


class Snapshots(Collector):
    """One scrape is one snapshot: its figures belong together."""

    def __init__(self, snapshot: Callable[[], Snapshot], identity: Callable[[], Identity]) -> None:
        self._snapshot, self._identity = snapshot, identity

    def collect(self) -> Iterable[Metric]:
        now = self._snapshot()
        match now:
            case ProducerSnapshot():
                yield _info("producer", self._identity())
                yield from producer_metrics(now, self._identity().descriptor)
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
        f"draftfeed_{service}", "What runs here, and the stream that it serves or gets.", value
    )


def producer_metrics(now: ProducerSnapshot, stream: Descriptor | None) -> Iterator[Metric]:
    p = "draftfeed_producer_"
    yield _states(p + "phase", "What it is doing: 1 for the phase it is in.", PHASES, now.phase)
    yield _gauge(p + "prompts", "Prompts of the shards that it owns.", now.prompts)
    if now.prompts:
        yield from _remembered(p, now)
    yield _counter(p + "generated_samples", "Samples finished.", now.samples)
    yield _counter(p + "generated_tokens", "Tokens of responses.", now.response_tokens)
    yield _lengths(p + "response_tokens", now)
    yield _counter(
        p + "generating_seconds",
        "Time in which the engine was there and prompts were left, with its pauses.",
        now.generating_seconds,
    )
    yield _counter(p + "fed_tokens", "Tokens fed to the target in finished samples.", now.tokens)
    yield _counter(p + "captured_rows", "Rows captured, of unfinished samples too.", now.captured)
    yield _counter(
        p + "recaptured_samples", "Samples that lacked rows, made again.", now.recaptured
    )
    yield _counter(p + "logical_bytes", "Hidden states as the target made them.", now.logical_bytes)
    yield _counter(p + "encoded_bytes", "Those samples, compressed.", now.encoded_bytes)
    yield _counter(
        p + "sent_bytes",
        "Handed to the socket, by member: chunks, messages, what was sent again.",
        dict(now.sent_bytes),
        "member",
    )
    yield _gauge(
        p + "credit_bytes",
        "What a member has room for and has not been sent.",
        dict(now.credit_bytes),
        "member",
    )
    yield _counter(
        p + "asset_bytes",
        "Of the target's files, sent to trainers; not among sent_bytes.",
        now.asset_bytes,
    )
    yield _gauge(p + "members", "Ranks that have a session.", len(now.members))
    yield _gauge(p + "spool_bytes", "Of the spool on the disk.", now.spool_bytes)
    yield _gauge(p + "spool_quota_bytes", "What the spool may take.", now.spool_quota_bytes)
    yield _gauge(
        p + "spool_capacity_bytes",
        "To what the spool can grow, by its quota or the disk, whichever ends first.",
        now.spool_capacity_bytes,
    )
    yield _gauge(
        p + "spool_paused",
        "1 when no prompts are admitted for want of space.",
        bool(now.alarm) and not now.quality_closed,
    )
    yield _gauge(
        p + "oldest_uncommitted_seconds",
        "Age of the oldest sample that no durable checkpoint has.",
        now.oldest_uncommitted_seconds,
    )
    yield _gauge(
        p + "commit_age_seconds",
        "Since the last commit; since the start of the process before the first.",
        now.commit_age_seconds,
    )
    yield _counter(p + "commits", "Durable checkpoints of the trainer.", now.commits)
    yield _gauge(p + "term", "Rises when another consumer takes the stream.", now.term)
    yield _counter(p + "swaps", "Consumers that took the stream from another.", now.swaps)
    yield _counter(
        p + "stall_seconds",
        "Time in which nothing moved, by cause: spool_full, no_credit.",
        now.stall_seconds,
        "cause",
    )
    yield from _quality(p + "quality_", now)
    yield _gauge(p + "loop_age_seconds", LOOP_AGE, now.loop_age_seconds)
    yield from _layers(p, now, stream)


def _remembered(p: str, now: ProducerSnapshot) -> Iterator[Metric]:
    """What the spool knows from before. It is left out until the spool is read: a step from zero
    would look as if all that happened now."""
    yield _gauge(
        p + "samples",
        "Where samples are. leased and spooled end as trained or as one of the others.",
        {
            "trained": now.committed,
            "leased": now.leased,
            "spooled": now.spooled,
            **{state: now.ended.get(state, 0) for state in ("rejected", "quarantined", "tail")},
        },
        "state",
    )
    yield _counter(
        p + "regenerated_samples",
        "Samples made again because the first record was damaged or lost, since the spool began.",
        now.regenerated,
    )


def _quality(p: str, now: ProducerSnapshot) -> Iterator[Metric]:
    yield _gauge(
        p + "window_samples", "Finished samples that the gate looks at.", now.quality_window
    )
    yield _gauge(
        p + "degenerate_samples",
        "Of those: stopped at once, short, the same for many prompts, thinking without an end.",
        now.quality_degenerate,
    )
    yield _gauge(
        p + "gate_closed", "1 when no prompt is begun because of those.", now.quality_closed
    )


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


def _layers(p: str, now: ProducerSnapshot, stream: Descriptor | None) -> Iterator[Metric]:
    names = layer_names(stream)
    values = CounterMetricFamily(
        p + "values",
        "Values that are not what the target computed (saturated, inexact) or no numbers.",
        labels=["layer", "kind"],
    )
    zeros = CounterMetricFamily(p + "zero_rows", "Rows of zeros.", labels=["layer"])
    for kind, counts in (
        ("saturated", now.saturated),
        ("nonfinite", now.nonfinite or []),
        ("inexact", now.inexact),
    ):
        for layer, count in _by_layer(names, counts):
            values.add_metric([layer, kind], count)
    for layer, count in _by_layer(names, now.zero_rows or []):
        zeros.add_metric([layer], count)
    yield values
    yield zeros


def _by_layer(names: list[str], counts: list[int]) -> Iterator[tuple[str, int]]:
    """Zeros before the first sample: a counter that begins above zero has risen unseen."""
    return zip(names, counts or [0] * len(names), strict=False)


def consumer_metrics(now: ConsumerSnapshot) -> Iterator[Metric]:
    p = "draftfeed_consumer_"
    yield _gauge(p + "attached", "1 when every producer that must be there is.", now.attached)
    links = GaugeMetricFamily(
        p + "link", "The link to a producer: 1 for its state.", labels=["producer", "state"]
    )
    for address, state in now.producers.items():
        for one in LINK_STATES:
            links.add_metric([address, one], one == state)
    yield links
    yield _gauge(p + "term", "The term in which the stream was granted.", now.term)
    yield _gauge(p + "draining", "1 when it is ending with everything committed.", now.draining)
    yield _counter(p + "received_samples", "Samples received whole.", now.samples)
    yield _counter(p + "received_tokens", "Rows of those.", now.tokens)
    yield _counter(p + "logical_bytes", "Hidden states of those, decoded.", now.logical_bytes)
    yield _counter(p + "encoded_bytes", "Chunks received.", now.encoded_bytes)
    yield _counter(
        p + "received_bytes",
        "Read from the socket, by producer.",
        dict(now.received_bytes),
        "producer",
    )
    yield _counter(
        p + "granted_bytes",
        "Decoded, that a producer was told there is room for.",
        dict(now.granted_bytes),
        "producer",
    )
    yield _gauge(p + "loop_age_seconds", LOOP_AGE, now.loop_age_seconds)
    yield _gauge(
        p + "offered_samples",
        "Samples that a producer has ready and there is no room for.",
        dict(now.offered),
        "producer",
    )
    yield _gauge(p + "buffer_bytes", "Decoded samples that wait or are used.", now.buffer_bytes)
    yield _gauge(p + "buffer_capacity_bytes", "What those may take.", now.buffer_capacity_bytes)
    yield _gauge(p + "held_samples", "Received, not yet trained.", now.held)
    yield _counter(p + "trained_samples", "Samples an optimizer step has used.", now.trained)
    yield _counter(p + "rejected_samples", "Samples that are not trained.", now.rejected)
    yield _gauge(p + "step", "The trainer's optimizer step.", now.step)
    if now.loss is not None:
        yield _gauge(p + "loss", "What the trainer said of its last step.", now.loss)
    yield _gauge(
        p + "commit_lag_samples",
        "Trained samples that no durable checkpoint has.",
        now.uncommitted,
    )
    yield _counter(
        p + "stall_seconds",
        "Time in which nothing moved, by cause: buffer_empty, link_down.",
        now.stall_seconds,
        "cause",
    )


Value = float | int | bool


def _gauge(
    name: str, words: str, value: Value | Mapping[str, Value], label: str | None = None
) -> Metric:
    return _family(GaugeMetricFamily, name, words, value, label)


def _counter(
    name: str, words: str, value: Value | Mapping[str, Value], label: str | None = None
) -> Metric:
    return _family(CounterMetricFamily, name, words, value, label)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    words: str,
    value: Value | Mapping[str, Value],
    label: str | None,
) -> Metric:
    family = kind(name, words, labels=[label] if label else [])
    values = value if isinstance(value, Mapping) else {None: value}
    for key, one in values.items():
        family.add_metric([key] if key is not None else [], float(one))
    return family


def _states(name: str, words: str, states: Iterable[str], current: str) -> Metric:
    return _gauge(name, words, {state: state == current for state in states}, "phase")
