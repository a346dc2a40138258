"""A trainer without a model whose memory does not grow: one counter for each prompt there is.

Its checkpoint holds how often each sample was trained, beside the state of the stream; the newest
few are kept.
"""

import json
import os
import time
from pathlib import Path

import numpy as np

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun

KEPT = 3


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    """options: `samples`, how many there are; `checkpoint_seconds`."""
    assert stream.descriptor  # the stream is ours: no older node can commit from now on
    counts = np.zeros(run.options["samples"], np.uint8)
    if (path := newest(run.output_dir)) is not None:
        with np.load(path) as saved:
            counts[:] = saved["counts"]
            stream.load_state_dict(json.loads(str(saved["state"])))

    def save() -> None:
        _save(stream, run.output_dir, counts)

    stream.on_idle_checkpoint(save)
    interval: float = run.options["checkpoint_seconds"]
    due = time.monotonic() + interval
    for step, item in enumerate(stream, start=1):
        counts[item["id"].ordinal] += 1
        stream.trained([item["id"]], step, {"loss": 0.0})
        if stream.checkpoint_wanted or time.monotonic() >= due:
            save()
            due = time.monotonic() + interval
    save()


def _save(stream: HiddenStateStream, directory: Path, counts: np.ndarray) -> None:
    """Named by term and number: the node that was replaced may still be saving."""
    state = stream.state_dict()
    path = directory / f"counts-{state['term']:06d}-{state['number']:08d}.npz"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, counts=counts, state=json.dumps(state))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    stream.committed(state)
    for old in _saved(directory)[:-KEPT]:
        old.unlink(missing_ok=True)


def _saved(directory: Path) -> list[Path]:
    return sorted(directory.glob("counts-*.npz"), key=lambda path: path.name)


def newest(directory: Path) -> Path | None:
    """The checkpoint of the highest (term, number)."""
    saved = _saved(directory)
    return saved[-1] if saved else None
