"""Files between the stub trainer and the harness: checkpoints, wishes, notes.

The checkpoint directory stands for storage that all training nodes share. A node that was
replaced may still finish a save there, so a checkpoint is named by (term, number), no two nodes
ever share a term, and the newest by that order is the one to load. It may be listed only when
every producer has granted the stream (`stream.descriptor` waits for that): after the grant no
older node can commit anything that the list does not show.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """What the harness wants of the trainer right now; it rewrites the file at any time."""

    step_seconds: float = 0.0
    save_seconds: float = 0.0
    """Between the moment a checkpoint's state is taken and the one when it is durable."""
    saves: int = 0
    """A checkpoint is made at the next step when this has grown."""


class Checkpoint(msgspec.Struct, frozen=True):
    counts: dict[str, int]
    digests: dict[str, str]
    steps: int
    draftfeed: dict[str, Any]


def newest(directory: Path) -> Path | None:
    """The checkpoint to resume from."""
    return max(directory.glob("*-*.json"), default=None, key=lambda path: path.name)


def read(path: Path) -> Checkpoint:
    return msgspec.json.decode(path.read_bytes(), type=Checkpoint)


def events(output_dir: Path) -> Iterator[dict[str, Any]]:
    """What a trainer has noted so far, whole lines only."""
    path = output_dir / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
