"""Processes of a training node with an empty cache, for the tests of the target's files."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

CONSUMER = """
[producer]
addresses = ["{address}"]
[buffer]
capacity_bytes = 4_000_000
window_samples = 2
[trainer]
function = "stub_trainer:train"
output_dir = "out"
"""
"""Of a trainer without a model."""
DRAFTFEED = Path(sys.executable).with_name("draftfeed")

Process = subprocess.Popen[str]
Start = Callable[..., Process]
"""With the words of a command."""


@contextmanager
def processes_in(directory: Path) -> Iterator[Start]:
    """They run there, and are gone in the end."""
    with ExitStack() as stack:

        def start(*command: object) -> Process:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=directory,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "XDG_CACHE_HOME": str(directory / "cache"),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                stack.callback(pipe.close)
            return process

        yield start


def ended(process: Process) -> tuple[int, str]:
    output, _ = process.communicate(timeout=150)
    return process.returncode, output


def part_bytes(directory: Path) -> int:
    """What is there of the file that takes long."""
    parts = list(directory.glob("cache/draftfeed/targets/*/model.safetensors.part"))
    return parts[0].stat().st_size if parts else 0
