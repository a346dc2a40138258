"""Trainers of files, by their own commands, on SmolLM2's states as the engine captured them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import export_spool
import smollm2_samples
from draftfeed_consumer.trainers import TrainerRun
from draftfeed_consumer.trainers.specforge import draft_config
from draftfeed_deploy.cli import main

pytestmark = pytest.mark.timeout(600)

LAYER_IDS = (1, 14, 26, 29)
"""EAGLE-3's, and the last block for labels."""
SAMPLES = 8


class Made(NamedTuple):
    target: Path
    specforge: Path
    speculators: Path


@pytest.fixture(scope="module")
def made(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("smollm2")
    spool = folder / "spool"
    texts = smollm2_samples.PROMPTS
    export_spool.fill(spool, smollm2_dir, LAYER_IDS, SAMPLES, new_tokens=16, texts=texts)
    made = Made(smollm2_dir, folder / "specforge", folder / "speculators")
    for files in made[1:]:
        command = ["export", "--from", str(spool), "--format", files.name, str(files)]
        assert main(command) == 0
    return made


def losses_fall(said: str, pattern: str, steps: int) -> str:
    """In words. The last ones are of samples that were trained on before."""
    losses = [float(loss) for loss in re.findall(pattern, said)]
    assert len(losses) >= steps, said
    first, last = sum(losses[:2]) / 2, sum(losses[-2:]) / 2
    assert last < 0.8 * first, losses
    return f"{first:.2f}, {last:.2f}"


def run(command: list[object], **environment: str) -> str:
    ended = subprocess.run(
        [str(part) for part in (sys.executable, "-m", *command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_specforge_learns_dflash(
    made: Made, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    draft, recipe = tmp_path / "draft.json", tmp_path / "recipe.json"
    options = {"num_anchors": 8, "block_size": 4, "init": "target"}
    training = TrainerRun(target=made.target, output_dir=tmp_path, options=options)
    draft.write_text(json.dumps(draft_config(training, LAYER_IDS).to_specforge()))
    steps = 8
    settings = {
        "model": {"target_model_path": str(made.target), "draft_model_config": str(draft)},
        "data": {
            "hidden_states_path": str(made.specforge),
            "max_length": 128,
            "dataloader_num_workers": 0,
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {
            "strategy": "dflash",
            "num_epochs": 8,
            "max_steps": steps,
            "batch_size": 4,
            "learning_rate": 0.002,
            "attention_backend": "sdpa",
            "num_anchors": 8,
            "log_interval": 1,
            "fsdp_sharding": "NO_SHARD",
        },
        "run_id": "smollm2",
        "output_dir": str(tmp_path / "out"),
        "deployment": {"mode": "local_colocated", "trainer": {"nnodes": 1, "nproc_per_node": 1}},
    }
    recipe.write_text(json.dumps(settings))
    said = run(["specforge.cli", "train", "-c", recipe], SPECFORGE_DEVICE="cpu")
    words = losses_fall(said, r"'loss': ([\d.]+)", steps)
    record_property("loss of the first two steps and of the last", words)


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_speculators_learns(
    made: Made, kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    steps = 8
    dflash = [
        *("--block-size", "4", "--mask-token-id", "16", "--max-anchors", "16"),
        *("--full-attention-indices", "0"),
    ]
    said = run(
        [
            "draftfeed_consumer.trainers.speculators",
            *("--hidden-states-backend", "draftfeed", "--data-path", made.speculators),
            *("--verifier-name-or-path", made.target, "--target-layer-ids", "2", "15", "27"),
            *(
                "--speculator-type",
                kind,
                "--num-layers",
                "1",
                *(dflash if kind == "dflash" else []),
            ),
            *("--total-seq-len", "256", "--num-workers", "0", "--on-missing", "raise"),
            *("--epochs", "8", "--max-steps", steps, "--log-freq", "1", "--lr", "0.003"),
            *("--optimizer", "adamw", "--draft-attn-impl", "sdpa", "--loss-implementation"),
            *("eager", "--checkpoint-freq", "100", "--save-path", tmp_path / "out"),
            *("--log-dir", tmp_path / "logs", "--hidden-states-dtype", "float32"),
        ]
    )
    words = losses_fall(said, r"train/loss=([\d.e+-]+)", steps)
    record_property("loss of the first two steps and of the last", words)
