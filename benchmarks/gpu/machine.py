"""The machine that is measured. Every CUDA call of the benchmark is in this file.

`HostMachine` does the same without a GPU, at once and in order, so that the whole benchmark can
be run where there is none.
"""

import platform
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from draftfeed_producer.tap.streams import CudaStreams, HostStreams, Streams

MEANT = {(12, 0): "RTX PRO 6000", (10, 0): "B200"}
"""Compute capabilities the bars are for."""

Work = Callable[[], object]
Lane = Callable[[], AbstractContextManager[Any]]
"""Calls inside the context are queued on a stream of their own."""


class Mark(Protocol):
    """A point on the stream that was current when it was made."""

    def wait(self) -> None: ...
    def done(self) -> bool: ...
    def seconds_since(self, earlier: Any) -> float:
        """Both marks must have been reached."""
        ...


class Machine(Protocol):
    device: torch.device
    graphs: bool
    """Whether there are CUDA graphs."""
    card: str
    """Name for file names: lower case, digits and dashes."""

    def streams(self) -> Streams: ...
    def mark(self) -> Mark: ...
    def lane(self) -> Lane: ...
    def synchronize(self) -> None: ...
    def captured(self, work: Work) -> Work:
        """`work` as one CUDA graph; without graphs `work` itself. It has run a few times then."""
        ...

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor: ...
    def free_bytes(self) -> int: ...
    def give_back(self) -> None:
        """What was freed can be allocated by anybody again."""
        ...

    def describe(self) -> dict[str, Any]: ...
    def state(self) -> dict[str, Any]:
        """Clocks, temperature and power right now, as far as they can be read."""
        ...


class CudaMark:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return self.event.query()

    def seconds_since(self, earlier: "CudaMark") -> float:
        return earlier.event.elapsed_time(self.event) / 1000


class CudaMachine:
    graphs = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._properties = torch.cuda.get_device_properties(self.device)
        self.card = re.sub(r"[^a-z0-9]+", "-", self._properties.name.lower()).strip("-")
        self.capability = (self._properties.major, self._properties.minor)

    def streams(self) -> Streams:
        return CudaStreams(self.device)

    def mark(self) -> CudaMark:
        return CudaMark()

    def lane(self) -> Lane:
        stream = torch.cuda.Stream(self.device)
        return lambda: torch.cuda.stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def captured(self, work: Work) -> Work:
        # Triton compiles and cuBLAS makes its workspace at the first call: neither may happen
        # while a graph is captured. On a stream of its own, as the capture is.
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(3):
                work()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        self.synchronize()
        return graph.replay

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def give_back(self) -> None:
        self.synchronize()
        torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        found = self._properties
        return {
            "card": found.name,
            "compute_capability": f"sm_{found.major}{found.minor}",
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
            "l2_bytes": found.L2_cache_size,
            "driver": self._smi("driver_version").get("driver_version", "unknown"),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "triton": _version_of("triton"),
            "python": platform.python_version(),
        }

    def state(self) -> dict[str, Any]:
        return self._smi(
            "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw", "pstate"
        )

    def _smi(self, *fields: str) -> dict[str, Any]:
        """Empty where nvidia-smi is not there or does not know this card."""
        which = f"--id=GPU-{str(self._properties.uuid).removeprefix('GPU-')}"
        command = ["nvidia-smi", which, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return {}
        values = [value.strip() for value in answer.stdout.strip().split(",")]
        return dict(zip(fields, values, strict=False))


class HostMark:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def seconds_since(self, earlier: "HostMark") -> float:
        return self.at - earlier.at


class HostMachine:
    device = torch.device("cpu")
    graphs = False
    card = "cpu"
    capability = None

    def streams(self) -> Streams:
        return HostStreams()

    def mark(self) -> HostMark:
        return HostMark()

    def lane(self) -> Lane:
        return nullcontext

    def synchronize(self) -> None:
        pass

    def captured(self, work: Work) -> Work:
        work()
        return work

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def free_bytes(self) -> int:
        return 1 << 30

    def give_back(self) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {
            "card": "no GPU",
            "compute_capability": "none",
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def state(self) -> dict[str, Any]:
        return {}


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
