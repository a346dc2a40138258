"""A trainer that takes samples and does nothing, one of several ranks or alone.

What it has had so far is in a file that others can look at while it runs, one for each rank: the
numbers of `Figures`, eight bytes each.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftfeed_consumer.link import Link
from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun
from draftfeed_proto import messages as m
from thread_names import write_thread_names

CHUNKS = (m.Chunk, m.ChunksAt)


class Figures(NamedTuple):
    samples: int
    logical_bytes: int
    """Of the hidden states, as they are trained on."""
    said: int
    """Control messages to producers."""
    heard: int
    """Control messages from them: those without a chunk, or a place of one."""
    chunks: int


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    """options: `directory`, where the files go."""
    rank = os.environ.get("RANK", "0")
    directory = Path(run.options["directory"])
    figures = np.memmap(
        directory / f"member-{rank}.bin", np.int64, "w+", shape=len(Figures._fields)
    )
    _count_messages(figures)
    assert stream.descriptor
    write_thread_names(directory / f"member-{rank}.json")
    for step, item in enumerate(stream, start=1):
        figures[0] += 1
        figures[1] += item["hidden_states"].nbytes
        stream.trained([item["id"]], step)
    stream.committed(stream.state_dict())


def _count_messages(figures: np.ndarray) -> None:
    send, receive = Link.send, Link.receive

    def counted_send(self: Link, message: Any) -> None:
        figures[2] += 1
        send(self, message)

    def counted_receive(self: Link) -> Any:
        got = receive(self)
        if got is not None:
            figures[4 if isinstance(got[0], CHUNKS) else 3] += 1
        return got

    Link.send, Link.receive = counted_send, counted_receive  # type: ignore[method-assign]


def read(path: Path) -> Figures:
    """All zero as long as it is not there."""
    data = path.read_bytes() if path.exists() else b""
    count = len(Figures._fields)
    if len(data) < 8 * count:
        return Figures(*[0] * count)
    return Figures(*map(int, np.frombuffer(data, np.int64)))
