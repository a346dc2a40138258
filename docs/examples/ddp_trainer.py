"""The loop of `custom_trainer.py` on several GPUs, with DistributedDataParallel.

    torchrun --standalone --nproc-per-node 8 --no-python \
        draftfeed consumer -c consumer.toml --set trainer.function=ddp_trainer:train

with this file's folder on PYTHONPATH. Each rank has samples of its own; gradients meet over NCCL
where there are GPUs and over gloo elsewhere. Any number of ranks, one included, can go on from the
checkpoint of any other number.

A rank that stays out of a step leaves the others waiting for its gradients for ever. So all agree
before each one, and whoever has no samples then takes part with a token of weight zero.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from draftfeed_consumer.checkpoints import Checkpoints
from draftfeed_consumer.collate import Collator
from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun

SAMPLES = 4  # of one rank in a step
SAVE_STEPS = 20
WIDTH = 64


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    served = stream.descriptor
    layers, hidden = len(served.layer_ids), served.hidden_size
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    device = pick_device()
    probe = torch.nn.Sequential(
        torch.nn.RMSNorm(layers * hidden),
        torch.nn.Linear(layers * hidden, WIDTH),
        torch.nn.Linear(WIDTH, served.vocab_size),
    ).to(device)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-3)
    checkpoints = Checkpoints(run.output_dir, stream, name="probe")
    step = 0
    if saved := checkpoints.load():  # the first rank chooses, all get the same
        probe.load_state_dict(saved["probe"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(probe) if ranks > 1 else probe

    collate = Collator(stream.release, mode="pack", dtype=torch.float32, device=device)
    nothing: dict[str, Any] = {
        "ids": [],
        "hidden_states": torch.zeros(1, 1, layers, hidden, device=device),
        "labels": torch.zeros(1, 1, dtype=torch.int64, device=device),
        "loss_mask": torch.zeros(1, 1, dtype=torch.bool, device=device),
    }
    while True:
        samples = stream.batch(SAMPLES)
        agreed = stream.agree(bool(samples))
        if agreed.step:
            batch = collate(samples) if samples else nothing
            logits = model(batch["hidden_states"].flatten(-2))
            losses = cross_entropy(logits[0], batch["labels"][0], reduction="none")
            response = batch["loss_mask"][0]
            # Every token weighs the same, whichever rank has it: divided by those of all ranks.
            loss = (losses * response).sum() / sum_over_ranks(response.sum()).clamp(min=1)
            optimizer.zero_grad()
            (loss * ranks).backward()  # gradients are averaged, and these parts are to be added
            optimizer.step()
            step += 1
            stream.trained(batch["ids"], step, {"loss": sum_over_ranks(loss).item()})
        if agreed.over or agreed.checkpoint or (agreed.step and step % SAVE_STEPS == 0):
            parts = {"probe": probe.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            checkpoints.save(parts)  # all call it, the first rank writes
        if agreed.over:
            return


def pick_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    total = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total
