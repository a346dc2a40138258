"""A training loop of your own: one linear probe that predicts the next token from the taps.

    draftfeed consumer -c consumer.toml --set trainer.function=custom_trainer:train

with this file's folder on PYTHONPATH. It shows the calls that make a sample count once:
`load_state_dict`, `trained`, `state_dict`, `committed`.

Another node may take over while this one is saving, and both save to the same place when that is
shared storage. So a checkpoint is named by the term and number of its state: no two nodes ever
have the same term, and the newest one is that of the highest, whenever it was written. It is
looked for after `stream.descriptor`, which waits until the stream is ours: from then on nothing
that an older node still saves can count.
"""

import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun

SAVE_STEPS = 20
KEPT = 2
WIDTH = 64


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    served = stream.descriptor
    size = len(served.layer_ids) * served.hidden_size
    probe = torch.nn.Sequential(
        torch.nn.RMSNorm(size),  # a residual stream has a few channels that dwarf the others
        torch.nn.Linear(size, WIDTH),
        torch.nn.Linear(WIDTH, served.vocab_size),
    )
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-3)
    first = 1
    if found := checkpoints(run.output_dir):
        saved = torch.load(found[-1])
        probe.load_state_dict(saved["probe"])
        optimizer.load_state_dict(saved["optimizer"])
        first += saved["step"]
        stream.load_state_dict(saved["draftfeed"])  # deliver only what this one has not seen
    step = first - 1

    def save() -> None:
        parts = {"probe": probe.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        save_checkpoint(run.output_dir, parts, stream)

    # A producer whose disk is full waits for a checkpoint, and this loop would wait for it.
    stream.on_idle_checkpoint(save)
    for step, sample in enumerate(stream, start=first):
        rows = sample["hidden_states"].flatten(1).float()  # [n, layers * hidden], up from fp16
        labels = sample["input_ids"][1:].long()  # row k was fed token k: its label is the next
        response = sample["loss_mask"][1:].bool()
        loss = cross_entropy(probe(rows[response]), labels[response])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stream.trained([sample["id"]], step, {"loss": loss.item()})
        if step % SAVE_STEPS == 0 or stream.checkpoint_wanted:
            save()
    save()


def checkpoints(directory: Path) -> list[Path]:
    """Oldest first, by term and number."""
    return sorted(directory.glob("probe-*.pt"))


def save_checkpoint(directory: Path, parts: dict[str, object], stream: HiddenStateStream) -> None:
    """The checkpoint holds the stream's state, and is durable before the producer hears of it."""
    state = stream.state_dict()
    path = directory / f"probe-{state['term']:06d}-{state['number']:08d}.pt"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save({**parts, "draftfeed": state}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(directory, os.O_RDONLY)
    os.fsync(folder)  # the new name too
    os.close(folder)
    stream.committed(state)
    for old in checkpoints(directory)[:-KEPT]:
        old.unlink(missing_ok=True)
