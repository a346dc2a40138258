"""`draftfeed producer`, which generates nothing until a file is there.

    python scale_producer.py GO THREADS producer -c producer.toml

So that it can be looked at while members are attached and nothing is to be sent. THREADS, a JSON
file, then gets the names of its threads by their ids in /proc.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thread_names import write_thread_names

POLL_SECONDS = 0.5


def hold(go: Path, threads: Path) -> None:
    from draftfeed_producer.engines.synthetic import SyntheticEngine

    run = SyntheticEngine.run

    def held(self: SyntheticEngine, *arguments: Any) -> Iterator[Any]:
        write_thread_names(threads)
        while not go.exists() and not self._stopped.wait(POLL_SECONDS):
            pass
        yield from run(self, *arguments)

    SyntheticEngine.run = held  # type: ignore[method-assign]


def main() -> int:
    from draftfeed_deploy.cli import main as draftfeed

    go, threads, *arguments = sys.argv[1:]
    hold(Path(go), Path(threads))
    return draftfeed(arguments)


if __name__ == "__main__":
    sys.exit(main())
