"""Producer and consumer as processes of their own, started by the installed command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import pytest

import stub_trainer
from draftfeed_producer.engines.synthetic import SyntheticConfig, synthetic_prompts
from ports import Port
from waiting import eventually

SAMPLES = 60
PRODUCER = """
[engine]
name = "synthetic"
samples = {samples}
epochs = {epochs}
num_layers = 8
hidden_size = 64
vocab_size = 512
prompt_tokens = 8
response_tokens = 24
max_tokens = 256
tokens_per_second = {rate}
[spool]
dir = "spool"
audit = true
segment_bytes = 100_000
[server]
bind = "{address}"
same_host = false
session_timeout_seconds = 0.5
"""
PATHS = pytest.mark.parametrize(
    "path",
    [pytest.param((), id="tcp"), pytest.param(("--set", "server.same_host=true"), id="same host")],
)
"""Options of a producer: its samples go over TCP, as to another machine, or are read as files."""
CONSUMER = """
[producer]
addresses = ["{address}"]
[buffer]
capacity_bytes = 4_000_000
window_samples = 4
stall_seconds = 0.2
[trainer]
function = "stub_trainer:train"
output_dir = "out"
"""


class Run:
    """Configuration files in a directory, and the processes started there."""

    Process: TypeAlias = "subprocess.Popen[str]"

    def __init__(self, directory: Path, rate: int, samples: int = SAMPLES, epochs: int = 1) -> None:
        self.directory, self._samples, self._epochs = directory, samples, epochs
        self._ports: list[Port] = []
        self.address = f"tcp://127.0.0.1:{self.port()}"
        producer = PRODUCER.format(samples=samples, rate=rate, address=self.address, epochs=epochs)
        (directory / "producer.toml").write_text(producer)
        (directory / "consumer.toml").write_text(CONSUMER.format(address=self.address))
        self._started: list[subprocess.Popen[str]] = []

    def port(self) -> int:
        """One more, of this run until `kill_all`."""
        self._ports.append(Port())
        return self._ports[-1].number

    def start(
        self, name: str, *options: str, run_dir: str = "", **environment: str
    ) -> "subprocess.Popen[str]":
        """run_dir: the command's name unless given, which is right for one process at a time."""
        return self._start(name, "--run-dir", run_dir or name, *options, **environment)

    def go_on(self) -> None:
        """For trainers that were told to `pause_after` some steps."""
        (self.directory / "out" / stub_trainer.GO_ON).touch()

    def drain(self, *options: str) -> "subprocess.Popen[str]":
        return self._start("drain", *options)

    def _start(self, name: str, *options: str, **environment: str) -> "subprocess.Popen[str]":
        config = "producer.toml" if name == "producer" else "consumer.toml"
        process = subprocess.Popen(
            [Path(sys.executable).with_name("draftfeed"), name, "-c", config, *options],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def wait_for(self, process: "subprocess.Popen[str]", words: str) -> None:
        """Until the process has said so; what it says before is dropped."""
        assert process.stdout is not None
        for line in process.stdout:
            if words in line:
                return
        pytest.fail(f"it ended without saying {words!r}")

    def ended(self, process: "subprocess.Popen[str]") -> tuple[int, str]:
        output, _ = process.communicate(timeout=100)
        return process.returncode, output

    def steps(self, name: str) -> list[str]:
        """Ids that a consumer's steps used, in order. name: its directory."""
        lines = (self.directory / name / "steps.jsonl").read_text().splitlines()
        return [id for line in lines for id in json.loads(line)["ids"]]

    def succeeds(self, process: "subprocess.Popen[str]") -> None:
        code, output = self.ended(process)
        assert code == 0, output

    def wait_for_lines(self, name: str, count: int) -> None:
        """Until a log of the run has that many lines."""
        path = self.directory / name
        running = [process for process in self._started if process.poll() is None]

        def there() -> bool:
            assert all(process.poll() is None for process in running), "one has ended"
            return path.exists() and path.read_bytes().count(b"\n") >= count

        eventually(there, f"{count} lines in {name}")

    def trained(self) -> dict[str, int]:
        """What the checkpoint's model state says, and no ledger of ours."""
        path = stub_trainer.newest(self.directory / "out")
        assert path is not None, "no checkpoint"
        counts: dict[str, int] = json.loads(path.read_text())["counts"]
        return counts

    def expected(self) -> dict[str, int]:
        config = SyntheticConfig(
            samples=self._samples,
            num_layers=8,
            hidden_size=64,
            vocab_size=512,
            prompt_tokens=8,
            response_tokens=24,
            max_tokens=256,
            epochs=self._epochs,
        )
        return {str(prompt.id): 1 for prompt in synthetic_prompts(config)}

    def kill_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for port in self._ports:
            port.close()
