"""Checkpoints of a training loop of your own: durable before the producer hears of them.

    directory/
        NAME-000003-00000017.pt    term 3, checkpoint 17 of the run

Another node may take over while this one is saving, and both save to the same place when that is
shared storage. So a checkpoint is named by the term and number of the stream's state: no two nodes
ever have the same term, and the newest one is that of the highest, whenever it was written.

With several ranks all make the same calls. The first one writes, and chooses what all of them load:
if each looked for itself, an older node might finish a save in between.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from draftfeed_consumer.trainers import SampleStream

logger = logging.getLogger(__name__)

STREAM_STATE = "draftfeed"


class Checkpoints:
    """Those of one trainer in one directory, with the stream's state in each."""

    def __init__(
        self, directory: Path, stream: SampleStream, name: str = "checkpoint", keep: int = 2
    ) -> None:
        """keep: so many of the newest; older ones are deleted."""
        self._directory, self._stream = directory, stream
        self._name, self._keep = name, keep

    def paths(self) -> list[Path]:
        """Oldest first, by term and number."""
        return sorted(self._directory.glob(f"{self._name}-*.pt"))

    def load(self) -> dict[str, Any] | None:
        """What `save` was given for the newest one, on the CPU, or None when there is none. The
        stream goes on from there, and delivers only what that one has not seen.

        Waits until the stream is ours: from then on nothing that an older node still saves can
        count. Raises StreamError, and StateError when the checkpoint is of another stream.
        """
        assert self._stream.descriptor
        path = _of_first_rank(max(self.paths(), default=None))
        if path is None:
            logger.info("begins anew: there is no checkpoint in %s", self._directory)
            return None
        logger.info("goes on from %s", path)
        parts: dict[str, Any] = torch.load(path, map_location="cpu")
        self._stream.load_state_dict(parts.pop(STREAM_STATE))
        return parts

    def save(self, parts: dict[str, Any]) -> Path:
        """At a step boundary. When it returns the checkpoint is on the disk, and the producer is
        being told that what was trained so far need not be kept.

        parts: state dicts and plain values, under any name but "draftfeed".
        """
        state = self._stream.state_dict()
        name = f"{self._name}-{state['term']:06d}-{state['number']:08d}.pt"
        path = self._directory / name
        if _first_rank():
            write_durably(path, lambda file: torch.save({**parts, STREAM_STATE: state}, file))
        self._stream.committed(state)  # the other ranks wait here for the first
        if _first_rank():
            for old in self.paths()[: -self._keep]:
                old.unlink(missing_ok=True)
        return path


def _first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _of_first_rank(path: Path | None) -> Path | None:
    """Its choice, on every rank."""
    if not dist.is_initialized():
        return path
    box = [path]
    dist.broadcast_object_list(box)
    return box[0]


def write_durably(path: Path, write: Callable[[Any], Any]) -> None:
    """The file is whole and on the disk when this returns, or it is not there."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """What a file holds, or the names in a directory, are there for good."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
