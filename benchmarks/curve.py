"""What does encryption cost: the same stream with keys and without.

    .venv/bin/python benchmarks/curve.py

README.md beside this file says what is measured and how.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from draftfeed_deploy.keygen import write_pair
from report import leave, options_of, say
from rounds import Spread, in_turn
from this_machine import this_machine

HERE = Path(__file__).parent
COMMAND = Path(sys.executable).with_name("draftfeed")
TIMEOUT_SECONDS = 300
PRODUCER = """
[engine]
name = "synthetic"
samples = {samples}
prompt_tokens = 40
response_tokens = 60
max_tokens = 256
[spool]
dir = "{spool}"
fsync = "never"
[server]
bind = "tcp://127.0.0.1:{port}"
same_host = false
session_timeout_seconds = 0
{keys}
[status]
enabled = false
"""
CONSUMER = """
[producer]
addresses = ["tcp://127.0.0.1:{port}"]
{keys}
[buffer]
window_samples = 1
[trainer]
function = "curve_trainer:train"
output_dir = "{output}"
options = {{ producer_pid = {pid} }}
[trainer.assets]
fetch = false
[status]
enabled = false
"""
PORT = 17_550


class Cost(NamedTuple):
    """Of one transfer, for each GB on the wire."""

    producer_cpu_seconds: float
    consumer_cpu_seconds: float
    seconds: float


def main() -> int:
    options = _options()
    say(options, f"load before: {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory(prefix="curve-") as name:
        directory = Path(name)
        for who in ("producers", "clients/consumer"):
            write_pair(directory / who)
        _fill(directory, options.samples)
        rounds: list[tuple[Cost, Cost]] = []
        for number in range(options.rounds):
            order = in_turn((False, True), number)
            costs = {keys: _transfer(directory, options.samples, keys) for keys in order}
            rounds.append((costs[False], costs[True]))
            say(
                options,
                f"round {number}: without {_words(costs[False])}, with {_words(costs[True])}",
            )
    result = {"machine": this_machine(), "rounds": [[*map(Cost._asdict, pair)] for pair in rounds]}
    for field in Cost._fields:
        plain, keyed = ([getattr(pair[k], field) for pair in rounds] for k in (0, 1))
        added = [after - before for before, after in zip(plain, keyed, strict=True)]
        ratios = [after / before for before, after in zip(plain, keyed, strict=True)]
        figures = {
            "without": Spread.of(plain),
            "with": Spread.of(keyed),
            "added": Spread.of(added),
            "ratio": Spread.of(ratios),
        }
        result[field] = {name: spread._asdict() for name, spread in figures.items()}
        words = ", ".join(f"{name} {spread}" for name, spread in figures.items())
        say(options, f"{field.replace('_', ' ')} a GB: {words}")
    leave(options, result)
    return 0


def _words(cost: Cost) -> str:
    return f"{cost.producer_cpu_seconds:.2f} + {cost.consumer_cpu_seconds:.2f} CPU s/GB"


def _fill(directory: Path, samples: int) -> None:
    """A spool with all samples, made once."""
    process = _producer(directory, directory / "full", samples, keys=False)
    _wait_for(process, "phase delivering")
    process.terminate()
    process.communicate(timeout=TIMEOUT_SECONDS)


def _transfer(directory: Path, samples: int, keys: bool) -> Cost:
    """All of a copy of that spool, from one process to another over loopback."""
    spool, output = directory / "spool", directory / "out"
    for path in (spool, output):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(directory / "full", spool)
    output.mkdir()
    producer = _producer(directory, spool, samples, keys)
    try:
        _wait_for(producer, "serving")
        lines = 'key = "clients/consumer.secret"\nserver_key = "producers.pub"' if keys else ""
        text = CONSUMER.format(port=PORT, keys=lines, output=output, pid=producer.pid)
        (directory / "consumer.toml").write_text(text)
        subprocess.run(
            [COMMAND, "consumer", "-c", "consumer.toml"],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(HERE)},
            check=True,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
        )
    finally:
        producer.kill()
        producer.communicate()
    cost = json.loads((output / "cost.json").read_text())
    gigabytes = cost.pop("wire_bytes") / 1e9
    return Cost(**{name: seconds / gigabytes for name, seconds in cost.items()})


def _producer(directory: Path, spool: Path, samples: int, keys: bool) -> "subprocess.Popen[str]":
    lines = 'key = "producers.secret"\nclients = ["clients"]' if keys else ""
    text = PRODUCER.format(samples=samples, spool=spool, port=PORT, keys=lines)
    (directory / "producer.toml").write_text(text)
    return subprocess.Popen(
        [COMMAND, "producer", "-c", "producer.toml"],
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for(process: "subprocess.Popen[str]", words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise SystemExit(f"the producer ended without saying {words!r}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The same stream with keys and without.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=400, help="5 MB each (default: 400)")
    return options_of(parser, "curve.json")


if __name__ == "__main__":
    sys.exit(main())
