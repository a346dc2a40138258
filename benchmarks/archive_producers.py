"""Producers as processes of their own: one that generates, one that serves an archive."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from archive_files import forget
from archive_peer import Taken, receive
from rounds import cpu_seconds

COMMAND = Path(sys.executable).with_name("draftfeed")
START_SECONDS = 120.0
END_SECONDS = 300.0
POLL_SECONDS = 0.05
GENERATING = """
[engine]
name = "synthetic"
samples = {samples}
hidden_size = {hidden}
prompt_tokens = {prompt_tokens}
response_tokens = {response_tokens}
max_tokens = {max_tokens}
tokens_per_second = {rate}
[spool]
dir = "spool"
quota_bytes = 4_000_000_000
segment_bytes = {segment_bytes}
retain = "{retain}"
audit = true
[server]
bind = "{address}"
same_host = false
"""
ARCHIVE = """
[archive]
roots = ["archive"]
min_free_bytes = 0
"""
REPLAYING = """
[engine]
name = "archive"
[spool]
dir = "replayed"
[server]
bind = "{address}"
same_host = false
[archive]
roots = ["archive"]
order = "{order}"
"""
STATUS = """
[status]
enabled = false
"""


class Size(NamedTuple):
    """Of the stream."""

    samples: int
    tokens: int
    """Mean of a sample; two fifths of them are its prompt's."""
    hidden: int
    segment_bytes: int


class Generated(NamedTuple):
    tokens: int
    seconds: float
    """From the first sample to the last."""
    cpu_seconds: float
    """Of the whole process, its start and what it archives at its end included."""
    digests: dict[str, str]
    """Of every sample's tensors, by its id."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Replayed(NamedTuple):
    taken: Taken
    cpu_seconds: float
    """Of the producer, from its first byte to the last."""
    drive_bytes: int
    """That the kernel had fetched for it from the drive meanwhile (proc(5), io)."""


def generate(directory: Path, size: Size, rate: float, *, archive: bool) -> Generated:
    """Everything, while a member takes and commits it; archive: it is kept there, instead of what
    was there before."""
    for name in ("spool", "run", *(["archive"] if archive else [])):
        shutil.rmtree(directory / name, ignore_errors=True)
    settings = GENERATING.format(
        samples=size.samples,
        hidden=size.hidden,
        prompt_tokens=max(1, size.tokens * 2 // 5),
        response_tokens=max(1, size.tokens - size.tokens * 2 // 5),
        max_tokens=8 * size.tokens,
        rate=rate,
        segment_bytes=size.segment_bytes,
        retain="archive" if archive else "none",
        address=(address := _address()),
    )
    with _producer(directory, settings + (ARCHIVE if archive else "")) as process:
        receive(address, commit_samples=max(1, size.samples // 12))
        cpu_seconds = _cpu_at_its_end(process, directory)
    made = [json.loads(line) for line in (directory / "run/samples.jsonl").open()]
    times = [sample["time_seconds"] for sample in made]
    return Generated(
        sum(sample["rows"] for sample in made[1:]),
        max(times) - min(times),
        cpu_seconds,
        {sample["id"]: sample["digest"] for sample in made},
    )


def replay(
    directory: Path, take: Callable[[str], Taken], order: str, *, cold: bool = True
) -> Replayed:
    """The archive, all of it. cold: none of it is in the page cache."""
    for name in ("replayed", "run"):
        shutil.rmtree(directory / name, ignore_errors=True)
    address = _address()
    with _producer(directory, REPLAYING.format(address=address, order=order)) as process:
        _wait_for(process, directory, "serving")
        if cold:
            forget((directory / "archive").glob("*.seg"))
        before = cpu_seconds(process.pid), _drive_bytes(process.pid)
        taken = take(address)
        after = cpu_seconds(process.pid), _drive_bytes(process.pid)
    return Replayed(taken, after[0] - before[0], after[1] - before[1])


def _address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def _producer(directory: Path, settings: str) -> "Iterator[subprocess.Popen[bytes]]":
    (directory / "producer.toml").write_text(settings + STATUS)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [COMMAND, "producer", "-c", "producer.toml", "--run-dir", "run"],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(process: "subprocess.Popen[bytes]", directory: Path, words: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while words not in (log := (directory / "log").read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the producer did not say {words!r}:\n{log}")
        time.sleep(POLL_SECONDS)


def _cpu_at_its_end(process: "subprocess.Popen[bytes]", directory: Path) -> float:
    """In user mode and in the kernel; it ends by itself."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise SystemExit(f"the producer failed:\n{(directory / 'log').read_text()}")
            return used.ru_utime + used.ru_stime
        time.sleep(POLL_SECONDS)
    raise SystemExit(f"the producer does not end:\n{(directory / 'log').read_text()}")


def _drive_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
