"""A training loop of your own: one linear probe that predicts the next token from the taps.

    draftfeed consumer -c consumer.toml --set trainer.function=custom_trainer:train

with this file's folder on PYTHONPATH. Each sample counts once because of three calls:
`checkpoints.load`, `stream.trained` and `checkpoints.save`.
"""

import torch
from torch.nn.functional import cross_entropy

from draftfeed_consumer.checkpoints import Checkpoints
from draftfeed_consumer.collate import Collator, prefetch
from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun

SAMPLES = 4  # in a batch
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
    checkpoints = Checkpoints(run.output_dir, stream, name="probe")
    step = 0
    if saved := checkpoints.load():  # only what this one has not seen will come
        probe.load_state_dict(saved["probe"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    def save() -> None:
        parts = {"probe": probe.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        checkpoints.save(parts)

    def save_if_wanted() -> None:
        if stream.checkpoint_wanted:  # the producer asks: its disk is full, or it is long ago
            save()

    collate = Collator(stream.release, mode="pack", dtype=torch.float32)
    batches = prefetch(collate.batches(stream, SAMPLES), idle=save_if_wanted)
    for batch in batches:
        step += 1
        response = batch["loss_mask"]  # which labels are the target's own words
        logits = probe(batch["hidden_states"].flatten(-2)[response])
        loss = cross_entropy(logits, batch["labels"][response])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stream.trained(batch["ids"], step, {"loss": loss.item()})
        if step % SAVE_STEPS == 0 or stream.checkpoint_wanted:
            save()
    save()
