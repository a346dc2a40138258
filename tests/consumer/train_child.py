"""Trains a tiny drafter and is killed in the middle of a step: run by test_specforge_live."""

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import tiny_target
from draftfeed_consumer.trainers.specforge import train
from draftfeed_proto.ids import SampleId
from memory_stream import MemoryStream


class Deadly(MemoryStream):
    """Writes down what is acknowledged, and kills its process at a step."""

    def __init__(self, log: Path, kill_at: int, count: int) -> None:
        super().__init__(tiny_target.DESCRIPTOR, tiny_target.items(count))
        self._log, self._kill_at = log, kill_at

    def trained(
        self, ids: Iterable[SampleId], step: int, metrics: dict[str, float] | None = None
    ) -> None:
        done = list(ids)
        super().trained(done, step, metrics)
        with self._log.open("a") as file:
            file.write(json.dumps({"step": step, "ids": [str(id) for id in done]}) + "\n")
        if step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main(target: str, output_dir: str, kill_at: str, count: str) -> None:
    out = Path(output_dir)
    out.mkdir(parents=True, exist_ok=True)
    run = tiny_target.run(Path(target), out, batch_size=2, save_interval_steps=2, max_checkpoints=9)
    train(Deadly(out / "acks.jsonl", int(kill_at), int(count)), run)


if __name__ == "__main__":
    main(*sys.argv[1:])
