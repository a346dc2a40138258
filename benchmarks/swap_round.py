"""One round of the swap benchmark: a producer, a training node, and perhaps a second one."""

import json
import subprocess
import sys
import time
from collections import Counter
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from children import DRAFTFEED, HERE, POLL_SECONDS, Children, free_port
from counting_trainer import newest
from timed_producer import read_steps

CHECKPOINT_STEPS = 11
"""Not a divisor of the batches' 8 samples: what the old node has trained since its last checkpoint
is there for the new one at once, which otherwise would have to wait for a batch to end."""
END_SECONDS = 300.0

ENGINES = {
    "synthetic": """
[engine]
name = "synthetic"
samples = {samples}
num_layers = 30
hidden_size = 576
vocab_size = 49_152
prompt_tokens = 40
response_tokens = 40
max_tokens = 1024
tokens_per_second = {rate}
""",
    "transformers": """
[engine]
name = "transformers"
batch_size = 8
threads = 1
sampling = {{ max_new_tokens = 40 }}
[target]
path = {target}
[prompts]
path = "prompts.jsonl"
""",
}
PRODUCER = """
[spool]
dir = "spool"
audit = true
[server]
bind = "{address}"
same_host = false
"""
CONSUMER = """
[producer]
addresses = ["{address}"]
group = "swap"
[buffer]
capacity_bytes = 128_000_000
window_samples = 2
stall_seconds = 0.1
[trainer]
function = "counting_trainer:train"
output_dir = "checkpoints"
[trainer.options]
checkpoint_steps = {checkpoint_steps}
notes = "{name}/notes.jsonl"
pause = "pause"
"""

How = Literal["takeover", "drain"]


class Setup(NamedTuple):
    engine: str
    samples: int
    rate: float
    """Rows a second of the synthetic engine."""
    target: str
    """Model directory of the transformers engine, as JSON."""
    how: How
    begin_share: float
    """Of the samples, trained when the swap begins."""
    window_seconds: float
    """At least so long is looked at: a swap is over within a few decode steps, too few to have a
    rate."""
    producer_cores: frozenset[int]
    consumer_cores: frozenset[int]


class Window(NamedTuple):
    """A stretch of generation."""

    seconds: float
    tokens: int
    longest_gap_seconds: float
    """Between two decode steps; gaps that reach over an end of the window count whole."""
    steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Round(NamedTuple):
    before: Window
    during: Window
    """From the command that begins the swap until the new node has a sample, or for
    `window_seconds` if that is longer. In a control: as long, while the consumer takes nothing."""
    after: Window
    """To the end of generation."""
    whole: bool
    """Generation went on for longer than the swap."""
    lost: int
    duplicated: int
    start_seconds: float = 0.0
    """From the first command until the new node opened the stream: its imports, mostly."""
    first_sample_seconds: float = 0.0
    """From there until its trainer had a sample."""
    stop_seconds: float = 0.0
    """From the command until the old node had ended."""
    old_exit: int | None = None


class Line(Children):
    """A producer and its consumers."""

    def __init__(self, directory: Path, setup: Setup) -> None:
        super().__init__(directory, END_SECONDS)
        self.setup = setup
        address = f"tcp://127.0.0.1:{free_port()}"
        prompts = resources.files("draftfeed_deploy.data").joinpath("prompts.jsonl").read_bytes()
        lines = prompts.splitlines(keepends=True)[: setup.samples]
        (directory / "prompts.jsonl").write_bytes(b"".join(lines))
        engine = ENGINES[setup.engine].format(**setup._asdict())
        (directory / "producer.toml").write_text(engine + PRODUCER.format(address=address))
        for name in ("old", "new"):
            (directory / name).mkdir()
            text = CONSUMER.format(address=address, name=name, checkpoint_steps=CHECKPOINT_STEPS)
            (directory / f"{name}.toml").write_text(text)

    def start_producer(self) -> "subprocess.Popen[bytes]":
        timed = (sys.executable, str(HERE / "timed_producer.py"), "steps.bin", self.setup.engine)
        arguments = ("producer", "-c", "producer.toml", "--run-dir", "producer")
        return self.start("producer", (*timed, *arguments), self.setup.producer_cores)

    def start_consumer(self, name: str, *options: str) -> "subprocess.Popen[bytes]":
        arguments = ("consumer", "-c", f"{name}.toml", "--run-dir", name, *options)
        return self.start(name, (*DRAFTFEED, *arguments), self.setup.consumer_cores)

    def drain(self, name: str) -> None:
        command = (*DRAFTFEED, "drain", "-c", f"{name}.toml")
        process = self.start("drain", command, self.setup.consumer_cores)
        self.until(lambda: process.poll() is not None, f"{name} is drained")

    def lines(self, name: str) -> int:
        path = self.directory / name
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def noted(self, name: str, event: str) -> float | None:
        """When a node's trainer wrote that down."""
        path = self.directory / name / "notes.jsonl"
        text = path.read_text() if path.exists() else ""
        notes = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return next((note["time_seconds"] for note in notes if note["event"] == event), None)


