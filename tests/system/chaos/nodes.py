"""The processes, as an operator starts them: `draftfeed producer` and `draftfeed consumer`."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from chaos import hosts
from chaos.checkpoints import Control, events
from chaos.plan import Plan

UNCONFIRMED = "the producer has not confirmed it"
COMMAND = str(Path(sys.executable).with_name("draftfeed"))
FENCED = 3
QUOTA_BYTES = 8_000_000
DISK_BYTES = 11_000_000
"""The quota, one sample more, and the control log's reserve."""
SESSION_TIMEOUT_SECONDS = 1.5
LOST_AFTER_SECONDS = 600.0
PUBLIC_PORT, LOOPBACK_PORT = 5550, 6550

ENGINE = """
[engine]
name = "synthetic"
epochs = {engine.epochs}
samples = {engine.samples}
num_layers = {engine.num_layers}
hidden_size = {engine.hidden_size}
vocab_size = {engine.vocab_size}
prompt_tokens = {engine.prompt_tokens}
response_tokens = {engine.response_tokens}
max_tokens = {engine.max_tokens}
shard_size = {engine.shard_size}
seed = {engine.seed}
"""
REPLAY = """
[engine]
name = "archive"
epochs = {plan.epochs}
"""
ARCHIVE = """
[archive]
roots = ["{archive}"]
quota_bytes = {plan.archive_bytes}
min_free_bytes = 0
"""
PRODUCER = """
[spool]
dir = "spool/log"
shards = "{shards}"
audit = true
quota_bytes = {quota_bytes}
segment_bytes = 500_000
fsync = "{plan.fsync}"
keep_checkpoints = {plan.keep_checkpoints}
codec = "{plan.codec}"
chunk_bytes = {plan.chunk_bytes}
min_free_bytes = 0
"""
SERVER = """
[server]
bind = "{bind}"
insecure = true
session_timeout_seconds = {session_timeout}
quarantine_after_terms = 1000
"""
CONSUMER = """
[producer]
addresses = {addresses}
insecure = true
group = "chaos"
lost_after_seconds = {lost_after}
[buffer]
capacity_bytes = 3_000_000
window_samples = {plan.window_samples}
batch_samples = {plan.batch_samples}
stall_seconds = 0.2
[trainer]
function = "chaos.trainer:train"
output_dir = "out"
[trainer.options]
checkpoints = "{checkpoints}"
checkpoint_steps = {plan.checkpoint_steps}
batch_samples = {plan.batch_samples}
"""


