"""What the target runs on: its name, the memory it takes, and who else uses it meanwhile."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

Pids = Callable[[], Iterable[int]]
_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_SMI_SECONDS = 20.0


class Memory(Protocol):
    what: str
    """Which memory it is, in words."""

    def reset(self) -> None:
        """The peak is looked for from here on, where the system can do that."""
        ...

    def peak_bytes(self) -> int | None:
        """None: the system does not tell."""
        ...


class ProcessMemory:
    """Of processes on a CPU. Pages that they share count for each."""

    def __init__(self, pids: Pids, whose: str) -> None:
        self._pids = pids
        self.what = f"peak RSS of {whose}"

    def reset(self) -> None:
        for pid in self._pids():
            with suppress(OSError):
                (_PROC / str(pid) / "clear_refs").write_text("5")

    def peak_bytes(self) -> int | None:
        return sum(_peak_rss(pid) for pid in self._pids()) or None


class TorchMemory:
    """Of tensors of this process on one GPU. Not verified: no GPU has run this."""

    what = "most that tensors took on the GPU"

    def __init__(self, device: str) -> None:
        self._device = device

    def reset(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int | None:
        import torch

        return int(torch.cuda.max_memory_allocated(self._device))


class CardMemory:
    """What nvidia-smi says is in use, whoever uses it: SGLang takes its memory when it starts and
    keeps it. Not verified: no GPU has run this."""

    what = "most that a GPU had in use, by nvidia-smi"

    def __init__(self, cards: Sequence[str]) -> None:
        self._cards = cards

    def reset(self) -> None:
        pass

    def peak_bytes(self) -> int | None:
        lines = nvidia_smi("memory.used", self._cards)
        numbers = [int(line) for line in lines if line.isdigit()]
        return max(numbers) << 20 if numbers else None


def nvidia_smi(field: str, cards: Sequence[str]) -> list[str]:
    """One line for each card; none where there is no such program."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, "-i", ",".join(cards)],
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines()]


def cards(first: int, count: int) -> list[str]:
    """As nvidia-smi knows those that CUDA counts from `first` on."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    return [visible[i] if i < len(visible) else str(i) for i in range(first, first + count)]


def processor() -> str:
    with suppress(OSError):
        for line in (_PROC / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def session(leader: int) -> list[int]:
    """Processes of it; `leader` is the id of the one that began it."""
    found = []
    for path in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(path.name)) == leader:
                found.append(int(path.name))
    return found


class Others:
    """CPU time of everybody else on the cores that this process may use, from `begin` on."""

    def __init__(self, pids: Pids) -> None:
        """pids: the engine's processes, this one aside."""
        self._pids = pids
        self._cores = sorted(os.sched_getaffinity(0))
        self._seconds = self._used = 0.0

    def begin(self) -> None:
        self._since = time.monotonic()
        self._busy, self._own = self._busy_seconds(), self._own_seconds()

    def end(self) -> None:
        self._seconds += time.monotonic() - self._since
        own = self._own_seconds() - self._own
        self._used += max(0.0, self._busy_seconds() - self._busy - own)

    @property
    def cores(self) -> float:
        """How many cores they used, on average."""
        return self._used / self._seconds if self._seconds else 0.0

    def _busy_seconds(self) -> float:
        wanted = {f"cpu{core}" for core in self._cores}
        ticks = 0
        with suppress(OSError):
            for line in (_PROC / "stat").read_text().splitlines():
                name, *fields = line.split()
                if name in wanted:
                    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
                    ticks += user + nice + system + irq + softirq + steal
        return ticks / _TICKS

    def _own_seconds(self) -> float:
        return time.process_time() + sum(_cpu_seconds(pid) for pid in self._pids())


def _cpu_seconds(pid: int) -> float:
    """Of all threads, by the clock that clock_getcpuclockid(3) names."""
    with suppress(OSError):
        return time.clock_gettime(~pid << 3 | 2)
    return 0.0


def _peak_rss(pid: int) -> int:
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
