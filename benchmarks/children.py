"""The processes of a benchmark, in a directory of its own. None outlives `close`."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
DRAFTFEED = (sys.executable, "-m", "draftfeed_deploy.cli")
TAKEN_OVER = 3
"""Exit code of a consumer in whose place another one is."""
POLL_SECONDS = 0.02


def free_port() -> int:
    """Of loopback. Somebody else may get it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Children:
    """What they print goes to NAME.log. Benchmarks can be imported, as trainers are."""

    def __init__(self, directory: Path, end_seconds: float) -> None:
        """end_seconds: how long anything may be waited for, unless it says so itself."""
        self.directory, self._end_seconds = directory, end_seconds
        self.processes: list[subprocess.Popen[bytes]] = []
        self.meanwhile: Callable[[], object] | None = None
        """Called again and again while something is waited for."""

    def start(
        self,
        name: str,
        command: tuple[str, ...],
        cores: frozenset[int] = frozenset(),
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[bytes]":
        """cores: that it may run on, all of ours unless given."""
        path = os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))
        ours = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**os.environ, **ours, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
            )
        self.processes.append(process)
        return process

    def until(
        self,
        there: Callable[[], bool],
        what: str,
        *,
        poll_seconds: float = POLL_SECONDS,
        seconds: float = 0.0,
    ) -> None:
        """Raises SystemExit when it takes too long or a process fails. seconds: instead of
        `end_seconds`."""
        deadline = time.monotonic() + (seconds or self._end_seconds)
        while not there():
            failed = [p for p in self.processes if p.poll() not in (None, 0, TAKEN_OVER)]
            if failed or time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-1500:] for p in self.directory.glob("*.log"))
                raise SystemExit(f"waited in vain until {what}; the logs end with\n{logs}")
            if self.meanwhile is not None:
                self.meanwhile()
            time.sleep(poll_seconds)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
