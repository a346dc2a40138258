"""Samples of 32K tokens pass through processes that have no room for what is not configured."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftfeed_consumer.reception import CREDIT_WINDOW_BYTES
from draftfeed_proto.sample import decoded_bytes
from holding_trainer import MEASURED, RECEIVED
from waiting import eventually

pytestmark = pytest.mark.timeout(400)

SAMPLES, TOKENS, LAYERS, HIDDEN = 2, 32_768, 5, 5120
SAMPLE_BYTES = decoded_bytes(TOKENS - 1, LAYERS, HIDDEN)
CAPACITY_BYTES = 2 * SAMPLE_BYTES
"""The least that is accepted: the largest sample, and one that the trainer holds."""
SLACK_BYTES = 200_000_000
PRODUCER = f"""
[engine]
name = "synthetic"
samples = {SAMPLES}
hidden_size = {HIDDEN}
prompt_tokens = 8000
response_tokens = 2_000_000
max_tokens = {TOKENS}
tokens_per_second = 30_000
[spool]
dir = "spool"
audit = true
[server]
bind = "ADDRESS"
same_host = SAME_HOST
"""
CONSUMER = f"""
[producer]
addresses = ["ADDRESS"]
[buffer]
capacity_bytes = {CAPACITY_BYTES}
window_samples = 1
[trainer]
function = "holding_trainer:train"
output_dir = "out"
options = {{ samples = {SAMPLES} }}
"""


class Service:
    """A process, and the memory it took beyond what it had when it was idle."""

    def __init__(self, directory: Path, name: str) -> None:
        self._log = directory / f"{name}.log"
        command = [Path(sys.executable).with_name("draftfeed"), name, "-c", f"{name}.toml"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._idle_bytes = 0

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def says(self, words: str) -> None:
        eventually(lambda: words in self.said or self._process.poll() is not None, words, 100)
        assert words in self.said, self.said

    def is_idle(self) -> None:
        """Forget the peak so far, and remember what it has."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        self._idle_bytes = self._memory("VmRSS")

    def grew_bytes(self) -> int:
        return self._memory("VmHWM") - self._idle_bytes

    def succeeds(self) -> None:
        assert self._process.wait(timeout=60) == 0, self.said

    def alive(self) -> bool:
        assert self._process.poll() is None, self.said
        return True

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _memory(self, field: str) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], Service]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    started: list[Service] = []

    def make(name: str, same_host: str) -> Service:
        text = {"producer": PRODUCER, "consumer": CONSUMER}[name]
        text = text.replace("ADDRESS", address).replace("SAME_HOST", same_host)
        (tmp_path / f"{name}.toml").write_text(text)
        started.append(Service(tmp_path, name))
        return started[-1]

    yield make
    for one in started:
        one.kill()
    for segment in (tmp_path / "spool").glob("*.seg"):
        segment.unlink()  # gigabytes that pytest would keep


@pytest.mark.parametrize("same_host", ["false", "true"])
def test_samples_of_32k_tokens_take_no_memory_beyond_the_configured_windows(
    start: Callable[[str, str], Service],
    same_host: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """A sample of 32K tokens has 1.7 GB; a copy of it anywhere would show."""
    consumer = start("consumer", same_host)
    consumer.says("waiting for the producer")
    consumer.is_idle()
    producer = start("producer", same_host)
    producer.says("serving")
    producer.is_idle()  # the configured rate lets the first sample come a second later
    received = tmp_path / RECEIVED
    eventually(lambda: consumer.alive() and received.exists(), "all samples", 250)
    grown = {"producer": producer.grew_bytes(), "consumer": consumer.grew_bytes()}
    (tmp_path / MEASURED).touch()
    consumer.succeeds()
    producer.succeeds()
    record_property("sample MB", SAMPLE_BYTES // 10**6)
    for name, grew_bytes in grown.items():
        record_property(f"{name} grew by MB", grew_bytes // 10**6)
    assert grown["producer"] <= CREDIT_WINDOW_BYTES + SLACK_BYTES
    assert grown["consumer"] <= CAPACITY_BYTES + CREDIT_WINDOW_BYTES + SLACK_BYTES
    assert grown["consumer"] > CAPACITY_BYTES - SAMPLE_BYTES // 10, "two samples were there at once"
