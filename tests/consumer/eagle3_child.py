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
from draftfeed_consumer.trainers.eagle3 import Eagle3Config, build_training_model
from draftfeed_consumer.trainers.specforge import train
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


def agreement(out: Path, target: Path, items: list[Item]) -> float:
    """Share of rows whose label, by SpecForge's head over the final state, is the token that the
    target said, which was greedy."""
    config = msgspec.json.decode((out / "drafter.json").read_bytes(), type=Eagle3Config)
    _, head = build_training_model(config, target)
    said = agreed = 0
    for item in items:
        labels = head(item["final_states"].float()).argmax(-1)
        of_response = item["loss_mask"][1:].bool()
        said += int(of_response.sum())
        agreed += int((labels == item["input_ids"][1:])[of_response].sum())
    return agreed / said


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
        "agreement": agreement(out, Path(target), items),
        "config": json.loads((out / "config.json").read_text()),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
