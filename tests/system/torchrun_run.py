"""A `Run` whose consumer is a group of ranks: torchrun starts them, with the example's loop."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from draftfeed_proto.ids import IdSet
from processes import Run

BIN = Path(sys.executable).parent
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FUNCTION = ("--set", "trainer.function=ddp_faults:train")
PYTHONPATH = os.pathsep.join([str(EXAMPLES), *sys.path])
ENVIRONMENT = {
    "PYTHONPATH": PYTHONPATH,
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Step(NamedTuple):
    """What one rank did in it."""

    number: int
    ids: list[str]
    loss: float


class TorchRun(Run):
    def __init__(self, directory: Path, samples: int, rate: int = 0) -> None:
        """Starts the producer. rate: rows a second; 0 is as fast as it can."""
        super().__init__(directory, rate, samples)
        self.producer = self.start("producer")

    def torchrun(
        self, ranks: int, *options: str, run_dir: str, restarts: int = 0
    ) -> "subprocess.Popen[str]":
        """options: of the consumer."""
        launcher = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        consumer = [BIN / "draftfeed", "consumer", "-c", "consumer.toml", "--run-dir", run_dir]
        process = subprocess.Popen(
            [BIN / "torchrun", *launcher, "--no-python", *consumer, *FUNCTION, *options],
            cwd=self.directory,
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def ranks(self, ranks: int, *options: str, run_dir: str) -> "subprocess.Popen[str]":
        """`draftfeed consumer --ranks`; options: of the consumer."""
        words = ("--ranks", str(ranks), *FUNCTION, *options)
        return self.start("consumer", *words, run_dir=run_dir, PYTHONPATH=PYTHONPATH)

    def alone(self, *options: str, run_dir: str) -> "subprocess.Popen[str]":
        """The same loop in one process, without torchrun."""
        return self.start("consumer", *FUNCTION, *options, run_dir=run_dir, PYTHONPATH=PYTHONPATH)

    def rank_steps(self, directory: str) -> list[Step]:
        """Of one rank, in the order in which they were made; `directory` is its own."""
        lines = (self.directory / directory / "steps.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        return [Step(step["step"], step["ids"], step["loss"]) for step in steps]

    def lives(self, run_dir: str) -> list[list[Step]]:
        """Of two ranks together, one list for each time that torchrun started them."""
        ranks = [_split(self.rank_steps(f"{run_dir}/rank{rank}")) for rank in range(2)]
        return [[*first, *second] for first, second in zip(*ranks, strict=True)]

    def in_checkpoint(self) -> list[str]:
        """The samples that the newest one says were trained."""
        newest = max((self.directory / "out").glob("probe-*.pt"))
        return [str(id) for id in IdSet.from_wire(torch.load(newest)["draftfeed"]["trained"])]

    def check_finished(self, lives: list[list[Step]]) -> None:
        """The producer knows that all is trained, and the last checkpoint has each sample once: by
        its own account, and by the steps that are in its weights."""
        self.succeeds(self.producer)
        assert sorted(self.in_checkpoint()) == sorted(self.expected())
        assert sorted(lineage(lives)) == sorted(self.expected())


def lineage(lives: list[list[Step]]) -> list[str]:
    """Ids, as often as the last weights have seen them: what a life did beyond the checkpoint that
    the next one began with is not in them."""
    kept: list[str] = []
    ends = [min(step.number for step in life) for life in lives[1:]]
    for life, end in zip(lives, [*ends, sys.maxsize], strict=True):
        kept += [id for step in life if step.number < end for id in step.ids]
    return kept


def _split(steps: list[Step]) -> list[list[Step]]:
    """Where the numbers go back, another life begins."""
    lives: list[list[Step]] = []
    for step in steps:
        if not lives or step.number <= lives[-1][-1].number:
            lives.append([])
        lives[-1].append(step)
    return lives
