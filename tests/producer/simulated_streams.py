"""A device for tests: two streams whose operations run when the test says so, one at a time.

As on a device, the operations of one stream run in order, those of two in any order that events
allow, and memory is read and written when an operation runs, not when it is queued.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftfeed_producer.tap.ring import StagingRing, make_slabs
from draftfeed_producer.tap.streams import Event, Streams

HIDDEN = 3
"""Of the small rings."""


class Stuck(Exception):
    """Somebody waits for what cannot happen, or blocks who must not."""


class SimulatedStream:
    def __init__(self) -> None:
        self._queue: deque[Callable[[], object] | SimulatedEvent] = deque()
        self._running = False

    def __len__(self) -> int:
        return len(self._queue)

    def queue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def hold(self, event: "SimulatedEvent") -> None:
        """What is queued from now on runs after `event`."""
        self._queue.append(event)

    def step(self) -> bool:
        """Runs one operation; False when there is none that may run."""
        if not self._queue or self._blocker():
            return False
        operation = self._queue.popleft()
        if not isinstance(operation, SimulatedEvent):
            operation()
        return True

    def run_until(self, event: "SimulatedEvent") -> None:
        """Runs what has to run for `event`, here and elsewhere, and nothing else."""
        if self._running:
            raise Stuck("a stream waits for itself")
        self._running = True
        try:
            while not event.done():
                if blocker := self._blocker():
                    blocker.stream.run_until(blocker)
                if not self.step():
                    raise Stuck("an event that nobody has recorded")
        finally:
            self._running = False

    def _blocker(self) -> "SimulatedEvent | None":
        first = self._queue[0] if self._queue else None
        return first if isinstance(first, SimulatedEvent) and not first.done() else None


@dataclass
class SimulatedEvent:
    streams: "SimulatedStreams"
    stream: SimulatedStream
    reached: list[bool] = field(default_factory=list)

    def record(self) -> "SimulatedEvent":
        self.stream.queue(lambda: self.reached.append(True))
        return self

    def done(self) -> bool:
        return bool(self.reached)

    def wait(self) -> None:
        if not self.streams.may_block:
            raise Stuck("blocked in an operation that must not block")
        self.stream.run_until(self)


class SimulatedStreams:
    """`on_copy(host, staged)` is called before each row of a copy, which is one operation."""

    def __init__(self, on_copy: Callable[[Tensor, Tensor], None] | None = None) -> None:
        self.forward, self.copies = SimulatedStream(), SimulatedStream()
        self.may_block = False
        self.allocated_bytes = 0
        self._on_copy = on_copy

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Within it the thread may wait for events."""
        self.may_block = True
        try:
            yield
        finally:
            self.may_block = False

    def run(self) -> None:
        """Everything that is queued."""
        while self.forward.step() or self.copies.step():
            pass

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory = torch.empty(shape, dtype=dtype)
        self.allocated_bytes += memory.nbytes
        return memory

    slab = staging

    def written(self) -> Event:
        return SimulatedEvent(self, self.forward).record()

    def copy(self, host: Tensor, staged: Tensor, after: Event) -> None:
        assert isinstance(after, SimulatedEvent)
        assert (host.shape, host.dtype) == (staged.shape, staged.dtype)
        assert host.is_contiguous()
        assert staged.is_contiguous()
        self.copies.hold(after)
        for host_row, staged_row in zip(host, staged, strict=True):
            self.copies.queue(lambda to=host_row, of=staged_row: self._copy_row(to, of))

    def copied(self) -> Event:
        return SimulatedEvent(self, self.copies).record()

    def _copy_row(self, host: Tensor, staged: Tensor) -> None:
        if self._on_copy:
            self._on_copy(host, staged)
        host.copy_(staged)


def small_ring(
    streams: Streams,
    slots: int,
    piece_rows: int,
    slabs: int,
    layers: int = 2,
    dtype: torch.dtype = torch.float16,
) -> StagingRing:
    piece_bytes = piece_rows * layers * HIDDEN * 2
    memory = make_slabs(streams, slabs, piece_bytes, layers, HIDDEN, dtype)
    return StagingRing(streams, slots, layers, HIDDEN, dtype=dtype, slabs=memory)
