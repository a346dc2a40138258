"""Is the tap right on this GPU, and what does it cost?

    .venv/bin/python benchmarks/gpu/tap.py

README.md in the folder above says what is measured and how.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import copies
import decode
import kernel_speed
import parity
import ring_load
import torch
from findings import Deadline, Report
from machine import MEANT, CudaMachine, HostMachine

from draftfeed_producer.tap import gather

LIMIT_SECONDS = 210
"""What hangs is stopped ten seconds later; with torch's import that is always under 4 minutes."""
RESULTS = Path(__file__).parents[1] / "results"
NOT_MEASURED = (
    "a real model: the decoder has random weights, and full attention in every block",
    "SGLang around it, more than one GPU, other processes on the same PCIe link",
    "host memory bandwidth taken from others while pieces land",
)


class Part(NamedTuple):
    name: str
    share: float
    """Of the time that is left when it begins."""
    measure: Callable[[Deadline], None]


def main(arguments: Sequence[str] | None = None, tap: parity.Tap = gather) -> int:
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu goes through everything else, at tiny sizes")
        return 2
    machine = CudaMachine() if options.device == "cuda" else HostMachine()
    report = Report(judged=machine.graphs)
    run = Run(machine, report, options)
    run.stop_in(options.seconds + 10)
    for part in _parts(machine, tap, report):
        if options.only in (None, part.name):
            run.play(part)
    return run.end()


def _parts(machine: CudaMachine | HostMachine, tap: parity.Tap, report: Report) -> list[Part]:
    def sizes(of: ModuleType) -> Any:
        return of.FULL if machine.graphs else of.TINY

    everything = partial(parity.measure, machine, tap, sizes(parity), report)
    under_load = partial(ring_load.measure, machine, tap, sizes(ring_load), report)
    speed = partial(kernel_speed.measure, machine, tap, sizes(kernel_speed), report)
    to_host = partial(copies.measure, machine, sizes(copies), report)
    step = partial(decode.measure, machine, tap, sizes(decode), report)
    return [
        Part(parity.PART, 0.3, everything),
        Part(ring_load.PART, 0.15, under_load),
        Part(kernel_speed.PART, 0.3, speed),
        Part(copies.PART, 0.3, to_host),
        Part(decode.PART, 0.9, step),
    ]


class Run:
    """One run from its first part to its table."""

    def __init__(
        self, machine: CudaMachine | HostMachine, report: Report, options: argparse.Namespace
    ) -> None:
        self._machine, self._report, self._options = machine, report, options
        self._begun, self._now = time.monotonic(), "start"
        self._described: dict[str, Any] = machine.describe() | {"before": machine.state()}
        self._ending = threading.Lock()

    def stop_in(self, seconds: float) -> None:
        """A kernel or a copy that never ends can't be interrupted, only left behind."""
        timer = threading.Timer(seconds, self._stop)
        timer.daemon = True
        timer.start()

    def play(self, part: Part) -> None:
        """A part that breaks off leaves the others' figures alone; the run has failed."""
        self._now = part.name
        left = self._options.seconds - (time.monotonic() - self._begun)
        try:
            part.measure(Deadline(part.share * left))
            self._machine.give_back()
        except Exception as broken:  # noqa: BLE001 - whatever it is, it is in the table
            traceback.print_exc()
            self._report.broke(part.name, in_one_line(broken))

    def end(self) -> int:
        with self._ending:
            code = 1 if self._report.failed else 0
            self._print(code)
            return code

    def _stop(self) -> None:
        with self._ending:
            self._report.broke(self._now, "stopped: it did not end in time")
            self._print(1)
            sys.stdout.flush()
            os._exit(1)

    def _print(self, code: int) -> None:
        for line in (*self._heading(), "", *self._report.table(), "", *self._report.ending()):
            print(line)
        print(self._which_card())
        for what in NOT_MEASURED:
            print(f"not measured: {what}")
        seconds = time.monotonic() - self._begun
        path = self._options.out
        if path is None and self._machine.graphs:
            path = RESULTS / f"tap-{self._machine.card}.json"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._document(code, seconds), indent=1) + "\n")
            print(f"every round: {path}")
        print(f"{seconds:.0f} s, exit code {code}")

    def _heading(self) -> list[str]:
        said = self._described
        named = ("driver", "cuda", "torch", "triton")
        versions = [f"{name} {said[name]}" for name in named if name in said]
        state = ", ".join(f"{name} {value}" for name, value in said["before"].items())
        return [
            ", ".join([said["card"], said["compute_capability"], *versions]),
            f"before: {state or 'clocks cannot be read'}; commit {commit()}",
        ]

    def _which_card(self) -> str:
        meant = ", ".join(f"{name} (sm_{a}{b})" for (a, b), name in MEANT.items())
        if not self._machine.graphs:
            return f"no GPU: figures say nothing, and no goal was judged; meant are {meant}"
        if self._machine.capability in MEANT:
            return f"this card is one of those meant: {meant}"
        return f"another card than those meant, {meant}: its figures are its own"

    def _document(self, code: int, seconds: float) -> dict[str, Any]:
        return {
            "commit": commit(),
            "machine": self._described | {"after": self._machine.state()},
            "meant": self._machine.capability in MEANT,
            "exit_code": code,
            "seconds": seconds,
            "rows": [row._asdict() for row in self._report.rows],
            "cut": self._report.cut,
            "not_measured": NOT_MEASURED,
            "rounds": self._report.rounds,
        }


def in_one_line(broken: Exception) -> str:
    at = traceback.extract_tb(broken.__traceback__)[-1]
    said = next(iter(str(broken).splitlines()), "")
    return f"{type(broken).__name__} in {Path(at.filename).name}:{at.lineno} {said[:100]}"


def commit() -> str:
    """Of this checkout, with a plus when files of it differ from that commit."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Parity and cost of the tap on a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out",
        type=Path,
        help="where the document with every round goes (default: benchmarks/results/tap-CARD.json)",
    )
    parts = (parity.PART, kernel_speed.PART, copies.PART, decode.PART)
    parser.add_argument("--only", choices=parts, help="one part instead of all")
    parser.add_argument(
        "--seconds",
        type=float,
        default=LIMIT_SECONDS,
        help=f"after which no new round begins (default: {LIMIT_SECONDS})",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
