"""Trains a tiny drafter and is killed in the middle of a step: run by test_specforge_live and
test_eagle3."""

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

import tiny_target
from draftfeed_consumer.trainers.specforge import train
from draftfeed_proto.ids import SampleId
from memory_stream import Item, MemoryStream


class Deadly(MemoryStream):
    """Writes down what is acknowledged, and kills its process at a step."""

    def __init__(self, log: Path, kill_at: int, count: int) -> None:
        postnorm = msgspec.structs.replace(tiny_target.DESCRIPTOR, final="postnorm")
        super().__init__(postnorm, [with_final(item) for item in tiny_target.items(count)])
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


def with_final(item: Item) -> Item:
    """As its last layer is, which will do: what is learned here is nothing."""
    item["final_states"] = item["hidden_states"][:, -1].clone()
    item["counters"] = (*item["counters"], item["counters"][-1])
    return item


def main(target: str, output_dir: str, kill_at: str, count: str, algorithm: str = "dflash") -> None:
    """kill_at: 0 is never."""
    out = Path(output_dir)
    out.mkdir(parents=True, exist_ok=True)
    options = {"batch_size": 2, "save_interval_steps": 2, "max_checkpoints": 9}
    run = tiny_target.run(Path(target), out, **options)
    if algorithm == "eagle3":
        own = {"algorithm": algorithm, "ttt_length": 2, "resume_from": "latest"}
        run = msgspec.structs.replace(run, options={**options, **own})
    train(Deadly(out / "acks.jsonl", int(kill_at), int(count)), run)


if __name__ == "__main__":
    main(*sys.argv[1:])
