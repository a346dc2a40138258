"""The data-parallel example, with something that happens to one rank in the middle of it."""

import os
import signal

import ddp_trainer

from draftfeed_consumer.ranks import Agreement
from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    """Options, in steps of this process: `drain_after`, as a signal to the first rank would, and
    `kill_after`, the second rank in the first life of a torchrun."""
    rank = int(os.environ.get("RANK", "0"))
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    drain_after = run.options.get("drain_after") if rank == 0 else None
    kill_after = run.options.get("kill_after") if rank == 1 and first_life else None
    ddp_trainer.SAVE_STEPS = run.options.get("save_steps", ddp_trainer.SAVE_STEPS)
    ddp_trainer.SAMPLES = run.options.get("samples", ddp_trainer.SAMPLES)
    agree, rounds = stream.agree, 0

    def meddle(have_batch: bool) -> Agreement:
        nonlocal rounds
        if rounds == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if rounds == drain_after:
            stream.drain()
        agreed = agree(have_batch)
        rounds += agreed.step
        return agreed

    stream.agree = meddle  # type: ignore[method-assign]
    ddp_trainer.train(stream, run)
