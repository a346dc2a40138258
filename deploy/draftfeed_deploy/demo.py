"""The demo: a producer and a consumer as processes of their own, watched, then judged."""

import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path

import msgspec
from rich.console import Console

from draftfeed_consumer.config import ConsumerConfig
from draftfeed_deploy import smollm2
from draftfeed_deploy.config import load
from draftfeed_deploy.errors import DemoError
from draftfeed_deploy.evaluation import evaluate
from draftfeed_deploy.monitor import INTERVAL_SECONDS, Snapshot, View
from draftfeed_deploy.progress import Lines, Panels
from draftfeed_deploy.report import Report, write_report
from draftfeed_producer.config import ProducerConfig

logger = logging.getLogger(__name__)

MARKER = ".draftfeed-demo"
SHARD_SIZE = 64
STOP_SECONDS = 20.0

PRODUCER_TOML = """\
# One producer: prompts -> SmolLM2 on the CPU -> spool -> this address.

[engine]
name = "transformers"
batch_size = 40
threads = 1
sampling = {{ max_new_tokens = {max_new_tokens}, temperature = 0.7, top_p = 0.95, seed = 1 }}

[target]
path = {target}

[prompts]
path = {prompts}
shard_size = {shard_size}

[spool]
dir = {spool}
quota_bytes = 1_000_000_000
segment_bytes = 16_000_000
audit = true             # a digest of every sample's tensors, compared at the other end

[server]
bind = {address}
"""

CONSUMER_TOML = """\
# One consumer: this address -> bounded buffer -> SpecForge's DFlash trainer.

[producer]
address = {address}
group = "demo"

[buffer]
capacity_bytes = 200_000_000
window_samples = 16

[trainer]
kind = "specforge"
target = {target}
output_dir = {checkpoints}
threads = 1

[trainer.options]
init = "target"          # the drafter starts from the target's last block
batch_size = 1           # SpecForge drops what does not fill a step; with 1 nothing is left over
num_anchors = 16
save_interval_steps = 50
"""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    directory: Path
    prompts: int | None = None
    """Only the first so many of the shipped prompts."""
    max_new_tokens: int = 64


def run_demo(options: DemoOptions, console: Console) -> Report:
    """Run both services to their end, evaluate the drafter, write the report.

    Raises DemoError when a service fails; Ctrl-C stops both and goes on as KeyboardInterrupt.
    """
    directory = _fresh(options.directory)
    prompts = _shipped(directory, "prompts.jsonl", options.prompts)
    with console.status("making a plain bf16 copy of SmolLM2-135M (once)"):
        target = smollm2.prepare()
    _write_configs(directory, prompts, target, options.max_new_tokens)
    _run_services(directory, console)
    with console.status("evaluating the drafter on held-out prompts"):
        evaluation = evaluate(
            load(directory / "producer.toml", ProducerConfig),
            load(directory / "consumer.toml", ConsumerConfig),
            _shipped(directory, "heldout.jsonl"),
        )
    (directory / "evaluation.json").write_bytes(msgspec.json.encode(evaluation))
    return write_report(directory, prompts, shard_size=SHARD_SIZE)


def _fresh(directory: Path) -> Path:
    """An empty directory; a former demo's is cleared, anything else is left alone."""
    if directory.exists() and any(directory.iterdir()):
        if not (directory / MARKER).exists():
            raise DemoError(f"{directory} is not empty and not a demo's; choose another --dir")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).touch()
    return directory


def _shipped(directory: Path, name: str, lines: int | None = None) -> Path:
    """A copy of a shipped prompt file, or of its first lines, in the run's directory."""
    text = resources.files("draftfeed_deploy.data").joinpath(name).read_bytes()
    path = directory / name
    path.write_bytes(b"".join(text.splitlines(keepends=True)[:lines]))
    return path


def _write_configs(directory: Path, prompts: Path, target: Path, max_new_tokens: int) -> None:
    address = json.dumps(f"tcp://127.0.0.1:{_free_port()}")
    values = {
        "address": address,
        "target": _quoted(target),
        "prompts": _quoted(prompts),
        "spool": _quoted(directory / "spool"),
        "checkpoints": _quoted(directory / "checkpoints"),
        "max_new_tokens": max_new_tokens,
        "shard_size": SHARD_SIZE,
    }
    (directory / "producer.toml").write_text(PRODUCER_TOML.format(**values))
    (directory / "consumer.toml").write_text(CONSUMER_TOML.format(**values))


def _quoted(path: Path) -> str:
    """A JSON string is a TOML string."""
    return json.dumps(str(path.absolute()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
                    yield json.loads(line)

    def check(self) -> None:
        """Raises DemoError when it has failed."""
        code = self.poll()
        if code:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "no output"
            raise DemoError(
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


def _run_services(directory: Path, console: Console) -> None:
    with ExitStack() as stack:
        views = stack.enter_context(_views(console))
        services = [stack.enter_context(_started(name, directory)) for name in views]
        while any(service.poll() is None for service in services):
            for service in services:
                service.check()
                for snapshot in service.new_snapshots():
                    views[service.name].show(snapshot)
            time.sleep(INTERVAL_SECONDS)
        for service in services:
            service.check()


@contextmanager
def _started(name: str, directory: Path) -> Iterator[Service]:
    service = Service(name, directory)
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def _views(console: Console) -> Iterator[dict[str, View]]:
    names = ["producer", "consumer"]
    if not console.is_terminal:
        yield {name: Lines(name) for name in names}
        return
    with Panels(console, names) as panels:
        yield {name: panels.view(name) for name in names}
