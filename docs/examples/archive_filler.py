"""Trains nothing: takes every sample and says that it is done with, so that it goes to the archive.

    draftfeed consumer -c consumer.toml --set trainer.function=archive_filler:train

with this file's folder on PYTHONPATH, for a run that generates everything first and trains later
from `draftfeed replay`. Its checkpoints hold the list of samples and nothing else.
"""

from draftfeed_consumer.checkpoints import Checkpoints
from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun

SAVE_SAMPLES = 500


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    assert stream.descriptor  # the stream is ours from here on
    checkpoints = Checkpoints(run.output_dir, stream, name="filled")
    checkpoints.load()
    stream.on_idle_checkpoint(lambda: checkpoints.save({}))
    for step, sample in enumerate(stream, start=1):
        stream.release([sample["id"]])
        stream.trained([sample["id"]], step)
        if step % SAVE_SAMPLES == 0 or stream.checkpoint_wanted:
            checkpoints.save({})
    checkpoints.save({})