class Process:
    """One process at most at a time, started in a directory of its own."""

    def __init__(self, name: str, host: str, directory: Path) -> None:
        self.name, self.host, self.directory = name, host, directory
        self.network = host
        self.stopped = self.killed = False
        self._popen: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def launch(self, *arguments: str) -> None:
        assert self.code is not None or self._popen is None, f"{self.name} runs"
        with (self.directory / "log").open("ab") as log:
            self._popen = subprocess.Popen(
                hosts.on(self.network, [COMMAND, *arguments]),
                cwd=self.directory,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.stopped = self.killed = False

    @property
    def code(self) -> int | None:
        """Exit code of the last process; None while it runs."""
        return self._popen.poll() if self._popen is not None else None

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def unconfirmed(self) -> bool:
        """It ended, with its checkpoint on the disk, while a producer that was to confirm it was
        down for too long. Whoever runs it starts it again."""
        return self.code == 1 and UNCONFIRMED in self.last_words()

    def kill(self) -> None:
        if self._popen is not None and self._popen.poll() is None:
            self.killed = True
            self._popen.kill()
            self._popen.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self.stopped = False

    def _signal(self, number: signal.Signals) -> None:
        if self._popen is not None and self._popen.poll() is None:
            with suppress(ProcessLookupError):
                self._popen.send_signal(number)

    def last_words(self) -> str:
        return "".join((self.directory / "log").read_text(errors="replace").splitlines(True)[-15:])


class Producer(Process):
    """With its spool on a small disk of its own."""

    def __init__(
        self, number: int, plan: Plan, directory: Path, archive: Path, *, behind_relay: bool
    ) -> None:
        """archive: of all producers of a replay; each makes one of its own beside it where there
        is none yet."""
        super().__init__(f"producer{number}", hosts.PRODUCERS, directory)
        self.number = number
        self.disk = directory / "spool"
        self.spool = self.disk / "log"
        self.loopback_port = LOOPBACK_PORT + number
        self.public_port = PUBLIC_PORT + number
        self.address = f"tcp://{hosts.ADDRESSES[self.host]}:{self.public_port}"
        bind = f"tcp://127.0.0.1:{self.loopback_port}" if behind_relay else self.address
        self.flipped = 0
        """Bits on its disk."""
        self._replays = plan.source == "replayed"
        self.archive = archive if self._replays else directory / "archive"
        parts = {
            "generated": ENGINE + PRODUCER + SERVER,
            "archived": ENGINE + PRODUCER + 'retain = "archive"\n' + SERVER + ARCHIVE,
            "replayed": REPLAY + PRODUCER + SERVER + ARCHIVE,
        }
        text = parts[plan.source].format(
            engine=plan.engine(),
            archive=self.archive,
            plan=plan,
            shards=plan.shards(number),
            bind=bind,
            quota_bytes=QUOTA_BYTES,
            session_timeout=SESSION_TIMEOUT_SECONDS,
        )
        (directory / "producer.toml").write_text(text)
        hosts.small_disk(self.disk, DISK_BYTES)

    def start(self) -> None:
        self.launch("producer", "-c", "producer.toml", "--run-dir", "run")

    @property
    def done(self) -> bool:
        """Every prompt of its shards is terminal."""
        return self.code == 0

    def terminal(self) -> dict[str, str]:
        """id -> reason of the prompts that it reported as ended without being trained."""
        path = self.directory / "run" / "rejected.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = (msgspec.json.decode(line) for line in lines)
        return {one["id"]: one["reason"] for one in found}

    def segments(self) -> list[Path]:
        """Oldest first; the last is the one that is appended to."""
        return sorted((self.archive if self._replays else self.spool).glob("*.seg"))

    def truncate(self, rng: random.Random) -> str:
        """Cut the end of the last segment off, as a disk does that lied about a flush. Those of an
        archive were on the disk long ago."""
        segments = self.segments()
        if not segments or self._replays:
            return ""
        path = segments[-1]
        size = path.stat().st_size
        cut = rng.randint(1, max(1, size // rng.choice([1, 2, 10])))
        os.truncate(path, size - cut)
        return f"{path.name}: {cut} of {size} bytes cut"

    def flip(self, rng: random.Random) -> str:
        """One bit of a segment that is complete, for its last bytes are still being written."""
        segments = self.segments()
        closed = segments if self._replays else segments[:-1][-3:]
        if not closed:
            return ""
        path = rng.choice(closed)
        try:
            with path.open("r+b") as file:
                at = rng.randrange(path.stat().st_size)
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        except (FileNotFoundError, IndexError, ValueError):
            return ""  # it was freed at this very moment
        self.flipped += 1
        return f"{path.name}: byte {at}"

    def fill_disk(self) -> int:
        """Take what is left; how much that was."""
        with (self.disk / "filler").open("wb", buffering=0) as file:
            with suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass
            with suppress(OSError):
                while file.write(b"x" * 64):
                    pass
            return file.tell()

    def free_disk(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)


class Trainer(Process):
    """One life of a training node: a process that is started once."""

    def __init__(
        self, number: int, host: str, plan: Plan, directory: Path, addresses: list[str]
    ) -> None:
        super().__init__(f"trainer{number}@{host}", host, directory / f"trainer{number}")
        if plan.link == "local":
            self.network = hosts.PRODUCERS
        self.out = self.directory / "out"
        self.out.mkdir()
        self.without: list[str] = []
        """Addresses of producers that it was started without."""
        text = CONSUMER.format(
            addresses=list(addresses),
            lost_after=LOST_AFTER_SECONDS,
            plan=plan,
            checkpoints=directory / "checkpoints",
        )
        (self.directory / "consumer.toml").write_text(text.replace("'", '"'))
        self._control = Control(step_seconds=plan.step_seconds)
        self.want()

    def start(self, options: Iterable[str], without: Iterable[str]) -> None:
        self.without = list(without)
        left_out = (f"--without={address}" for address in self.without)
        self.launch("consumer", "-c", "consumer.toml", "--run-dir", "run", *options, *left_out)

    def want(self, **changes: Any) -> None:
        """Change what the trainer is asked to do, from its next step on."""
        self._control = msgspec.structs.replace(self._control, **changes)
        part = self.out / "control.part"
        part.write_bytes(msgspec.json.encode(self._control))
        part.replace(self.out / "control.json")

    def save_now(self, seconds: float) -> None:
        """Make a checkpoint at the next step, and take so long over every one until told else."""
        self.want(saves=self._control.saves + 1, save_seconds=seconds)

    def noted(self, event: str) -> list[dict[str, Any]]:
        return [one for one in events(self.out) if one["event"] == event]

    @property
    def granted(self) -> bool:
        return bool(self.noted("granted"))

    @property
    def read_files(self) -> bool:
        """It was handed those of a producer on its host."""
        return ", on this host" in (self.directory / "log").read_text(errors="replace")

    def saving(self) -> bool:
        """Whether a checkpoint is being made now."""
        return len(self.noted("saving")) > len(self.noted("saved"))

    def saving_at(self, moment: float) -> bool:
        """Whether one was being made then (CLOCK_MONOTONIC)."""
        begun = [one["at"] for one in self.noted("saving") if one["at"] <= moment]
        ended = [one["at"] for one in self.noted("saved") if one["at"] <= moment]
        return len(begun) > len(ended)
