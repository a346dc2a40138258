"""Does a trainer wait for data when the producer is faster than it?

    .venv/bin/python benchmarks/trainer_feed.py

README.md beside this file says what is measured and how.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import NamedTuple

import torch

from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.collate import Batch, Collator, prefetch
from draftfeed_consumer.memory import keep_chunks_mapped
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from report import leave, options_of, say
from rounds import Spread, in_turn
from this_machine import this_machine

BAR = 0.02
ARMS = ("prefetch", "in the loop", "no step", "no data")
SETUP = ("rounds", "steps", "step", "batch", "tokens", "hidden")
"""The options that a document names."""
LAYERS = 5
LONGEST = 2
"""Times the mean length of a sample."""
BUFFERED_BATCHES = 2
"""Of longest samples; about twice as many as they come."""
MATRIX = 256
POLL_SECONDS = 0.1
GENERATED_SECONDS = 900.0
PRODUCER = """
[engine]
name = "synthetic"
samples = {samples}
hidden_size = {hidden}
prompt_tokens = {prompt_tokens}
response_tokens = {response_tokens}
max_tokens = {max_tokens}
[spool]
dir = "spool"
[server]
bind = "{address}"
same_host = false
"""

Round = dict[str, "Turn"]


class Turn(NamedTuple):
    """So many steps of one arm."""

    waited_seconds: float
    """For batches."""
    step_seconds: float
    steps: int
    state_bytes: int
    """Of the rows that came, 16 bits a value."""

    @property
    def waiting(self) -> float:
        """Share of the time."""
        return self.waited_seconds / self.seconds

    @property
    def seconds(self) -> float:
        return self.waited_seconds + self.step_seconds


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the producer does not outlive it
    torch.set_num_threads(1)
    keep_chunks_mapped()
    machine = this_machine()
    say(options, f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} before")
    with (
        tempfile.TemporaryDirectory(prefix="draftfeed-feed-") as directory,
        producing(Path(directory), options) as address,
    ):
        say(options, f"{_samples(options)} samples are generated")
        rounds = play(address, options)
    summary = summarise(rounds)
    for line in _words(summary):
        say(options, line)
    result = {
        "machine": machine,
        "setup": {name: getattr(options, name) for name in SETUP},
        "rounds": [{arm: turn._asdict() for arm, turn in one.items()} for one in rounds],
        "summary": {name: spread._asdict() for name, spread in summary.items()},
    }
    leave(options, result)
    return 0


@contextmanager
def producing(directory: Path, options: argparse.Namespace) -> Iterator[str]:
    """A producer, on a core of its own, that has generated everything; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    settings = PRODUCER.format(
        samples=_samples(options),
        hidden=options.hidden,
        prompt_tokens=options.tokens // 4,
        response_tokens=options.tokens - options.tokens // 4,
        max_tokens=LONGEST * options.tokens,
        address=address,
    )
    (directory / "producer.toml").write_text(settings)
    command = (sys.executable, "-m", "draftfeed_deploy.cli", "producer", "-c", "producer.toml")
    core = min(os.sched_getaffinity(0))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            (*command, "--run-dir", "run"),
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    try:
        _wait_until_generated(process, directory, _samples(options))
        yield address
    finally:
        process.kill()
        process.wait()


def _wait_until_generated(
    process: "subprocess.Popen[bytes]", directory: Path, samples: int
) -> None:
    made = directory / "run" / "samples.jsonl"
    deadline = time.monotonic() + GENERATED_SECONDS
    while not made.exists() or made.read_bytes().count(b"\n") < samples:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"it did not generate them:\n{(directory / 'log').read_text()}")
        time.sleep(POLL_SECONDS)


def play(address: str, options: argparse.Namespace) -> list[Round]:
    """All rounds, on one stream."""
    longest_bytes = LONGEST * options.tokens * LAYERS * options.hidden * 2
    buffer = BufferConfig(
        capacity_bytes=BUFFERED_BATCHES * options.batch * longest_bytes,
        batch_samples=options.batch,
        window_samples=1,
    )
    producer = ClientConfig(addresses=(address,))
    stream = HiddenStateStream(StreamConfig(producer=producer, buffer=buffer))
    rounds: list[Round] = []
    try:
        feed = Feed(stream, options)
        for number in range(options.rounds):
            rounds.append({arm: feed.turn(arm) for arm in in_turn(ARMS, number)})
            say(options, _line(number + 1, rounds[-1]))
        return rounds
    finally:
        stream.close()


