"""Producer and consumer as child processes, watched until both have ended."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from draftfeed_deploy.errors import ServiceFailed
from draftfeed_deploy.monitor import INTERVAL_SECONDS, View
from draftfeed_deploy.progress import Lines, Panels
from draftfeed_deploy.records import ConsumerSnapshot, ProducerSnapshot, Snapshot

logger = logging.getLogger(__name__)

STOP_SECONDS = 20.0
STANDSTILL_SECONDS = 120.0
SNAPSHOTS: dict[str, type[ProducerSnapshot] | type[ConsumerSnapshot]] = {
    "producer": ProducerSnapshot,
    "consumer": ConsumerSnapshot,
}


def run_services(directory: Path, console: Console) -> None:
    """Start both from `directory`, wait for their ends. Raises ServiceFailed.

    Neither outlives this call.
    """
    with ExitStack() as stack:
        views = stack.enter_context(_views(console))
        services = [stack.enter_context(_started(name, directory)) for name in SNAPSHOTS]
        standstill = Standstill(STANDSTILL_SECONDS, time.monotonic())
        while any(service.poll() is None for service in services):
            for service in services:
                service.check()
                for snapshot in service.new_snapshots():
                    views[service.name].show(snapshot)
                    standstill.note(snapshot, time.monotonic())
            _check_moving(standstill, services)
            time.sleep(INTERVAL_SECONDS)
        for service in services:
            service.check()


class Standstill:
    """Whether anything is still happening, by the counters of both sides.

    A snapshot says that a monitor thread lives, which is not the same. Loading a model moves no
    counter and takes as long as the disk is slow: there the clock stands.
    """

    def __init__(self, limit_seconds: float, now: float) -> None:
        self._limit_seconds, self._moved_at = limit_seconds, now
        self._seen: dict[type[Snapshot], tuple[object, ...]] = {}
        self._loading = True

    def note(self, snapshot: Snapshot, now: float) -> None:
        match snapshot:
            case ProducerSnapshot():
                self._loading = snapshot.phase == "loading"
                counters: tuple[object, ...] = (
                    snapshot.phase,
                    snapshot.captured,
                    snapshot.samples,
                    snapshot.committed,
                    snapshot.rejected,
                )
            case ConsumerSnapshot():
                counters = (snapshot.samples, snapshot.step, snapshot.trained, snapshot.rejected)
        if self._seen.get(type(snapshot)) != counters or self._loading:
            self._seen[type(snapshot)] = counters
            self._moved_at = now

    def reached(self, now: float) -> bool:
        return now - self._moved_at > self._limit_seconds


class Service:
    """One child process, its log and its statistics."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._stats_path = directory / name / "stats.jsonl"
        self._offset = 0
        command = [sys.executable, "-m", "draftfeed_deploy.cli", name]
        command += ["-c", str(directory / f"{name}.toml"), "--run-dir", str(directory / name)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def new_snapshots(self) -> Iterator[Snapshot]:
        if not self._stats_path.exists():
            return
        with self._stats_path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    yield msgspec.json.decode(line, type=SNAPSHOTS[self.name])

    def check(self) -> None:
        """Raises ServiceFailed when it has failed."""
        code = self.poll()
        if code:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "no output"
            raise ServiceFailed(
                f"the {self.name} ended with exit code {code}: {last}; see {self.log_path}"
            )

    def stop(self) -> None:
        """Ask, wait, then insist; a second Ctrl-C insists at once. Returns when it is gone."""
        if self.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            logger.warning("the %s does not stop; killing it", self.name)
            self._process.kill()
            self._process.wait()


def _check_moving(standstill: Standstill, services: list[Service]) -> None:
    if standstill.reached(time.monotonic()):
        logs = " and ".join(str(service.log_path) for service in services)
        raise ServiceFailed(
            f"nothing has moved on either side for {STANDSTILL_SECONDS:.0f} s; see {logs}"
        )


@contextmanager
def _started(name: str, directory: Path) -> Iterator[Service]:
    service = Service(name, directory)
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def _views(console: Console) -> Iterator[dict[str, View]]:
    names = list(SNAPSHOTS)
    if not console.is_terminal:
        yield {name: Lines(name) for name in names}
        return
    with Panels(console, names) as panels:
        yield {name: panels.view(name) for name in names}
