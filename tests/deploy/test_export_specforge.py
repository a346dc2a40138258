"""SpecForge 0.2.0 trains on what `draftfeed export` writes, by its own command, on the CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from specforge.algorithms.common.dflash_family_data import normalize_offline_sample
from specforge.modeling.draft.dflash import extract_context_feature
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
from transformers import AutoModelForCausalLM

import export_spool
from draftfeed_consumer.trainers import TrainerRun
from draftfeed_consumer.trainers.dflash import build_drafter
from draftfeed_consumer.trainers.specforge import draft_config
from draftfeed_deploy.cli import main
from draftfeed_proto.sample import Sample
from export_spool import LAYER_IDS

pytestmark = pytest.mark.timeout(300)

STEPS = 40


class Made(NamedTuple):
    target: Path
    files: Path
    samples: list[Sample]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("specforge")
    target = export_spool.make_target(folder / "target")
    samples = export_spool.fill(folder / "spool", target, LAYER_IDS, count=32)
    files = folder / "files"
    arguments = ["export", "--from", str(folder / "spool"), "--format", "specforge", str(files)]
    assert main(arguments) == 0
    return Made(target, files, samples)


@pytest.fixture(scope="module")
def loaded(made: Made) -> list[dict[str, torch.Tensor]]:
    """What SpecForge's own reader and loader make of the files."""
    keys = ("input_ids", "loss_mask", "hidden_states")
    reader = OfflineManifestReader(str(made.files), feature_keys=keys, validate_files=True)
    paths = [ref.feature_store_uri.removeprefix("file://") for ref in reader]
    return [normalize_offline_sample(load_feature_file(path), 512) for path in paths]


def test_ids_and_mask_are_the_captured_ones(
    made: Made, loaded: list[dict[str, torch.Tensor]]
) -> None:
    assert len(loaded) == 32
    for sample, tensors in zip(made.samples, loaded, strict=True):
        assert tensors["input_ids"].tolist() == [sample.input_ids[:-1].tolist()]
        assert tensors["loss_mask"].tolist() == [sample.loss_mask[:-1].tolist()]


@pytest.fixture(scope="module")
def outputs(made: Made) -> Any:
    """The target's `hidden_states`, by transformers, for a list of ids."""
    model: Any = AutoModelForCausalLM.from_pretrained(made.target, dtype=torch.float32).eval()

    def run(input_ids: torch.Tensor) -> Any:
        with torch.no_grad():
            return model(input_ids, output_hidden_states=True).hidden_states

    return run


def test_layers_are_those_that_specforge_reads_while_decoding(
    made: Made, loaded: list[dict[str, torch.Tensor]], outputs: Any
) -> None:
    """Layer ids shifted by one between tools: same shape, no error, a drafter that never learns.

    SpecForge takes its context from transformers' tuple by the ids in the drafter's config. What it
    finds there must be what it was trained on, and must not be if ids are one off.
    """
    note = json.loads((made.files / "draftfeed.json").read_text())
    ids = note["layer_ids"][:-1]  # the tuple has the last one after the final norm
    width = len(ids) * 64
    for tensors in loaded[:4]:
        states = outputs(tensors["input_ids"])
        trained = tensors["hidden_states"][..., :width].float()
        assert distance(trained, extract_context_feature(states, ids)) < 0.01
        assert distance(trained, extract_context_feature(states, [k + 1 for k in ids])) > 0.1


def test_a_drafter_that_sees_one_layer_sees_that_layer(
    made: Made, loaded: list[dict[str, torch.Tensor]], outputs: Any
) -> None:
    """Layers in another order: same shape, no error. `fc` lets one through, and says which."""
    config = draft_config(run_of(made), LAYER_IDS)
    drafter = build_drafter(config, made.target)
    tensors = loaded[3]
    states = outputs(tensors["input_ids"])
    for place, layer in enumerate(LAYER_IDS[:-1]):
        with torch.no_grad():
            drafter.fc.weight.zero_()
            drafter.fc.weight[:, place * 64 : (place + 1) * 64] = torch.eye(64)
            seen = drafter.fc(tensors["hidden_states"].float())
        assert distance(seen, states[layer + 1]) < 0.01


def test_specforge_trains_on_the_files_and_its_loss_falls(
    made: Made, tmp_path: Path, record_property: Any
) -> None:
    draft, recipe = tmp_path / "draft.json", tmp_path / "recipe.json"
    draft.write_text(json.dumps(draft_config(run_of(made), LAYER_IDS).to_specforge()))
    settings = {
        "model": {"target_model_path": str(made.target), "draft_model_config": str(draft)},
        "data": {
            "hidden_states_path": str(made.files),
            "max_length": 512,
            "dataloader_num_workers": 0,
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {
            "strategy": "dflash",
            "num_epochs": STEPS,
            "max_steps": STEPS,
            "batch_size": 8,
            "learning_rate": 0.01,
            "attention_backend": "sdpa",
            "num_anchors": 8,
            "log_interval": 1,
            "fsdp_sharding": "NO_SHARD",
        },
        "run_id": "tiny",
        "output_dir": str(tmp_path / "out"),
        "deployment": {"mode": "local_colocated", "trainer": {"nnodes": 1, "nproc_per_node": 1}},
    }
    recipe.write_text(json.dumps(settings))
    ended = subprocess.run(
        [sys.executable, "-m", "specforge.cli", "train", "-c", str(recipe)],
        env={**os.environ, "SPECFORGE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': ([\d.]+)", ended.stdout)]
    assert len(losses) == STEPS
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    record_property("loss of the first five steps and of the last", f"{first:.2f}, {last:.2f}")
    assert last < 0.8 * first


def run_of(made: Made) -> TrainerRun:
    options = {"mask_token_id": 1, "num_anchors": 8, "block_size": 4}
    return TrainerRun(target=made.target, output_dir=made.files, options=options)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2."""
    return float((a - b).norm() / b.norm())
