"""Does anything grow, or get lost, in hours of streaming with a swap every few minutes?

    .venv/bin/python benchmarks/soak.py

README.md beside this file says what is measured and how.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Any

import numpy as np

from children import DRAFTFEED, TAKEN_OVER, Children, free_port
from report import leave, options_of, say
from soak_trainer import newest
from soak_watch import Growth, Look, directory_bytes, growth, look, scrape, thinned
from this_machine import this_machine

LINES = ("swapped", "steady")
LOCAL = "swapped"
"""Its nodes read the producer's files, as each new one is handed over anew; the other line's has
all through a connection."""
HIDDEN = 1024
LAYERS = 5
PROMPT_TOKENS, RESPONSE_TOKENS = 40, 60
SEGMENT_BYTES = 16_000_000
"""Small, so that thousands of them come and go."""
LOOK_SECONDS = 10.0
SAY_SECONDS = 60.0
WARM_UP_SHARE, WARM_UP_SECONDS = 0.2, 600.0
"""What is not judged at the beginning: a share of the time, so many seconds at most."""
NODE_SECONDS = 60.0
"""Of a node that is replaced: nodes are one series of what each held in its last minute."""
JUDGED_SECONDS = 900.0
"""Growth of a megabyte an hour cannot be told from noise in less; nor is everything open then."""
LEAST_LOOKS = 8
SPARE_DESCRIPTORS = 4
END_SECONDS = 300.0
"""For what is left when the last sample has been generated, and for a swap."""

PRODUCER = """
[engine]
name = "synthetic"
samples = {samples}
num_layers = 64
hidden_size = {hidden}
prompt_tokens = {prompt_tokens}
response_tokens = {response_tokens}
max_tokens = 1024
tokens_per_second = {rate}
[spool]
dir = "{name}/spool"
quota_bytes = 4_000_000_000
segment_bytes = {segment_bytes}
audit = true
[server]
bind = "{address}"
same_host = {same_host}
[status]
bind = "127.0.0.1:{port}"
"""
CONSUMER = """
[producer]
addresses = ["{address}"]
group = "{name}"
[buffer]
capacity_bytes = 64_000_000
window_samples = 8
stall_seconds = 0.5
[trainer]
function = "soak_trainer:train"
output_dir = "{name}/checkpoints"
[trainer.assets]
fetch = false
[trainer.options]
samples = {samples}
checkpoint_seconds = {checkpoint_seconds}
"""


class Line:
    """One producer, and the training nodes that it has one after the other."""

    def __init__(self, processes: Children, name: str, samples: int, rate: float) -> None:
        self.name, self.directory = name, processes.directory / name
        self.directory.mkdir()
        self._processes = processes
        self.looks: dict[str, list[Look]] = {}
        self.spool: list[tuple[float, int]] = []
        self.swaps: list[dict[str, Any]] = []
        self._ports = {"producer": free_port()}
        self._running: dict[str, Popen[bytes]] = {}
        words = {
            "name": name,
            "samples": samples,
            "rate": rate,
            "hidden": HIDDEN,
            "prompt_tokens": PROMPT_TOKENS,
            "response_tokens": RESPONSE_TOKENS,
            "segment_bytes": SEGMENT_BYTES,
            "checkpoint_seconds": 10.0,
            "same_host": str(name == LOCAL).lower(),
            "address": f"tcp://127.0.0.1:{free_port()}",
            "port": self._ports["producer"],
        }
        for service, text in (("producer", PRODUCER), ("consumer", CONSUMER)):
            (processes.directory / f"{name}-{service}.toml").write_text(text.format(**words))
        self.consumer = self._start("consumer-000")
        self._log = processes.directory / f"{name}-consumer-000.log"
        self._samples = samples

    def begin(self) -> None:
        """Generation, now that somebody is there to train."""
        self._processes.until(lambda: b"status page" in self._log.read_bytes(), "a node is up")
        self.producer = self._start("producer")

    def _start(self, who: str, *options: str) -> "Popen[bytes]":
        service, run_dir = who.partition("-")[0], f"{self.name}/{who}"
        port = self._ports.setdefault(who, free_port())
        bound = ("--set", f"status.bind=127.0.0.1:{port}") if service == "consumer" else ()
        config = f"{self.name}-{service}.toml"
        command = (*DRAFTFEED, service, "-c", config, "--run-dir", run_dir, *bound, *options)
        process = self._processes.start(f"{self.name}-{who}", command)
        self._running[who], self.looks[who] = process, []
        return process

    def swap(self) -> None:
        """By takeover and by drain in turns. Waits until the new node has a sample."""
        number, began, old = len(self.swaps) + 1, time.monotonic(), self.consumer
        who = f"consumer-{number:03d}"
        how = "takeover" if number % 2 else "drain"
        if how == "drain":
            config = f"{self.name}-consumer.toml"
            drain = self._processes.start("drain", (*DRAFTFEED, "drain", "-c", config))
            self._processes.until(lambda: drain.poll() is not None, "the old node is drained")
            if drain.returncode and old.poll() == 0:  # it had trained everything before
                self._processes.processes.remove(drain)
                return
        new = self._start(who, *(("--takeover",) if how == "takeover" else ()))
        samples = self.directory / who / "samples.jsonl"

        def has_begun() -> bool:
            there = samples.exists() and samples.stat().st_size > 0
            return (there and old.poll() is not None) or self.producer.poll() is not None

        self._processes.until(has_begun, f"node {number} has a sample")
        if not samples.exists() or not samples.stat().st_size:
            new.terminate()  # the old one had trained everything before
            del self.looks[who]
            return
        self.consumer = new
        seconds = time.monotonic() - began
        swap = {"how": how, "at": began, "seconds": seconds, "old_exit": old.returncode}
        right = old.returncode == (TAKEN_OVER if how == "takeover" else 0)
        self.swaps.append({**swap, "right": right})

    def watch(self) -> None:
        for who, process in self._running.items():
            if process.poll() is None and (seen := look(process.pid)) is not None:
                self.looks[who].append(seen)
                scrape(self._ports[who])
        self.spool.append((time.monotonic(), directory_bytes(self.directory / "spool")))

    @property
    def over(self) -> bool:
        return self.producer.poll() is not None and self.consumer.poll() is not None

    @property
    def generated(self) -> bool:
        """All that will be."""
        path = self.directory / "producer" / "samples.jsonl"
        return path.exists() and path.read_bytes().count(b"\n") >= self._samples

    def received(self) -> int:
        """Samples, by all nodes."""
        files = self.directory.glob("consumer-*/samples.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in files)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # none of its processes outlives it
    tokens = options.rate * 1e6 / (2 * LAYERS * HIDDEN)
    rows = PROMPT_TOKENS + RESPONSE_TOKENS - 1
    samples = max(1, round(options.minutes * 60 * tokens / rows))
    machine = this_machine()
    say(options, f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} before")
    say(
        options,
        f"{options.minutes:g} minutes, two lines of {options.rate:g} MB/s ({tokens:.0f} tokens/s), "
        f"{samples} samples each, a swap in one of them every {options.swap_every:g} minutes",
    )
    with _directory(options.dir) as directory:
        processes = Children(directory, END_SECONDS)
        try:
            lines = [Line(processes, name, samples, tokens) for name in LINES]
            for line in lines:
                line.begin()
            _soak(options, processes, lines)
            result = judge(lines, samples, options.leak, options.rate * 1e6)
        finally:
            processes.close()
    setup = {
        "minutes": options.minutes,
        "rate_mb": options.rate,
        "swap_every_minutes": options.swap_every,
        "leak_mb_per_hour": options.leak,
        "samples": samples,
        "tokens_per_second": tokens,
    }
    for line in words(result):
        say(options, line)
    leave(options, {"machine": machine, "setup": setup, **result})
    return 0 if not result["faults"] else 1


def _soak(options: argparse.Namespace, processes: Children, lines: list[Line]) -> None:
    began = time.monotonic()
    end = began + options.minutes * 60
    look_due = say_due = began
    swap_due = began + options.swap_every * 60

    def watch() -> None:
        nonlocal look_due, say_due
        now = time.monotonic()
        if look_due <= now < end:  # what they let go at the end would hide what they held
            look_due = now + LOOK_SECONDS
            for line in lines:
                line.watch()
        if now >= say_due:
            say_due = now + SAY_SECONDS
            say(options, _progress(lines, now - began))

    def due() -> bool:
        return time.monotonic() >= swap_due or all(line.over for line in lines)

    processes.meanwhile = watch
    longest = options.minutes * 60 + END_SECONDS
    while not all(line.over for line in lines):
        processes.until(due, "the next swap, or the end", poll_seconds=0.2, seconds=longest)
        if time.monotonic() >= swap_due:
            swap_due += options.swap_every * 60
            if end - time.monotonic() < options.swap_every * 30 or lines[0].generated:
                swap_due = float("inf")  # whoever came now would have nothing to do
                continue
            lines[0].swap()
    say(options, _progress(lines, time.monotonic() - began))


def _progress(lines: list[Line], seconds: float) -> str:
    parts = []
    for line in lines:
        last = {who.partition("-")[0]: looks[-1] for who, looks in line.looks.items() if looks}
        memory = ", ".join(
            f"{who} {seen.rss_mb:.0f} MB {seen.descriptors} fds" for who, seen in last.items()
        )
        spool = line.spool[-1][1] / 1e6 if line.spool else 0.0
        parts.append(f"{line.name}: {line.received()} received, {memory}, spool {spool:.0f} MB")
    return f"{seconds / 60:6.1f} min, {len(lines[0].swaps)} swaps; " + "; ".join(parts)


def judge(lines: list[Line], samples: int, bar: float, rate_bytes: float) -> dict[str, Any]:
    """What grew, what is missing. bar: MB an hour; rate_bytes: of states that a line makes in a
    second, which is the most that its spool grows by."""
    result: dict[str, Any] = {"processes": {}, "spools": {}, "samples": {}, "series": {}}
    faults: list[str] = []
    for line in lines:
        nodes = [looks for who, looks in line.looks.items() if who != "producer"]
        series = {"producer": _warm(line.looks["producer"])}
        if len(nodes) > 1:
            series["consumers, each at its end"] = [_last(looks) for looks in nodes if _long(looks)]
        else:
            series["consumer"] = _warm(nodes[0])
        for who, looks in series.items():
            name = f"{line.name} {who}"
            figures, found = _judge_process(name, looks, bar)
            result["processes"][name] = figures
            faults += found
            result["series"][name] = [list(one) for one in thinned(looks)]
        result["spools"][line.name], found = _judge_spool(line, rate_bytes)
        faults += found
        result["samples"][line.name], found = _audit(line, samples)
        faults += found
        faults += [f"{line.name}: swap {one}" for one in line.swaps if not one["right"]]
    result["swaps"] = lines[0].swaps
    return {**result, "faults": faults}


def _warm(looks: list[Look]) -> list[Look]:
    whole = looks[-1].time_seconds - looks[0].time_seconds
    begin = looks[0].time_seconds + min(WARM_UP_SHARE * whole, WARM_UP_SECONDS)
    return [one for one in looks if one.time_seconds >= begin]


def _long(looks: list[Look]) -> bool:
    """Whether a node was there for long enough to say what it held."""
    return len(looks) * LOOK_SECONDS > 2 * NODE_SECONDS


def _last(looks: list[Look]) -> Look:
    """Of a node: medians of its last minute, without the end of it; CPU time is all of it."""
    end = looks[-round(NODE_SECONDS / LOOK_SECONDS) - 1 : -1]
    return Look(
        looks[-1].time_seconds,
        median(one.rss_mb for one in end),
        median(one.anonymous_mb for one in end),
        round(median(one.descriptors for one in end)),
        round(median(one.threads for one in end)),
        looks[-1].cpu_seconds,
    )


def _judge_process(name: str, looks: list[Look], bar: float) -> tuple[dict[str, Any], list[str]]:
    figures: dict[str, Any] = {"looks": len(looks)}
    if len(looks) < LEAST_LOOKS:
        return figures, []
    times = [one.time_seconds for one in looks]
    judged = times[-1] - times[0] >= JUDGED_SECONDS
    faults = []
    for what in ("rss_mb", "anonymous_mb"):
        grown = growth(times, [getattr(one, what) for one in looks])
        figures[what] = grown and grown._asdict()
        if judged and grown and grown.grows(bar):
            faults.append(f"{name}: {what} grew by {_slope(grown)}")
    few = len(looks) // 4
    for what in ("descriptors", "threads"):
        counts = [getattr(one, what) for one in looks]
        first, last = median(counts[:few]), median(counts[-few:])
        figures[what] = {"first": first, "last": last, "most": max(counts)}
        if judged and last > first + SPARE_DESCRIPTORS:
            faults.append(f"{name}: {what} grew from {first:g} to {last:g}")
    seconds = times[-1] - times[0]
    if "consumers" not in name:
        used = looks[-1].cpu_seconds - looks[0].cpu_seconds
        figures["cpu_share"] = used / seconds
    return figures, faults


def _judge_spool(line: Line, rate_bytes: float) -> tuple[dict[str, Any], list[str]]:
    """Two checkpoints' worth is in it all the time, and what is generated during a swap: a longer
    one in the second half explains more. When all is trained, nothing is left but the log of what
    was, and the segment that was written last."""
    left = directory_bytes(line.directory / "spool")
    half = line.spool[len(line.spool) // 2][0] if line.spool else 0.0
    first, last = (
        max((size for at, size in line.spool if (at >= half) == later), default=0)
        for later in (False, True)
    )
    longest_first, longest_last = (
        max((swap["seconds"] for swap in line.swaps if (swap["at"] >= half) == later), default=0.0)
        for later in (False, True)
    )
    explained = round(rate_bytes * max(0.0, longest_last - longest_first))
    figures = {"most_first_half": first, "most_second_half": last, "left": left}
    faults = []
    if last > first + explained + 2 * SEGMENT_BYTES:
        faults.append(f"{line.name}: the spool grew from {first} to {last} bytes")
    if left > 2 * SEGMENT_BYTES:
        faults.append(f"{line.name}: {left} bytes are left in the spool")
    return figures, faults


def _audit(line: Line, samples: int) -> tuple[dict[str, Any], list[str]]:
    """By the trainer's own counts in the last checkpoint, and by both ends' digests."""
    path = newest(line.directory / "checkpoints")
    counts = np.zeros(samples, np.uint8)
    if path is not None:
        with np.load(path) as saved:
            counts = saved["counts"]
    made = dict(_digests(line.directory / "producer" / "samples.jsonl"))
    files = sorted(line.directory.glob("consumer-*/samples.jsonl"))
    received = [one for file in files for one in _digests(file)]
    figures = {
        "generated": len(made),
        "received": len(received),
        "lost": int((counts == 0).sum()),
        "duplicated": int((counts > 1).sum()),
        "other_digest": sum(made.get(id) != digest for id, digest in received),
        "exit_codes": [line.producer.returncode, line.consumer.returncode],
    }
    faults = [
        f"{line.name}: {figures[what]} samples {what}"
        for what in ("lost", "duplicated", "other_digest")
        if figures[what]
    ]
    if len(made) != samples:
        faults.append(f"{line.name}: {len(made)} of {samples} were generated")
    return figures, faults


def _digests(path: Path) -> Iterator[tuple[str, str]]:
    with path.open() as lines:
        for line in lines:
            sample = json.loads(line)
            yield sample["id"], sample["digest"]


def _slope(grown: Growth) -> str:
    return f"{grown.per_hour:.2f} +- {grown.error:.2f} MB/h"


def words(result: dict[str, Any]) -> list[str]:
    """The table."""
    lines = [f"{'':36} {'RSS, MB':>16} {'MB/h':>16} {'fds':>10} {'threads':>9} {'CPU':>7}"]
    for name, figures in result["processes"].items():
        if figures["looks"] < LEAST_LOOKS:
            lines.append(f"{name:36} too short to tell")
            continue
        grown = figures["rss_mb"] and Growth(**figures["rss_mb"])
        level = f"{grown.first:.0f} to {grown.last:.0f}" if grown else "too short"
        slope = f"{grown.per_hour:.2f} +- {grown.error:.2f}" if grown else ""
        fds, threads = (
            f"{figures[what]['first']:g}, {figures[what]['last']:g}"
            for what in ("descriptors", "threads")
        )
        cpu = f"{100 * figures['cpu_share']:.1f}%" if "cpu_share" in figures else ""
        lines.append(f"{name:36} {level:>16} {slope:>16} {fds:>10} {threads:>9} {cpu:>7}")
    for name, spool in result["spools"].items():
        first, last, left = (size / 1e6 for size in spool.values())
        lines.append(f"{name}: spool {first:.0f} MB at most, {last:.0f} later, {left:.0f} left")
    for name, samples in result["samples"].items():
        lines.append(
            f"{name}: {samples['generated']} generated, {samples['received']} received, "
            f"{samples['lost']} lost, {samples['duplicated']} duplicated, "
            f"{samples['other_digest']} with another digest"
        )
    seconds = [swap["seconds"] for swap in result["swaps"]]
    if seconds:
        lines.append(
            f"{len(seconds)} swaps, {median(seconds):.1f} s ({min(seconds):.1f} to "
            f"{max(seconds):.1f}) from the command to the new node's first sample"
        )
    return lines + [f"FAULT: {fault}" for fault in result["faults"]]


@contextmanager
def _directory(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        chosen.mkdir(parents=True)  # one that is there may hold another run
        yield chosen
        return
    with tempfile.TemporaryDirectory(prefix="draftfeed-soak-") as name:
        yield Path(name)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Does anything grow, or get lost, in hours?")
    parser.add_argument("--minutes", type=float, default=120.0, help="default: 120")
    parser.add_argument("--rate", type=float, default=2.0, help="MB/s of each of the two lines")
    parser.add_argument("--swap-every", type=float, default=5.0, help="minutes (default: 5)")
    parser.add_argument("--leak", type=float, default=2.0, help="MB/h that count as one")
    parser.add_argument("--dir", type=Path, help="a new one, which is kept, with all logs")
    return options_of(parser, "soak.json")


if __name__ == "__main__":
    sys.exit(main())
