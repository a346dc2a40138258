"""A trainer without a model: its checkpoint counts how often each sample was trained."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun

CHECKPOINT_STEPS = 5


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    path = run.output_dir / "checkpoint.json"
    counts: Counter[str] = Counter()
    interval: int = run.options.get("checkpoint_steps", CHECKPOINT_STEPS)
    if path.exists():
        loaded = json.loads(path.read_text())
        counts.update(loaded["counts"])
        stream.load_state_dict(loaded["draftfeed"])
    for step, item in enumerate(stream, start=1):
        counts[str(item["id"])] += 1
        stream.trained([item["id"]], step, {"loss": 1 / step})
        if step % interval == 0 or stream.checkpoint_wanted:
            save(path, counts, stream)
    save(path, counts, stream)


def save(path: Path, counts: "Counter[str]", stream: HiddenStateStream) -> None:
    state: dict[str, Any] = stream.state_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w") as file:
        json.dump({"counts": counts, "draftfeed": state}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    stream.committed(state)
