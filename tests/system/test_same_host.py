"""Producer and consumer on one host: samples are read out of the spool's files."""

from pathlib import Path

import numpy as np

from draftfeed_consumer.stream import HiddenStateStream
from harness import consuming, producing
from samples import sample


def train(stream: HiddenStateStream) -> list[int]:
    """Every sample, compared with what was made; the ordinals in order."""
    seen: list[int] = []
    for item in stream:
        made = sample(item["id"].ordinal)
        assert np.array_equal(item["input_ids"], made.input_ids)
        states = item["hidden_states"].numpy().view(np.uint16)
        assert np.array_equal(states, made.hidden_states.view(np.uint16))
        seen.append(item["id"].ordinal)
        stream.trained([item["id"]], step=len(seen))
    return seen


def test_consumer_on_the_producers_host_reads_files_without_being_told_to(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer, consuming(producer.address) as stream:
        producer.generate(range(20))
        producer.server.finish()
        assert sorted(train(stream)) == list(range(20))
        (link,) = stream.statistics().client.producers
        assert link.same_host


def test_consumer_that_is_told_not_to_gets_its_samples_over_the_connection(tmp_path: Path) -> None:
    with (
        producing(tmp_path / "spool") as producer,
        consuming(producer.address, same_host=False) as stream,
    ):
        producer.generate(range(20))
        producer.server.finish()
        items = iter(stream)
        next(items)
        (link,) = stream.statistics().client.producers
        assert not link.same_host
        assert link.wire_bytes