class Feed:
    """A stream and a trainer whose step is always the same work."""

    def __init__(self, stream: HiddenStateStream, options: argparse.Namespace) -> None:
        self._stream = stream
        self._source = Collator(stream.release).batches(stream, options.batch)
        self._held = next(self._source)
        self._steps: int = options.steps
        self._matrix = torch.randn(MATRIX, MATRIX)
        self._multiply(50)
        once_seconds = min(self._multiply(20) / 20 for _ in range(10))
        self._step = partial(self._multiply, max(1, round(options.step / once_seconds)))

    def _multiply(self, times: int) -> float:
        """Seconds that it took."""
        began = time.perf_counter()
        for _ in range(times):
            torch.mm(self._matrix, self._matrix)
        return time.perf_counter() - began

    def turn(self, arm: str) -> Turn:
        """One more step than is counted comes first: with it an arm begins."""
        batches = self._batches(arm, self._steps + 1)
        waited_seconds = step_seconds = 0.0
        state_bytes = 0
        self._train(arm, next(batches))
        for _ in range(self._steps):
            began = time.perf_counter()
            batch = next(batches)
            waited_seconds += time.perf_counter() - began
            step_seconds += self._train(arm, batch)
            state_bytes += 2 * batch["hidden_states"][batch["document_ids"] >= 0].numel()
        return Turn(waited_seconds, step_seconds, self._steps, state_bytes)

    def _batches(self, arm: str, count: int) -> Iterator[Batch]:
        if arm == "no data":
            return repeat(self._held, count)
        batches = islice(self._source, count)
        return prefetch(batches) if arm == "prefetch" else batches

    def _train(self, arm: str, batch: Batch) -> float:
        """Seconds of the step."""
        step_seconds = 0.0 if arm == "no step" else self._step()
        if arm != "no data":
            self._stream.trained(batch["ids"], step=0)
        return step_seconds


def summarise(rounds: list[Round]) -> dict[str, Spread]:
    """Shares of time, seconds, bytes/s."""

    def spread(figure: Callable[[Round], float]) -> Spread:
        return Spread.of(map(figure, rounds))

    return {
        "waiting_prefetch": spread(lambda one: one["prefetch"].waiting),
        "waiting_in_the_loop": spread(lambda one: one["in the loop"].waiting),
        "step_seconds": spread(lambda one: one["no data"].seconds / one["no data"].steps),
        "step_beside_the_stream": spread(
            lambda one: one["prefetch"].step_seconds / one["no data"].step_seconds
        ),
        "bytes_per_second": spread(
            lambda one: one["prefetch"].state_bytes / one["prefetch"].seconds
        ),
        "headroom": spread(lambda one: one["prefetch"].seconds / one["no step"].seconds),
    }


def _words(summary: dict[str, Spread]) -> list[str]:
    return [
        "medians (and all from ... to) over the rounds",
        f"  a step, no data beside it, ms         {summary['step_seconds'].times(1000, 1)}",
        f"    beside the stream, times as long    {summary['step_beside_the_stream'].times(1, 3)}",
        f"  states trained, MB/s                  {summary['bytes_per_second'].times(1e-6, 0)}",
        f"    without a step, times as many       {summary['headroom'].times(1, 2)}",
        f"  waiting, % of the time: prefetch      {summary['waiting_prefetch'].times(100, 2)}"
        f"   {_verdict(summary)}",
        f"    collated in the loop                {summary['waiting_in_the_loop'].times(100, 2)}",
    ]


def _verdict(summary: dict[str, Spread]) -> str:
    if summary["headroom"].median <= 1:
        return "means nothing: the producer was not the faster one, use a longer --step"
    held = summary["waiting_prefetch"].median <= BAR
    return f"{'holds' if held else 'MISSED'}: <= {100 * BAR:.0f}"


def _line(number: int, one: Round) -> str:
    shares = {arm: f"{100 * one[arm].waiting:.2f}%" for arm in ARMS[:2]}
    return f"round {number}: waiting {shares['prefetch']}, in the loop {shares['in the loop']}"


def _samples(options: argparse.Namespace) -> int:
    """Of three arms in all rounds, and the batch that the fourth one holds."""
    return int((options.rounds * 3 * (options.steps + 1) + 1) * options.batch)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Does a trainer wait for data?")
    parser.add_argument("--rounds", type=int, default=6, help="of all arms")
    parser.add_argument("--steps", type=int, default=12, help="of an arm in a round")
    parser.add_argument("--step", type=float, default=0.25, help="about so many seconds of work")
    parser.add_argument("--batch", type=int, default=2, help="samples in a batch")
    parser.add_argument("--tokens", type=int, default=160, help="mean length of a sample")
    parser.add_argument("--hidden", type=int, default=5120, help="channels; there are five layers")
    return options_of(parser, "trainer-feed.json")


if __name__ == "__main__":
    sys.exit(main())
