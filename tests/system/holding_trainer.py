"""A trainer that keeps a sample until the next one is there, as one that is slow does."""

from pathlib import Path

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun
from waiting import eventually

MEASURED = Path("measured")
"""Made by the test when it has looked at both processes."""
RECEIVED = Path("received")


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    samples = run.options["samples"]
    for step, item in enumerate(stream, start=1):
        if step < samples:
            eventually(lambda: stream.statistics().buffer.ready > 0, "the next sample", 250)
        assert item["hidden_states"][-1].any()
        stream.trained([item["id"]], step)
        if step == samples:
            RECEIVED.touch()
            eventually(MEASURED.exists, "the test has measured")
    stream.committed(stream.state_dict())
