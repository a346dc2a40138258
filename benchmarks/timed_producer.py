"""`draftfeed producer`, which also writes down when each decode step ended.

    python timed_producer.py STEPS ENGINE producer -c producer.toml

STEPS gets 16 bytes a step: the time (float64, seconds of CLOCK_MONOTONIC) and how many tokens the
step made (int64). With the transformers engine a step is one forward pass of the batch, seen by
the criterion that decides who is finished; the synthetic engine has no steps, there it is a
sample. Writing them down costs some microseconds each.
"""

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP = struct.Struct("<dq")


class StepLog:
    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, tokens: int) -> None:
        self._file.write(STEP.pack(time.monotonic(), tokens))


def read_steps(path: Path) -> list[tuple[float, int]]:
    """[(time, tokens)], whole ones only."""
    data = path.read_bytes() if path.exists() else b""
    whole = len(data) // STEP.size * STEP.size
    return [(at, tokens) for at, tokens in STEP.iter_unpack(data[:whole])]


def watch_synthetic(log: StepLog) -> None:
    from draftfeed_producer.engines.synthetic import SyntheticEngine

    run = SyntheticEngine.run

    def timed(self: SyntheticEngine, *arguments: Any) -> Iterator[Any]:
        for sample in run(self, *arguments):
            log.write(len(sample.hidden_states))
            yield sample

    SyntheticEngine.run = timed  # type: ignore[method-assign]


def watch_transformers(log: StepLog) -> None:
    from draftfeed_producer.engines import transformers

    judge = transformers._Watch.__call__

    def timed(self: Any, input_ids: Any, scores: Any, **options: Any) -> Any:
        tokens = int((~self._finished).sum())
        finished = judge(self, input_ids, scores, **options)
        log.write(tokens)
        return finished

    transformers._Watch.__call__ = timed  # type: ignore[method-assign]


def main() -> int:
    from draftfeed_deploy.cli import main as draftfeed

    steps, engine, *arguments = sys.argv[1:]
    watch = watch_synthetic if engine == "synthetic" else watch_transformers
    watch(StepLog(Path(steps)))
    return draftfeed(arguments)


if __name__ == "__main__":
    sys.exit(main())
