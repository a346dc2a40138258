"""A trainer without a model: its checkpoint counts how often each sample was trained."""

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun

CHECKPOINT_STEPS = 5
GO_ON = "go-on"


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    assert stream.descriptor  # the stream is ours: what an older node still saves cannot count
    interval: int = run.options.get("checkpoint_steps", CHECKPOINT_STEPS)
    counts: Counter[str] = Counter()
    if (path := newest(run.output_dir)) is not None:
        loaded = json.loads(path.read_text())
        counts.update(loaded["counts"])
        stream.load_state_dict(loaded["draftfeed"])

    def save() -> None:
        _save(run.output_dir, counts, stream)

    stream.on_idle_checkpoint(save)
    for step, item in enumerate(stream, start=1):
        counts[str(item["id"])] += 1
        stream.trained([item["id"]], step, {"loss": 1 / step})
        if step % interval == 0 or stream.checkpoint_wanted:
            save()
        if step == run.options.get("pause_after"):
            _pause(stream, run.output_dir / GO_ON)
    save()


def _pause(stream: HiddenStateStream, until: Path) -> None:
    """Until that file is there, or it is time to end."""
    while not until.exists() and not stream.draining:
        assert stream.descriptor  # raises when another consumer took over
        threading.Event().wait(0.05)


def newest(directory: Path) -> Path | None:
    """The checkpoint of the highest (term, number)."""
    return max(directory.glob("checkpoint-*.json"), default=None, key=lambda path: path.name)


def _save(directory: Path, counts: "Counter[str]", stream: HiddenStateStream) -> None:
    state: dict[str, Any] = stream.state_dict()
    path = directory / f"checkpoint-{state['term']:06d}-{state['number']:08d}.json"
    part = path.with_suffix(".part")
    with part.open("w") as file:
        json.dump({"counts": counts, "draftfeed": state}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    stream.committed(state)
