"""From what a producer counts to what Prometheus reads, name by name."""

from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from archive_helpers import archive_samples, archiving, commit, lines, opened
from draftfeed_deploy.metrics import Identity, registry
from draftfeed_deploy.producer import Generated, producer_snapshot
from draftfeed_deploy.records import Snapshot
from draftfeed_producer.service import ProducerStatistics
from draftfeed_proto.sample import LayerCounters
from samples import DESCRIPTOR, sample
from snapshots import consumed, produced
from waiting import eventually


def exported(snapshot: Snapshot) -> dict[str, float]:
    """By name and sorted labels, "values_total kind=inexact layer=1"."""
    text = generate_latest(registry(lambda: snapshot, lambda: Identity("1", DESCRIPTOR))).decode()
    return {
        " ".join([one.name, *(f"{name}={value}" for name, value in one.labels.items())]): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_each_kind_of_value_is_that_of_its_layer() -> None:
    """Exchanged, an alert would name what is usual, and be silent of what is not."""
    generated = Generated(None)
    generated(sample(1))
    statistics = ProducerStatistics(
        phase="generating",
        prompts=5,
        samples=1,
        tokens=40,
        captured=41,
        recaptured=2,
        response_tokens=30,
        counters=(
            LayerCounters(saturated=1, nonfinite=0, inexact=20, zero_rows=0),
            LayerCounters(saturated=0, nonfinite=300, inexact=0, zero_rows=0),
            LayerCounters(saturated=0, nonfinite=0, inexact=0, zero_rows=4000),
        ),
        spool_full_seconds=7.0,
        spool=None,
        server=None,
    )
    found = exported(producer_snapshot(statistics, generated, 9.0, DESCRIPTOR))
    p = "draftfeed_producer_"
    values = {
        name.removeprefix(f"{p}values_total "): value
        for name, value in found.items()
        if "values_total" in name and value
    }
    assert values == {
        "kind=saturated layer=1": 1,
        "kind=inexact layer=1": 20,
        "kind=nonfinite layer=4": 300,
    }
    zeros = [found[f"{p}zero_rows_total layer={layer}"] for layer in (1, 4, 7)]
    assert zeros == [0, 0, 4000]
    assert found[f"{p}stall_seconds_total cause=spool_full"] == 7
    assert found[f"{p}logical_bytes_total"] == sample(1).hidden_states.nbytes
    for name, value in (
        ("prompts", 5),
        ("generated_samples_total", 1),
        ("fed_tokens_total", 40),
        ("captured_rows_total", 41),
        ("recaptured_samples_total", 2),
        ("generated_tokens_total", 30),
        ("generating_seconds_total", 9),
    ):
        assert found[p + name] == value


def test_every_figure_of_a_snapshot_is_a_metric_of_its_own() -> None:
    """Each number of a snapshot is another one: two that are exchanged, or one that is left out,
    is seen."""
    producer = produced(
        1.0,
        layers=["1"],
        **{name: number for number, name in enumerate(PRODUCER, start=100)},
        **{name: {"x": number} for number, name in enumerate(BY_NAME, start=200)},
    )
    consumer = consumed(
        1.0,
        **{name: number for number, name in enumerate(CONSUMER, start=100)},
        **{name: {"x": number} for number, name in enumerate(OF_PRODUCER, start=200)},
    )
    for service, snapshot, fields, labelled, label in (
        ("producer", producer, PRODUCER, BY_NAME, "member"),
        ("consumer", consumer, CONSUMER, OF_PRODUCER, "producer"),
    ):
        found = exported(snapshot)
        numbers = {name: found[f"draftfeed_{service}_{name}"] for name in fields.values()}
        assert numbers == {name: at for at, name in enumerate(fields.values(), start=100)}
        named = {name: found[f"draftfeed_{service}_{name} {label}=x"] for name in labelled.values()}
        assert named == {name: at for at, name in enumerate(labelled.values(), start=200)}


PRODUCER = {
    "samples": "generated_samples_total",
    "tokens": "fed_tokens_total",
    "captured": "captured_rows_total",
    "response_tokens": "generated_tokens_total",
    "regenerated": "regenerated_samples_total",
    "encoded_bytes": "encoded_bytes_total",
    "logical_bytes": "logical_bytes_total",
    "spool_bytes": "spool_bytes",
    "spool_quota_bytes": "spool_quota_bytes",
    "spool_capacity_bytes": "spool_capacity_bytes",
    "term": "term",
    "leased": "samples state=leased",
    "spooled": "samples state=spooled",
    "committed": "samples state=trained",
    "quality_window": "quality_window_samples",
    "quality_degenerate": "quality_degenerate_samples",
    "oldest_uncommitted_seconds": "oldest_uncommitted_seconds",
    "commit_age_seconds": "commit_age_seconds",
    "commits": "commits_total",
    "swaps": "swaps_total",
    "asset_bytes": "asset_bytes_total",
    "loop_age_seconds": "loop_age_seconds",
}
BY_NAME = {
    "sent_bytes": "sent_bytes_total",
    "sent_logical_bytes": "sent_logical_bytes_total",
    "credit_bytes": "credit_bytes",
}
CONSUMER = {
    "term": "term",
    "samples": "received_samples_total",
    "tokens": "received_tokens_total",
    "encoded_bytes": "encoded_bytes_total",
    "buffer_bytes": "buffer_bytes",
    "buffer_capacity_bytes": "buffer_capacity_bytes",
    "held": "held_samples",
    "trained": "trained_samples_total",
    "uncommitted": "commit_lag_samples",
    "rejected": "rejected_samples_total",
    "step": "step",
    "loss": "loss",
    "loop_age_seconds": "loop_age_seconds",
}
OF_PRODUCER = {
    "received_logical_bytes": "logical_bytes_total",
    "received_bytes": "received_bytes_total",
    "due_bytes": "due_bytes",
    "offered": "offered_samples",
}


def test_full_archive_says_what_it_has_what_it_missed_and_that_it_takes_no_more(
    tmp_path: Path,
) -> None:
    """Nobody looked whether these figures were those of the archive."""
    with opened(tmp_path / "a") as archive:
        archive_samples(tmp_path / "spool", archive, range(3))
        held = archive.statistics().bytes
    with (
        opened(tmp_path / "a", quota_bytes=held + 1) as archive,
        archiving(tmp_path / "spool", archive) as spool,
    ):
        spool.append(sample(3))
        commit(spool, lines(range(4)))
        eventually(lambda: spool.archive_statistics().missed == 1, "it is given up")
        figures = spool.archive_statistics()
    statistics = ProducerStatistics("generating", 4, 1, 9, 9, 0, 9, (), 0.0, None, None)
    statistics = statistics._replace(archive=figures, replayed=7)
    snapshot = producer_snapshot(statistics, Generated(None), 9.0, DESCRIPTOR)
    found = exported(snapshot)
    p = "draftfeed_producer_"
    assert found[f"{p}archive_bytes"] == held
    assert found[f"{p}archive_quota_bytes"] == held + 1
    assert (found[f"{p}archive_segments"], found[f"{p}archive_samples"]) == (3, 3)
    assert found[f"{p}archive_missed_samples_total"] == 1
    assert found[f"{p}archive_stopped"] == 1
    assert found[f"{p}replayed_samples_total"] == 7
    assert "quota_bytes" in snapshot.archive_alarm
