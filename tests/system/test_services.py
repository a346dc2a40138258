"""Both services as processes of their own, started by the installed command."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftfeed_producer.engines.synthetic import SyntheticConfig, synthetic_prompts

SAMPLES = 60
PRODUCER = """
[engine]
name = "synthetic"
samples = {samples}
num_layers = 8
hidden_size = 64
prompt_tokens = 8
response_tokens = 24
tokens_per_second = {rate}
[spool]
dir = "spool"
audit = true
segment_bytes = 100_000
[server]
bind = "{address}"
"""
CONSUMER = """
[producer]
address = "{address}"
[buffer]
capacity_bytes = 4_000_000
window_samples = 4
stall_seconds = 0.2
[trainer]
function = "stub_trainer:train"
output_dir = "out"
target = "."
"""


class Run:
    """Configuration files in a directory, and the processes started there."""

    def __init__(self, directory: Path, rate: int) -> None:
        self.directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        producer = PRODUCER.format(samples=SAMPLES, rate=rate, address=address)
        (directory / "producer.toml").write_text(producer)
        (directory / "consumer.toml").write_text(CONSUMER.format(address=address))
        (directory / "config.json").write_text("{}")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, name: str, *options: str) -> "subprocess.Popen[str]":
        command = [Path(sys.executable).with_name("draftfeed"), name, "-c", f"{name}.toml"]
        process = subprocess.Popen(
            [*command, "--run-dir", name, *options],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
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
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def wait_for_lines(self, name: str, count: int) -> None:
        """Until a log of the run has that many lines."""
        path = self.directory / name
        deadline = time.monotonic() + 60
        while not path.exists() or path.read_bytes().count(b"\n") < count:
            assert all(process.poll() is None for process in self._started), "one has ended"
            assert time.monotonic() < deadline, f"no {count} lines in {name}"
            os.sched_yield()

    def trained(self) -> dict[str, int]:
        """What the checkpoint's model state says, and no ledger of ours."""
        counts: dict[str, int] = json.loads((self.directory / "out/checkpoint.json").read_text())[
            "counts"
        ]
        return counts

    def expected(self) -> dict[str, int]:
        config = SyntheticConfig(
            samples=SAMPLES,
            num_layers=8,
            hidden_size=64,
            prompt_tokens=8,
            response_tokens=24,
        )
        return {str(prompt.id): 1 for prompt in synthetic_prompts(config)}

    def kill_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Run]]:
    runs: list[Run] = []

    def make(rate: int = 0) -> Run:
        runs.append(Run(tmp_path, rate))
        return runs[-1]

    yield make
    for run in runs:
        run.kill_all()


def test_a_run_ends_by_itself_with_every_sample_trained_once(start: Callable[..., Run]) -> None:
    run = start()
    producer, consumer = run.start("producer"), run.start("consumer")
    assert run.ended(consumer)[0] == 0
    assert run.ended(producer)[0] == 0
    assert run.trained() == run.expected()


def test_both_sides_log_the_same_digest_for_every_sample(start: Callable[..., Run]) -> None:
    run = start()
    for process in (run.start("producer"), run.start("consumer")):
        assert run.ended(process)[0] == 0

    def digests(name: str) -> dict[str, str]:
        lines = (run.directory / name / "samples.jsonl").read_text().splitlines()
        return {line["id"]: line["digest"] for line in map(json.loads, lines)}

    assert digests("producer") == digests("consumer")
    assert len(digests("producer")) == SAMPLES


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_producer_goes_on_at_its_next_start(
    start: Callable[..., Run], kind: signal.Signals
) -> None:
    run = start(1500)
    producer, consumer = run.start("producer"), run.start("consumer")
    run.wait_for_lines("producer/samples.jsonl", SAMPLES // 3)
    producer.send_signal(kind)
    code, output = run.ended(producer)
    assert code in (130, -kind), output
    again = run.start("producer")
    assert run.ended(consumer)[0] == 0
    assert run.ended(again)[0] == 0
    assert run.trained() == run.expected()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_consumer_trains_the_rest_from_its_checkpoint(
    start: Callable[..., Run], kind: signal.Signals
) -> None:
    run = start(1500)
    producer, consumer = run.start("producer"), run.start("consumer")
    run.wait_for_lines("consumer/steps.jsonl", SAMPLES // 3)
    consumer.send_signal(kind)
    code, output = run.ended(consumer)
    assert code in (130, -kind), output
    again = run.start("consumer")
    assert run.ended(again)[0] == 0
    assert run.ended(producer)[0] == 0
    assert run.trained() == run.expected()


def test_consumer_started_first_says_that_it_waits(start: Callable[..., Run]) -> None:
    run = start()
    consumer = run.start("consumer")
    run.wait_for(consumer, "waiting for the producer at tcp://127.0.0.1")
    assert run.ended(run.start("producer"))[0] == 0
    assert run.ended(consumer)[0] == 0


def test_consumer_that_expects_other_layers_is_refused_with_both_values(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.start("producer")
    consumer = run.start("consumer", "--set", "expect.layer_ids=[2, 3, 4, 5, 6]")
    code, output = run.ended(consumer)
    assert code == 2
    assert "expects (2, 3, 4, 5, 6), the producer serves (1, 2, 3, 4, 5)" in output
    assert "Traceback" not in output
