"""Producer and consumer as child processes, watched until both have ended."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec
from rich.console import Console

from draftfeed_deploy import exits
from draftfeed_deploy.errors import ServiceFailed
from draftfeed_deploy.monitor import INTERVAL_SECONDS, View
from draftfeed_deploy.progress import Lines, Panels
from draftfeed_deploy.records import ConsumerSnapshot, ProducerSnapshot, Snapshot, Swap

logger = logging.getLogger(__name__)

STOP_SECONDS = 20.0
STANDSTILL_SECONDS = 120.0
SNAPSHOTS: dict[str, type[ProducerSnapshot] | type[ConsumerSnapshot]] = {
    "producer": ProducerSnapshot,
    "consumer": ConsumerSnapshot,
    "consumer-2": ConsumerSnapshot,
}


def run_services(
    directory: Path,
    console: Console,
    swap_after: int = 0,
    producer_environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Start both from `directory`, wait for their ends. Raises ServiceFailed.

    swap_after: samples after which a second consumer takes over; 0 = none does.
    producer_environment: variables of the producer beside ours.
    None of them outlives this call.
    """
    with ExitStack() as stack:
        names = list(SNAPSHOTS)[: 3 if swap_after else 2]
        views = stack.enter_context(_views(console, names))
        producer = _started(names[0], directory, environment=producer_environment)
        consumer = stack.enter_context(_started(names[1], directory))
        services = [stack.enter_context(producer), consumer]
        swap = Swapping(swap_after)
        standstill = Standstill(STANDSTILL_SECONDS, time.monotonic())
        while any(service.poll() is None for service in services):
            for service in services:
                service.check()
                for snapshot in service.new_snapshots():
                    views[service.name].show(snapshot)
                    standstill.note(service.name, snapshot, time.monotonic())
                    swap.note(snapshot)
            if swap.due:
                swap.begin()
                consumer.ends_with = exits.FENCED
                services.append(stack.enter_context(_started(names[2], directory, "--takeover")))
            _check_moving(standstill, services)
            time.sleep(INTERVAL_SECONDS)
        for service in services:
            service.check()
        if swap_after:
            swap.write(directory / "swap.json", consumer.poll())


class Swapping:
    """When the second consumer is to begin: so many samples are trained, and a first checkpoint is
    there for it to go on from."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._trained = self._committed = 0
        self._started: float | None = None

    def note(self, snapshot: Snapshot) -> None:
        if isinstance(snapshot, ProducerSnapshot):
            self._committed = snapshot.committed
        else:
            self._trained = snapshot.trained

    @property
    def due(self) -> bool:
        enough = self._trained >= self._after > 0
        return enough and self._committed > 0 and self._started is None

    def begin(self) -> None:
        logger.info("%d samples are trained: a second consumer takes over", self._trained)
        self._started = time.monotonic()

    def write(self, path: Path, first_exit_code: int | None) -> None:
        if self._started is None:
            raise ServiceFailed(TOO_LATE)
        assert first_exit_code is not None
        swap = Swap(started_seconds=self._started, first_exit_code=first_exit_code)
        path.write_bytes(msgspec.json.encode(swap))


TOO_LATE = (
    "the first consumer had trained everything before the second one took over; "
    "give the demo more --prompts or --max-new-tokens"
)


class Standstill:
    """Whether anything is still happening, by the counters of all services.

    A snapshot says that a monitor thread lives, which is not the same. Loading a model moves no
    counter and takes as long as the disk is slow: there the clock stands. So it does while an
    engine that has died is started again; engines limit themselves how long a start may take.
    """

    def __init__(self, limit_seconds: float, now: float) -> None:
        self._limit_seconds, self._moved_at = limit_seconds, now
        self._seen: dict[str, tuple[object, ...]] = {}
        self._loading = True

    def note(self, name: str, snapshot: Snapshot, now: float) -> None:
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
        if self._seen.get(name) != counters or self._loading:
            self._seen[name] = counters
            self._moved_at = now

    def reached(self, now: float) -> bool:
        return now - self._moved_at > self._limit_seconds


class Service:
    """One child process, its log and its statistics."""

    def __init__(
        self, name: str, directory: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.ends_with = exits.DONE
        self.log_path = directory / f"{name}.log"
        self._stats_path = directory / name / "stats.jsonl"
        self._offset = 0
        kind = name.partition("-")[0]
        command = [sys.executable, "-m", "draftfeed_deploy.cli", kind, *options]
        command += ["-c", str(directory / f"{kind}.toml"), "--run-dir", str(directory / name)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
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
        """Raises ServiceFailed when it has ended otherwise than it should."""
        code = self.poll()
        if code == exits.DONE != self.ends_with:
            raise ServiceFailed(TOO_LATE)
        if code not in (None, self.ends_with):
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
def _started(
    name: str,
    directory: Path,
    *options: str,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Service]:
    service = Service(name, directory, options, environment)
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def _views(console: Console, names: list[str]) -> Iterator[dict[str, View]]:
    if not console.is_terminal:
        yield {name: Lines(name) for name in names}
        return
    with Panels(console, names) as panels:
        yield {name: panels.view(name) for name in names}
