"""A training loop of your own: one linear probe that predicts the next token from the taps.

    draftfeed consumer -c consumer.toml --set trainer.function=custom_trainer:train

with this file's folder on PYTHONPATH. It shows the four calls that make a sample count once:
`load_state_dict`, `trained`, `state_dict`, `committed`.
"""

import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun

SAVE_STEPS = 20
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
    checkpoint = run.output_dir / "probe.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        probe.load_state_dict(saved["probe"])
        optimizer.load_state_dict(saved["optimizer"])
        stream.load_state_dict(saved["draftfeed"])  # deliver only what this one has not seen
    for step, sample in enumerate(stream, start=1):
        rows = sample["hidden_states"].flatten(1).float()  # [n, layers * hidden], up from fp16
        labels = sample["input_ids"][1:].long()  # row k was fed token k: its label is the next
        response = sample["loss_mask"][1:].bool()
        loss = cross_entropy(probe(rows[response]), labels[response])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stream.trained([sample["id"]], step, {"loss": loss.item()})
        if step % SAVE_STEPS == 0 or stream.checkpoint_wanted:
            save(checkpoint, probe, optimizer, stream)
    save(checkpoint, probe, optimizer, stream)


def save(
    path: Path,
    probe: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: HiddenStateStream,
) -> None:
    """The checkpoint holds the stream's state, and is durable before the producer hears of it."""
    state = stream.state_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        parts = {"probe": probe.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**parts, "draftfeed": state}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    stream.committed(state)
