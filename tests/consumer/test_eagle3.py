"""EAGLE-3 by SpecForge from a live stream: on SmolLM2's states, real labels, real loss."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import tiny_target
from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.trainers import dflash, specforge_algorithms
from draftfeed_consumer.trainers.eagle3 import Eagle3Config
from draftfeed_consumer.trainers.specforge import train
from draftfeed_consumer.trainers.specforge_options import parse_options
from memory_stream import MemoryStream

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PASSES, SAMPLES = 4, 4
POSTNORM = msgspec.structs.replace(tiny_target.DESCRIPTOR, final="postnorm")


class Run(msgspec.Struct):
    trained: list[str]
    losses: list[float]
    acc: list[float]
    agreement: float
    config: dict[str, Any]
    out: Path


def _environment() -> dict[str, str]:
    triton = re.search(r"^TRITONS := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert triton
    path = [str(ROOT / ".venv/triton" / triton[1]), str(HERE)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="module")
def run(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("eagle3") / "out"
    command = [sys.executable, str(HERE / "eagle3_child.py"), str(smollm2_dir), str(out)]
    child = subprocess.run(
        [*command, str(PASSES)],
        env={**_environment(), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert child.returncode == 0, child.stderr
    return Run(**json.loads(child.stdout.splitlines()[-1]), out=out)


def test_loss_falls_over_a_stop_and_a_resume_and_each_sample_is_trained_once(
    run: Run, record_property: Callable[[str, object], None]
) -> None:
    expected = [
        f"0123456789abcdef/{epoch}/0/{ordinal}"
        for epoch in range(PASSES)
        for ordinal in range(SAMPLES)
    ]
    assert run.trained == expected
    first, last = (sum(part) / SAMPLES for part in (run.losses[:SAMPLES], run.losses[-SAMPLES:]))
    record_property("loss, first and last pass", f"{first:.2f}, {last:.2f}")
    assert last < first / 2, run.losses
    # An untrained drafter, or one that began anew, guesses none of the target's tokens.
    assert min(run.acc[-SAMPLES:]) > 0.2, run.acc


def test_labels_are_what_the_target_said(run: Run) -> None:
    """The head over the final state after the norm is the target's next token: a state before the
    norm, of another layer or of the row beside it gives other tokens."""
    assert run.agreement == 1.0


def test_specforge_exports_the_checkpoint_for_sglang(run: Run, tmp_path: Path) -> None:
    newest = sorted(path for path in run.out.iterdir() if path.is_dir())[-1]
    command = [str(Path(sys.executable).with_name("specforge")), "export", "--to", "sglang"]
    command += ["--checkpoint", str(newest), "--draft-config", str(run.out / "config.json")]
    child = subprocess.run(
        [*command, "--output-dir", str(tmp_path)],
        env=_environment(),
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    weights = load_file(tmp_path / "model.safetensors")
    trained = dflash.read_state(newest)["draft_state_dict"]
    assert torch.equal(weights["fc.weight"], trained["fc.weight"].to(weights["fc.weight"].dtype))
    exported = json.loads((tmp_path / "config.json").read_text())
    assert exported["eagle_config"] == run.config["eagle_config"]
    assert exported["draft_vocab_size"] == exported["vocab_size"]


def test_what_reads_dflash_drafters_says_that_this_is_none(run: Run) -> None:
    with pytest.raises(TrainerError, match="EAGLE-3 drafter; this is for DFlash"):
        dflash.load_config(run.out)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"final": "none"}, "has final = 'none'"),
        ({"final": "prenorm"}, "has final = 'prenorm'"),
        (
            {"layer_ids": (1, 2, 3, 4, 5)},
            r"has \[1, 2, 3, 4, 5\]; EAGLE-3 usually takes \[1, 2, 2\]",
        ),
    ],
)
def test_a_stream_without_what_eagle3_reads_is_refused_before_a_sample_is_taken(
    tiny_target_dir: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    stream = MemoryStream(msgspec.structs.replace(POSTNORM, **change), tiny_target.items(2))
    run = tiny_target.run(tiny_target_dir, tmp_path)
    with pytest.raises(TrainerError, match=reason) as caught:
        train(stream, msgspec.structs.replace(run, options={"algorithm": "eagle3"}))
    assert "\n" not in str(caught.value)
    assert not stream.held


def test_options_of_the_other_algorithm_are_refused() -> None:
    with pytest.raises(TrainerError, match=r"options\.block_size is for algorithm = 'dflash'"):
        parse_options({"algorithm": "eagle3", "block_size": 8})
    with pytest.raises(TrainerError, match=r"options\.ttt_length is for algorithm = 'eagle3'"):
        parse_options({"ttt_length": 3})


def algorithm() -> specforge_algorithms.Algorithm:
    return specforge_algorithms.make(
        Eagle3Config(
            layer_ids=tiny_target.LAYER_IDS,
            num_target_layers=tiny_target.LAYERS,
            architecture={},
            ttt_length=1,
            seed=0,
            dtype="float32",
        )
    )


def test_the_last_row_has_no_label_and_padding_no_weight() -> None:
    """Off by one here trains a row on the state of another sample, or of none."""
    samples = []
    for rows in (12, 20):
        item = tiny_target.item(rows, rows)
        item["final_states"] = torch.randn(rows, tiny_target.HIDDEN).half()
        samples.append(algorithm().tensors(item))
    assert [tuple(sample["loss_mask"].shape) for sample in samples] == [(1, 12), (1, 20)]
    assert all(sample["loss_mask"][0, -1] == 0 for sample in samples)
    assert all(sample["loss_mask"][0, -2] == 1 for sample in samples)
    batch = algorithm().collate(samples)
    assert batch["hidden_state"].shape == (2, 20, 3 * tiny_target.HIDDEN)
    assert batch["target"].shape == (2, 20, tiny_target.HIDDEN)
    assert torch.equal(batch["target"][0, :12], samples[0]["target"][0])
    for name in ("attention_mask", "loss_mask", "target", "hidden_state"):
        assert not batch[name][0, 12:].any(), name


def test_a_response_of_one_token_teaches_nothing() -> None:
    item = tiny_target.item(0, rows=5, prompt_tokens=5)
    assert algorithm().fault(item)
    item = tiny_target.item(0, rows=6, prompt_tokens=4)
    assert not algorithm().fault(item)
