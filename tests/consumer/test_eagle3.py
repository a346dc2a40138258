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
from draftfeed_consumer.trainers import TrainerRun, dflash, specforge_algorithms
from draftfeed_consumer.trainers.eagle3 import Eagle3Config
from draftfeed_consumer.trainers.specforge import check, expectation, train
from draftfeed_consumer.trainers.specforge_checkpoints import latest_checkpoint
from draftfeed_consumer.trainers.specforge_options import parse_options
from draftfeed_proto.descriptor import Expectation
from draftfeed_proto.errors import DescriptorMismatch
from memory_stream import MemoryStream, sample_id

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PASSES, SAMPLES = 4, 4
POSTNORM = msgspec.structs.replace(tiny_target.DESCRIPTOR, final="postnorm")


class Run(msgspec.Struct):
    trained: list[str]
    losses: list[float]
    acc: list[float]
    misaligned: list[str]
    config: dict[str, Any]
    out: Path


def _triton() -> str:
    version = re.search(r"^TRITONS := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert version
    return str(ROOT / ".venv/triton" / version[1])


def _environment() -> dict[str, str]:
    path = [_triton(), str(HERE)]
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


def test_each_row_learns_what_the_target_said_two_tokens_on(run: Run) -> None:
    """A final state before the norm, tokens or states that are one off, layers in another order:
    same shapes, a loss that falls, and a drafter that learns something else."""
    assert run.misaligned == []


def test_killed_in_a_step_and_resumed_every_sample_is_in_the_checkpoint_once(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    environment = {**_environment(), "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(HERE / "train_child.py"), str(tiny_target_dir), str(out)]

    def child(kill_at: int) -> int:
        arguments = [*command, str(kill_at), "12", "eagle3"]
        return subprocess.run(arguments, env=environment, timeout=140).returncode

    assert child(kill_at=4) == -9  # in step 4 of 6, with a checkpoint of step 2
    assert child(kill_at=0) == 0
    newest = latest_checkpoint(out)
    assert newest is not None
    last = dflash.read_state(newest)
    assert sorted(last["draftfeed"]["trained"]) == sorted(str(sample_id(n)) for n in range(12))
    acks = [json.loads(line) for line in (out / "acks.jsonl").read_text().splitlines()]
    assert [ack["step"] for ack in acks] == [1, 2, 3, 4, 3, 4, 5, 6]
    lineage = [id for ack in [*acks[:2], *acks[4:]] for id in ack["ids"]]
    assert sorted(lineage) == sorted(set(lineage))


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


@pytest.fixture
def eagle3_run(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TrainerRun:
    monkeypatch.syspath_prepend(_triton())
    run = tiny_target.run(tiny_target_dir, tmp_path)
    return msgspec.structs.replace(run, options={"algorithm": "eagle3"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"final": "none"}, "has final = 'none'"),
        ({"final": "prenorm"}, "has final = 'prenorm'"),
        ({"layer_ids": (1, 2, 3, 4)}, r"reads 3 layers, and these are \[1, 2, 3, 4\]: set"),
    ],
)
def test_a_stream_without_what_eagle3_reads_is_refused_before_a_sample_is_taken(
    eagle3_run: TrainerRun, change: dict[str, Any], reason: str
) -> None:
    stream = MemoryStream(msgspec.structs.replace(POSTNORM, **change), tiny_target.items(2))
    with pytest.raises(TrainerError, match=reason) as caught:
        train(stream, eagle3_run)
    assert "\n" not in str(caught.value)
    assert not stream.held


def test_what_eagle3_needs_is_expected_of_the_producers(eagle3_run: TrainerRun) -> None:
    """They refuse another stream before they take it from the node that trains now."""
    expect = expectation(eagle3_run, Expectation(layer_ids=tiny_target.LAYER_IDS))
    assert expect == Expectation(
        layer_ids=tiny_target.LAYER_IDS,
        final="postnorm",
        hidden_size=tiny_target.HIDDEN,
        vocab_size=tiny_target.VOCAB,
        num_layers=tiny_target.LAYERS,
    )
    expect.check(POSTNORM)
    with pytest.raises(DescriptorMismatch, match="final"):
        expect.check(tiny_target.DESCRIPTOR)


@pytest.mark.parametrize(
    ("expect", "reason"),
    [
        (Expectation(), r"name them in \[expect\] layer_ids"),
        (Expectation(layer_ids=(1, 2)), r"reads 3 layers, and these are \[1, 2\]"),
        (Expectation(layer_ids=(1, 2, 4), final="none"), "final is 'none', and this trainer needs"),
        (Expectation(layer_ids=(1, 2, 4), hidden_size=7), "hidden_size is 7, and this trainer"),
    ],
)
def test_an_expectation_that_cannot_be_is_one_line(
    eagle3_run: TrainerRun, expect: Expectation, reason: str
) -> None:
    with pytest.raises(TrainerError, match=reason) as caught:
        expectation(eagle3_run, expect)
    assert "\n" not in str(caught.value)


def test_without_triton_it_is_said_before_a_stream_is_taken(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    run = tiny_target.run(tiny_target_dir, tmp_path)
    with pytest.raises(TrainerError, match=r"needs Triton, .* run: pip install triton"):
        check(msgspec.structs.replace(run, options={"algorithm": "eagle3"}))


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
