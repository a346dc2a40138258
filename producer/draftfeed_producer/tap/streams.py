"""What the staging ring needs of a device: memory, copies on a stream of its own, and marks."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_cuda: Any = torch.cuda  # its classes are annotated in part


class Event(Protocol):
    """A mark on a stream: done when everything queued there before it has run."""

    def done(self) -> bool:
        """Never blocks."""
        ...

    def wait(self) -> None:
        """Blocks the calling thread, never a stream."""
        ...


class Streams(Protocol):
    """Two streams: the one the caller computes on, and the ring's own for copies."""

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that the gather writes, contiguous."""
        ...

    def slab(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that copies land in, contiguous."""
        ...

    def written(self) -> Event:
        """A mark on the caller's current stream: the one it computes on, or one behind that."""
        ...

    def copy(self, host: Tensor, staged: Tensor, after: Event) -> None:
        """Queues a copy on the ring's own stream, behind `after` there, and returns at once.

        Both are contiguous, of one shape and dtype: anything else would need a temporary.
        """
        ...

    def copied(self) -> Event:
        """A mark on the ring's own stream."""
        ...


class CudaStreams:
    """One CUDA device. Not to be called while a CUDA graph is being captured.

    `Tensor.record_stream` is not needed: it tells torch's allocator that a tensor which may be
    freed is still read on another stream, and the ring keeps its memory until its last copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = _cuda.Stream(device)

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def slab(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned: only then is the copy not one that the thread waits for."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def written(self) -> Event:
        event = _cuda.Event()
        event.record(_cuda.current_stream(self._device))
        return _CudaEvent(event)

    def copy(self, host: Tensor, staged: Tensor, after: Event) -> None:
        assert isinstance(after, _CudaEvent), after
        with _cuda.stream(self._copies):
            self._copies.wait_event(after.event)
            host.copy_(staged, non_blocking=True)

    def copied(self) -> Event:
        # blocking: a thread that waits sleeps, and others have its core; without it, it spins.
        event = _cuda.Event(blocking=True)
        event.record(self._copies)
        return _CudaEvent(event)


class _CudaEvent:
    """Made without timing, which torch does unless asked: such events are the cheapest."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class HostStreams:
    """The CPU, which has no streams: what is queued has run, and every event is done."""

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def slab(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def written(self) -> Event:
        return _DONE

    def copy(self, host: Tensor, staged: Tensor, after: Event) -> None:
        host.copy_(staged)

    def copied(self) -> Event:
        return _DONE


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


_DONE = _Done()


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Without a wait for what the device still has to do. Pinned memory that torch made is not
    handed out again before such a copy from it has run."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
