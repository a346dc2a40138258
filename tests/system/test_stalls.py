"""Time lost, by cause: each cause is brought about, and that counter rises and no other."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.stream import HiddenStateStream
from harness import Producer, Relay, consuming, producing
from waiting import eventually

pytestmark = pytest.mark.timeout(100)

LOST_SECONDS = 0.6
"""Until which a stall is watched."""
OTHERWISE_SECONDS = 0.25
"""That may be lost to something else meanwhile, on a busy machine."""


class SlowRelay(Relay):
    """A cable of some megabytes a second."""

    PIECE_BYTES, PIECE_SECONDS = 1 << 15, 0.01

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.PIECE_BYTES)
        pause = threading.Event()
        with suppress(OSError):
            while data := source.recv(self.PIECE_BYTES):
                sink.sendall(data)
                pause.wait(self.PIECE_SECONDS)


@contextmanager
def trained_from(stream: HiddenStateStream) -> Iterator[None]:
    """By a trainer that is faster than everything else."""
    over = threading.Event()

    def train() -> None:
        for step, item in enumerate(stream):
            if over.is_set():
                return
            stream.trained([item["id"]], step)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        yield
    finally:
        over.set()
        stream.drain()
        trainer.join()


def lost(*producers: Producer, stream: HiddenStateStream) -> dict[str, float]:
    found = {"link_down": stream.statistics().client.link_down_seconds}
    found["buffer_empty"] = stream.statistics().buffer.empty_seconds
    for producer in producers:
        for cause, seconds in producer.server.statistics().figures.wait_seconds:
            found[cause] = found.get(cause, 0.0) + seconds
    return found


def lost_to(cause: str, now: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What was lost until so much was lost to this cause."""
    before = now()

    def so_far() -> dict[str, float]:
        return {name: seconds - before[name] for name, seconds in now().items()}

    eventually(lambda: so_far()[cause] > LOST_SECONDS, f"time lost to {cause}")
    return so_far()


def test_trainer_that_takes_nothing_is_no_credit(tmp_path: Path) -> None:
    buffer = BufferConfig(capacity_bytes=100_000, window_samples=1)
    with producing(tmp_path) as producer, consuming(producer.address, buffer=buffer) as stream:
        producer.generate(range(20))
        assert next(iter(stream))
        found = lost_to("no_credit", lambda: lost(producer, stream=stream))
    assert max(found["link_full"], found["buffer_empty"], found["link_down"]) < OTHERWISE_SECONDS


def test_link_that_is_slower_than_both_ends_is_link_full(tmp_path: Path) -> None:
    """It was counted as no_credit, as if the trainer were to blame."""
    buffer = BufferConfig(capacity_bytes=200_000_000, window_samples=1)
    with producing(tmp_path) as producer:
        producer.generate(range(8), rows=8000)
        relay = SlowRelay(producer.address)
        try:
            with consuming(relay.address, buffer=buffer) as stream, trained_from(stream):
                eventually(lambda: stream.statistics().client.samples > 0, "the first sample")
                found = lost_to("link_full", lambda: lost(producer, stream=stream))
        finally:
            relay.close()
    assert max(found["no_credit"], found["link_down"]) < OTHERWISE_SECONDS


def test_generation_that_is_slower_is_buffer_empty(tmp_path: Path) -> None:
    buffer = BufferConfig(window_samples=1)
    with producing(tmp_path) as producer, consuming(producer.address, buffer=buffer) as stream:
        producer.generate(range(3))
        with trained_from(stream):
            eventually(lambda: stream.statistics().trained == 3, "all are trained")
            found = lost_to("buffer_empty", lambda: lost(producer, stream=stream))
    others = (found["no_credit"], found["link_full"], found["link_down"])
    assert max(others) < OTHERWISE_SECONDS


def states(stream: HiddenStateStream) -> list[str]:
    return [producer.state for producer in stream.statistics().client.producers]


def test_producer_that_needs_nothing_more_is_no_link_that_is_down(tmp_path: Path) -> None:
    """Symptom: from the end of the first producer on, link_down rose for the rest of the run, and
    hid that of another."""
    with (
        producing(tmp_path / "a", shards="0") as first,
        producing(tmp_path / "b", shards="1") as second,
    ):
        first.generate(range(3))
        with consuming(first.address, second.address) as stream, trained_from(stream):
            eventually(lambda: stream.statistics().trained == 3, "all are trained")
            first.server.finish()
            stream.committed(stream.state_dict())
            eventually(lambda: states(stream) == ["done", "open"], "the first is done")
            found = lost_to("buffer_empty", lambda: lost(second, stream=stream))
            assert found["link_down"] == 0.0
            second.close()
            found = lost_to("link_down", lambda: lost(stream=stream))
            second.restart()
            eventually(lambda: states(stream)[1] == "open", "it is back")
            found = lost_to("buffer_empty", lambda: lost(second, stream=stream))
            assert found["link_down"] < OTHERWISE_SECONDS


def test_ages_grow_until_a_checkpoint_is_committed(tmp_path: Path) -> None:
    """What a lost trainer would cost, and whether checkpoints still come."""
    with producing(tmp_path) as producer, consuming(producer.address) as stream:

        def ages() -> tuple[float, float, int]:
            figures = producer.server.statistics().figures
            return figures.oldest_seconds, figures.commit_age_seconds, figures.commits

        producer.generate(range(3))
        taken = iter(stream)
        stream.trained([next(taken)["id"] for _ in range(3)], 1)
        eventually(lambda: min(ages()[:2]) > LOST_SECONDS, "both ages grow")
        stream.committed(stream.state_dict())
        assert stream.wait_committed(10)
        eventually(lambda: ages()[2] == 1, "the commit")
        oldest, since_commit, _ = ages()
        assert oldest == 0.0
        assert since_commit < LOST_SECONDS
        eventually(lambda: ages()[1] > LOST_SECONDS, "the age of the last commit grows")
