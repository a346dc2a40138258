"""The buffer between the network and the trainer: bounded in bytes, shuffled inside a window."""

import random
import threading
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np

from draftfeed_consumer.errors import BufferTooSmall
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample, decoded_bytes
from draftfeed_proto.slabs import Slabs

STEP_SECONDS = 0.2


class BufferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    capacity_bytes: int = 4 << 30
    """Decoded bytes of all samples received and not yet released by the trainer. Memory that was
    once needed for them is kept for the next ones."""
    decode_threads: int = 2
    """That check and decode chunks, beside the one that receives; 1: that one does it, too. New
    memory is what takes the time, so that one thread alone would hold up a fast network."""
    batch_samples: int = 1
    """Samples that the trainer holds at once before it releases any. A stream whose largest
    sample does not fit beside so many is refused at the start."""
    window_samples: int = 64
    """Samples to wait for before one of them is drawn at random; 1 keeps the order of arrival."""
    seed: int = 0
    stall_seconds: float = 1.0
    """When nothing has arrived for this long, a window that is not full yields all the same."""
    hoard_seconds: float = 30.0
    """A trainer that waits for a sample, while what it has not released leaves no room for one,
    is told so after this long: another of its threads may be about to release."""

    def __post_init__(self) -> None:
        for field in ("capacity_bytes", "decode_threads", "window_samples", "batch_samples"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, it must be at least 1")
        for field in ("stall_seconds", "hoard_seconds"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)}, it must not be negative")


class BufferStatistics(NamedTuple):
    bytes: int
    """Reserved, ready and held by the trainer together."""
    capacity_bytes: int
    ready: int
    held_bytes: int
    """Of samples the trainer took and has not released."""
    empty_seconds: float
    """Time the trainer waited for a sample."""


class Buffer:
    """Room is reserved before a sample is asked for, so that what arrives always fits.

    `reserve`, `empty`, `put` and `cancel` belong to the receiving thread, `take` and `release` to
    the trainer.
    """

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self._memory = Slabs(config.capacity_bytes)
        self._random = random.Random(config.seed)
        self._changed = threading.Condition()
        self._reserved_bytes = 0
        self._ready: list[Sample] = []
        self._held: dict[SampleId, int] = {}
        self._ended = False
        self._failure: Exception | None = None
        self._arrived_at = time.monotonic()
        self._empty_seconds = 0.0
        self._refused_bytes = 0
        """Size of the sample that room was refused for; 0 when none is waiting for room."""
        self._hoarding_since: float | None = None

    # receiving thread

    def reserve(self, size_bytes: int) -> bool:
        """Take room for a sample of this many decoded bytes. Raises BufferTooSmall when it could
        not fit even into an empty buffer."""
        capacity = self._config.capacity_bytes
        if size_bytes > capacity:
            raise BufferTooSmall(size_bytes, capacity, f"one sample has {size_bytes} bytes")
        with self._changed:
            if self._bytes() + size_bytes > capacity:
                self._refused_bytes = size_bytes
                self._changed.notify_all()
                return False
            self._refused_bytes = 0
            self._reserved_bytes += size_bytes
            return True

    def cancel(self, size_bytes: int) -> None:
        """Give back room for a sample that will not come."""
        with self._changed:
            self._reserved_bytes -= size_bytes

    def empty(self, shape: tuple[int, ...], dtype: type[Any]) -> np.ndarray:
        """Memory for the states of a sample for which room was reserved."""
        return self._memory.empty(shape, dtype)

    def put(self, sample: Sample) -> None:
        """A sample for which room was reserved."""
        with self._changed:
            self._reserved_bytes -= size_of(sample)
            self._ready.append(sample)
            self._arrived_at = time.monotonic()
            self._changed.notify_all()

    def drain(self) -> list[SampleId]:
        """Drop what the trainer has not taken, and end; the ids of what was dropped."""
        with self._changed:
            unseen = [sample.id for sample in self._ready]
            self._ready.clear()
            self._ended = True
            self._changed.notify_all()
            return unseen

    def end(self) -> None:
        """No more will come; `take` gives what is ready and then None."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def reopen(self) -> None:
        """More will come after all: what somebody gave back."""
        with self._changed:
            self._ended = False

    def fail(self, error: Exception) -> None:
        """`take` raises this from now on."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # trainer

    def wait(self, timeout_seconds: float) -> bool:
        """Whether `take` would return at once, now or within the time. Raises what it raises."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self._may_draw():
                self._check_progress()
                since = time.monotonic()
                if since >= deadline:
                    return False
                self._changed.wait(min(STEP_SECONDS, deadline - since))
                self._empty_seconds += time.monotonic() - since  # seen while it lasts
            return True

    def take(self) -> Sample | None:
        """A sample drawn from the window, or None at the end of the stream.

        Raises what `fail` was given, and BufferTooSmall when the trainer waits for more while what
        it holds leaves no room for it.
        """
        while not self.wait(STEP_SECONDS):
            pass
        with self._changed:
            if self._failure is not None:
                raise self._failure
            return self._draw() if self._ready else None

    def release(self, id: SampleId) -> bool:
        """The trainer has copied the tensors or dropped them; whether it held them."""
        with self._changed:
            self._refused_bytes = 0  # the receiving thread tries again
            self._hoarding_since = None
            return self._held.pop(id, None) is not None

    @property
    def ended(self) -> bool:
        """Nothing is left and no more will come."""
        with self._changed:
            return self._ended and not self._ready

    def statistics(self) -> BufferStatistics:
        with self._changed:
            return BufferStatistics(
                self._bytes(),
                self._config.capacity_bytes,
                len(self._ready),
                sum(self._held.values()),
                self._empty_seconds,
            )

    def _bytes(self) -> int:
        ready = sum(size_of(sample) for sample in self._ready)
        return self._reserved_bytes + ready + sum(self._held.values())

    def _may_draw(self) -> bool:
        if self._failure is not None or self._ended:
            return True
        if not self._ready:
            return False
        stalled = time.monotonic() - self._arrived_at >= self._config.stall_seconds
        full = len(self._ready) >= self._config.window_samples or self._refused_bytes > 0
        return full or stalled

    def _check_progress(self) -> None:
        held = sum(self._held.values())
        if self._ready or self._reserved_bytes or not self._refused_bytes or not held:
            self._hoarding_since = None
            return
        if self._hoarding_since is None:
            self._hoarding_since = time.monotonic()
        if time.monotonic() - self._hoarding_since < self._config.hoard_seconds:
            return
        why = f"the trainer holds {held} bytes in {len(self._held)} samples and waits for more"
        raise BufferTooSmall(held + self._refused_bytes, self._config.capacity_bytes, why)

    def _draw(self) -> Sample:
        at = self._random.randrange(min(len(self._ready), max(1, self._config.window_samples)))
        sample = self._ready.pop(at)
        self._held[sample.id] = size_of(sample)
        return sample


def size_of(sample: Sample) -> int:
    """Decoded bytes, as offers state them."""
    rows, layers, hidden = sample.hidden_states.shape
    return decoded_bytes(rows, layers, hidden)
