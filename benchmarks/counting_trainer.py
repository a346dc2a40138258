"""A trainer without a model, for benchmarks: its checkpoint counts how often each sample came.

`notes.jsonl` beside the configuration says when what happened, in seconds of CLOCK_MONOTONIC,
which all processes of a machine share. While the file named by `options.pause` exists, no sample
is taken.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun

PAUSE_SECONDS = 0.02


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    trainer = CountingTrainer(stream, run)
    trainer.resume()
    stream.on_idle_checkpoint(trainer.save)
    trainer.note("open")
    for step, item in enumerate(stream, start=1):
        if step == 1:
            trainer.note("first sample")
        trainer.count(str(item["id"]))
        stream.trained([item["id"]], step, {"loss": 0.0})
        if step % trainer.interval == 0 or stream.checkpoint_wanted:
            trainer.save()
        trainer.wait_while_paused()
    trainer.save()
    trainer.note("end")


class CountingTrainer:
    def __init__(self, stream: HiddenStateStream, run: TrainerRun) -> None:
        self.interval: int = run.options["checkpoint_steps"]
        self._stream, self._dir = stream, run.output_dir
        self._notes = Path(run.options["notes"])
        self._pause = Path(run.options["pause"])
        self._counts: Counter[str] = Counter()

    def resume(self) -> None:
        assert self._stream.descriptor  # the stream is ours: no older node can commit from now on
        if (path := newest(self._dir)) is not None:
            saved = json.loads(path.read_text())
            self._counts.update(saved["counts"])
            self._stream.load_state_dict(saved["draftfeed"])

    def count(self, id: str) -> None:
        self._counts[id] += 1

    def save(self) -> None:
        """Named by term and number: the node that was replaced may still be saving."""
        state: dict[str, Any] = self._stream.state_dict()
        path = self._dir / f"counts-{state['term']:06d}-{state['number']:08d}.json"
        part = path.with_suffix(".part")
        with part.open("w") as file:
            json.dump({"counts": self._counts, "draftfeed": state}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        self._stream.committed(state)

    def wait_while_paused(self) -> None:
        while self._pause.exists() and not self._stream.draining:
            time.sleep(PAUSE_SECONDS)

    def note(self, event: str) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps({"event": event, "time_seconds": time.monotonic()}) + "\n")


def newest(directory: Path) -> Path | None:
    """The checkpoint of the highest (term, number)."""
    return max(directory.glob("counts-*.json"), default=None, key=lambda path: path.name)