def play(directory: Path, setup: Setup, idle_seconds: float | None) -> Round:
    """A swap, or a control in which the consumer is idle for that long."""
    line = Line(directory, setup)
    try:
        producer, old = line.start_producer(), line.start_consumer("old")
        enough = max(1, int(setup.begin_share * setup.samples))
        line.until(lambda: line.lines("old/steps.jsonl") >= enough, f"{enough} are trained")
        begin = time.monotonic()
        if idle_seconds is None:
            first_sample, details = _swap(line, producer, old, begin)
            end = max(first_sample, begin + setup.window_seconds)
        else:
            end, details = _idle(line, begin, idle_seconds), {}
        line.until(lambda: producer.poll() is not None, "the producer has ended")
        line.until(lambda: all(p.poll() is not None for p in line.processes), "all have ended")
        if idle_seconds is None:
            details["old_exit"] = old.returncode
        return _judged(line, setup, begin, end, details)
    finally:
        line.close()


def _swap(
    line: Line, producer: "subprocess.Popen[bytes]", old: "subprocess.Popen[bytes]", begin: float
) -> tuple[float, dict[str, Any]]:
    if line.setup.how == "drain":
        line.drain("old")
        stopped: float | None = time.monotonic()
        line.start_consumer("new")
    else:
        stopped = None
        line.start_consumer("new", "--takeover")

    def has_begun() -> bool:
        nonlocal stopped
        if producer.poll() is not None and line.noted("new", "open") is None:
            raise SystemExit("all was trained before the new node came; use more --samples")
        if stopped is None and old.poll() is not None:
            stopped = time.monotonic()
        return stopped is not None and line.noted("new", "first sample") is not None

    line.until(has_begun, "the new node has a sample and the old one has ended")
    opened, first = line.noted("new", "open"), line.noted("new", "first sample")
    assert opened is not None
    assert first is not None
    assert stopped is not None
    return first, {
        "start_seconds": opened - begin,
        "first_sample_seconds": first - opened,
        "stop_seconds": stopped - begin,
    }


def _idle(line: Line, begin: float, seconds: float) -> float:
    pause = line.directory / "pause"
    pause.touch()
    line.until(lambda: time.monotonic() >= begin + seconds, "the pause is over")
    pause.unlink()
    return begin + seconds


def _judged(line: Line, setup: Setup, begin: float, end: float, details: dict[str, Any]) -> Round:
    steps = read_steps(line.directory / "steps.bin")
    path = newest(line.directory / "checkpoints")
    counts: Counter[int] = Counter()
    for id, times in json.loads(path.read_text())["counts"].items() if path else ():
        counts[int(id.rpartition("/")[2])] += times
    last = steps[-1][0]
    return Round(
        before=_window(steps, steps[0][0], begin),
        during=_window(steps, begin, end),
        after=_window(steps, end, max(last, end + POLL_SECONDS)),
        whole=last > end,
        lost=sum(counts[ordinal] == 0 for ordinal in range(setup.samples)),
        duplicated=sum(max(0, times - 1) for times in counts.values()),
        **details,
    )


def _window(steps: list[tuple[float, int]], begin: float, end: float) -> Window:
    inside = [tokens for at, tokens in steps if begin <= at < end]
    gaps = [
        after - before
        for (before, _), (after, _) in pairwise(steps)
        if before < end and after > begin
    ]
    return Window(end - begin, sum(inside), max(gaps, default=0.0), len(inside))
