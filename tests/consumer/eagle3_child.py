"""Trains EAGLE-3 on SmolLM2's states, in two processes' worth of work: run by test_eagle3.

Its loss is a Triton kernel, which runs in Triton's interpreter here. That has to be said to Triton
before it is imported, hence a process of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

import smollm2_samples
from draftfeed_consumer.trainers import TrainerRun, specforge_hooks
from draftfeed_consumer.trainers.eagle3 import Eagle3Config
from draftfeed_consumer.trainers.specforge import train
from draftfeed_consumer.trainers.specforge_algorithms import Eagle3
from memory_stream import Item, MemoryStream, sample_id

LAYER_IDS = (1, 14, 26)
DESCRIPTOR = msgspec.structs.replace(
    smollm2_samples.DESCRIPTOR, layer_ids=LAYER_IDS, final="postnorm"
)
OPTIONS = {"algorithm": "eagle3", "ttt_length": 2, "learning_rate": 2e-3, "warmup_steps": 1}


def stretch(items: list[Item], passes: range) -> list[Item]:
    return [
        {**item, "id": sample_id(item["id"].ordinal, epoch)} for epoch in passes for item in items
    ]


def misaligned(out: Path, target: Path, items: list[Item]) -> list[str]:
    """What is not as it must be in the batches that SpecForge gets, which its own head shifts: the
    label of row t is what the target said after token t+1, which was greedy, and the drafter is
    given that token; the layers lie in their order.
    """
    config = msgspec.json.decode((out / "drafter.json").read_bytes(), type=Eagle3Config)
    algorithm = Eagle3(config)
    _, head = algorithm.build(target, "cpu")
    faults = []
    for item in items:
        tensors = algorithm.tensors(item)
        given, final, mask = head.preprocess(
            tensors["input_ids"], tensors["target"].float(), tensors["loss_mask"]
        )
        rows = mask[0, :, 0].nonzero()[:, 0]
        tokens = item["input_ids"].long()
        if not torch.equal(head(final)[0].argmax(-1)[rows], tokens[rows + 2]):
            faults.append(f"{item['key']}: labels are not what the target said")
        if not torch.equal(given[0, rows], tokens[rows + 1]):
            faults.append(f"{item['key']}: tokens are not those before the labels")
        layers = tensors["hidden_state"][0].unflatten(1, (len(LAYER_IDS), -1))
        if not torch.equal(layers, item["hidden_states"]):
            faults.append(f"{item['key']}: layers are not in their order")
        if len(rows) != int(item["loss_mask"].sum()) - 2:
            faults.append(f"{item['key']}: {len(rows)} labels")
    return faults


def main(target: str, output_dir: str, passes: str) -> None:
    assert specforge_hooks.torch is torch
    items = smollm2_samples.make_samples(
        Path(target), 8, smollm2_samples.PROMPTS[:4], layer_ids=LAYER_IDS
    )
    out, count = Path(output_dir), int(passes)
    streams = []
    for last in (count // 2, count):  # the second goes on from the first one's checkpoint
        options: dict[str, Any] = {**OPTIONS, "resume_from": "latest"}
        stream = MemoryStream(DESCRIPTOR, stretch(items, range(last)))
        run = TrainerRun(target=Path(target), output_dir=out, options=options, threads=2)
        train(stream, run)
        streams.append(stream)
    result = {
        "trained": [str(id) for stream in streams for id in stream.trained_ids],
        "losses": [step["loss"] for stream in streams for step in stream.metrics],
        "acc": [step["acc"] for stream in streams for step in stream.metrics],
        "misaligned": misaligned(out, Path(target), items),
        "config": json.loads((out / "config.json").read_text()),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
