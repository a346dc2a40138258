"""A trainer without a model: it learns how often it saw each sample, and what was in it."""

import json
import os
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import msgspec

from chaos.audit import content
from chaos.checkpoints import Checkpoint, Control, newest, read
from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import Item, TrainerRun

KEPT = 4


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    trainer = Trainer(stream, run)
    trainer.resume()
    stream.on_idle_checkpoint(trainer.save)
    items = iter(stream)
    while batch := list(islice(items, trainer.batch_samples)):
        trainer.step(batch)
    trainer.save()
    trainer.note("end")


class Trainer:
    def __init__(self, stream: HiddenStateStream, run: TrainerRun) -> None:
        self._stream = stream
        self._dir = Path(run.options["checkpoints"])
        self._control_path = run.output_dir / "control.json"
        self._events_path = run.output_dir / "events.jsonl"
        self._interval: int = run.options["checkpoint_steps"]
        self.batch_samples: int = run.options["batch_samples"]
        self._counts: Counter[str] = Counter()
        self._digests: dict[str, str] = {}
        self._steps = self._saves = 0

    def resume(self) -> None:
        assert self._stream.descriptor  # waits for the grants
        self.note("granted")
        path = newest(self._dir)
        if path is not None:
            loaded = read(path)
            self._counts.update(loaded.counts)
            self._digests.update(loaded.digests)
            self._steps = loaded.steps
            self._stream.load_state_dict(loaded.draftfeed)
        self.note("loaded", name=path.name if path else "")

    def step(self, batch: list[Item]) -> None:
        control = self._control()
        time.sleep(control.step_seconds)
        for item in batch:
            self._learn(item)
        self._steps += 1
        self._stream.trained([item["id"] for item in batch], self._steps, {"loss": 1.0})
        asked, self._saves = control.saves > self._saves, control.saves
        if asked or self._steps % self._interval == 0 or self._stream.checkpoint_wanted:
            self.save()

    def _learn(self, item: Item) -> None:
        id = str(item["id"])
        self._counts[id] += 1
        tensors = (item[name].numpy() for name in ("input_ids", "loss_mask", "hidden_states"))
        self._digests[id] = content(*tensors)

    def save(self) -> None:
        state = self._stream.state_dict()
        path = self._dir / f"{state['term']:06d}-{state['number']:08d}.json"
        self.note("saving", name=path.name)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            made = Checkpoint(self._counts, self._digests, self._steps, state)
            file.write(msgspec.json.encode(made))
            file.flush()
            os.fsync(file.fileno())
        time.sleep(self._control().save_seconds)
        part.replace(path)
        self.note("saved", name=path.name)
        self._stream.committed(state)
        for old in sorted(self._dir.glob("*-*.json"))[:-KEPT]:
            old.unlink(missing_ok=True)

    def note(self, event: str, **details: str) -> None:
        """For the harness. CLOCK_MONOTONIC is the same in every process."""
        line = json.dumps({"at": time.monotonic(), "event": event, **details}) + "\n"
        with self._events_path.open("a") as file:
            file.write(line)

    def _control(self) -> Control:
        return msgspec.json.decode(self._control_path.read_bytes(), type=Control)
