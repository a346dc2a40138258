"""speculators 0.9.0 trains on what `draftfeed export` writes, through our backend, on the CPU."""

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hs_connectors import FileTransfer, HiddenStatesBackend
from speculators import DFlashDraftModel
from speculators.convert.dflash.converter import DFlashConverter
from speculators.train.cli import create_transformer_layer_config
from speculators.train.data import ArrowDataset
from transformers import AutoModelForCausalLM

import export_spool
import tiny_models
from draftfeed_consumer.errors import ExportError
from draftfeed_consumer.trainers import speculators
from draftfeed_consumer.trainers.speculators_backend import ExportTransfer
from draftfeed_deploy.cli import main
from draftfeed_proto.descriptor import Final
from draftfeed_proto.sample import Sample
from export_spool import LAYER_IDS

# The first test on a machine makes the SmolLM2 directory, which takes half a minute or more.
pytestmark = pytest.mark.timeout(300)

STEPS = 36


class Made(NamedTuple):
    target: Path
    files: Path
    samples: list[Sample]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("speculators")
    return make(folder, export_spool.make_target(folder / "target"), LAYER_IDS, count=40)


def make(
    folder: Path, target: Path, layer_ids: tuple[int, ...], count: int, final: Final = "none"
) -> Made:
    samples = export_spool.fill(folder / "spool", target, layer_ids, count, final=final)
    files = folder / "files"
    arguments = ["export", "--from", str(folder / "spool"), "--format", "speculators", str(files)]
    if final != "none":  # of prenorm it is checked, of postnorm undone
        arguments += ["--target", str(target)]
    assert main(arguments) == 0
    return Made(target, files, samples)


def drafter(made: Made, layer_ids: list[int]) -> Any:
    decoder = create_transformer_layer_config(
        str(made.target), 1, "qwen3", None, sliding_window=2048, full_attention_indices=[0]
    )
    make_model: Any = DFlashDraftModel.from_training_args
    return make_model(
        decoder,
        draft_vocab_size=decoder.vocab_size,
        block_size=4,
        mask_token_id=1,
        target_layer_ids=layer_ids,
        verifier_name_or_path=str(made.target),
        draft_attn_impl="sdpa",
    )


def dataset(made: Made) -> Any:
    transfer = pickle.loads(pickle.dumps(transfer_of(made)))  # as it goes to a loader's process
    return ArrowDataset(512, made.files, transfer=transfer, on_missing="raise")


def transfer_of(made: Made, **options: object) -> Any:
    """As speculators makes it from its arguments."""
    arguments = {
        "verifier_name_or_path": str(made.target),
        "trust_remote_code": False,
        "target_layer_ids": [1, 3, 4],
        "from_pretrained": "",
        "speculator_type": "dflash",
        "data_path": str(made.files),
        **options,
    }
    backend = HiddenStatesBackend.registry["draftfeed"]
    return backend.from_train_args(argparse.Namespace(**arguments), str(arguments["data_path"]))


def forward(target: Path, input_ids: torch.Tensor) -> Any:
    """What transformers makes of one sequence."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids[None], output_hidden_states=True)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2."""
    return float((a - b).norm() / b.norm())


def test_ids_and_mask_are_the_captured_ones(made: Made) -> None:
    read = dataset(made)
    assert len(read) == 40
    for index, sample in enumerate(made.samples):
        item = read[index]
        assert item["input_ids"].tolist() == sample.input_ids[:-1].tolist()
        assert item["loss_mask"].tolist() == sample.loss_mask[:-1].tolist()
        assert item["hidden_states"].shape == (len(sample.hidden_states), 3 * 64)


def test_the_file_backend_of_speculators_reads_the_same(made: Made) -> None:
    theirs = FileTransfer(made.files / "hidden_states").get_cached(7)
    ours = transfer_of(made).get_cached(7)
    assert theirs is not None
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)


def test_a_drafter_that_sees_one_layer_sees_the_layer_of_that_id(made: Made) -> None:
    """Layer ids shifted by one between tools: same shape, no error, a drafter that never learns.

    A layer id of speculators is an index of transformers' `hidden_states`: this is what it says
    itself when it takes over a drafter whose ids count as ours do.
    """
    named = {"dflash_config": {"target_layer_ids": list(LAYER_IDS), "mask_token_id": 1}}
    converted: Any = DFlashConverter()._build_config(
        {"block_size": 4, "vocab_size": 512, "hidden_size": 64, "model_type": "qwen3", **named},
        str(made.target),
        None,
    )
    note = json.loads((made.files / "draftfeed.json").read_text())
    ids = converted.aux_hidden_state_layer_ids
    assert ids == note["layer_ids"] == [1, 3, 4]
    item, model = dataset(made)[3], drafter(made, ids)
    states = forward(made.target, item["input_ids"]).hidden_states
    for place, layer in enumerate(ids):
        with torch.no_grad():
            model.fc.weight.zero_()
            model.fc.weight[:, place * 64 : (place + 1) * 64] = torch.eye(64)
            seen = model.fc(item["hidden_states"].float())
        assert distance(seen, states[layer][0]) < 0.01
        assert distance(seen, states[layer - 1][0]) > 0.1


FINALS: tuple[Final, ...] = ("none", "prenorm", "postnorm")
LABELLED = [(model, final) for model in ("qwen3", "qwen35", "smollm2") for final in FINALS]


@pytest.fixture(scope="module", params=LABELLED, ids="-".join)
def labelled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of norms that multiply by w, by 1 + w, and of a real model; where the last block is tapped
    as a layer, comes as the final state, and is computed from what the norm made of it."""
    model, final = request.param
    folder = tmp_path_factory.mktemp(f"{model}-{final}")
    if model == "smollm2":
        target, layer_ids = request.getfixturevalue("smollm2_dir"), (1, 14, 27, 29)
    elif model == "qwen35":
        target = export_spool.make_target(folder / "target", tiny_models.make_qwen35)
        layer_ids = (1, 3, 4, 7)
    else:
        target, layer_ids = export_spool.make_target(folder / "target"), LAYER_IDS
    return make(folder, target, layer_ids if final == "none" else layer_ids[:-1], 2, final)


def test_labels_are_computed_from_the_state_before_the_final_norm(
    labelled: Made, record_property: Any
) -> None:
    """Pre-norm and post-norm final state mixed up: same shape, no error, other labels."""
    read: Any = ArrowDataset(512, labelled.files, transfer=ExportTransfer(labelled.files))
    item = read[1]
    note = json.loads((labelled.files / "draftfeed.json").read_text())
    model = drafter(labelled, note["layer_ids"])
    output = forward(labelled.target, item["input_ids"])

    def logits(final: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.verifier_lm_head(model.verifier_norm(final.float()))

    targets = output.logits[0]
    off = distance(logits(item["verifier_last_hidden_states"]), targets)
    record_property("labels' relative L2", f"{off:.1e}")
    assert off < 0.01
    after_norm = output.hidden_states[-1][0]
    assert distance(logits(after_norm), targets) > 0.1


def test_speculators_trains_on_the_export_and_its_loss_falls(
    made: Made, tmp_path: Path, record_property: Any
) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "draftfeed_consumer.trainers.speculators"),
            *("--hidden-states-backend", "draftfeed", "--data-path", made.files),
            *("--verifier-name-or-path", made.target, "--target-layer-ids", "1", "3", "4"),
            *("--speculator-type", "dflash", "--num-layers", "1", "--block-size", "4"),
            *("--mask-token-id", "1", "--max-anchors", "32", "--full-attention-indices", "0"),
            *("--total-seq-len", "128", "--num-workers", "0", "--on-missing", "raise"),
            *("--epochs", "9", "--max-steps", str(STEPS), "--log-freq", "1", "--lr", "0.01"),
            *("--optimizer", "adamw", "--draft-attn-impl", "sdpa", "--loss-implementation"),
            *("eager", "--checkpoint-freq", "100", "--save-path", tmp_path / "out"),
            *("--log-dir", tmp_path / "logs", "--hidden-states-dtype", "float32"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout + ended.stderr
    losses = [float(loss) for loss in re.findall(r"train/loss=([\d.e+-]+)", said)]
    assert len(losses) >= STEPS  # it ends with an epoch
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    record_property("loss of the first five steps and of the last", f"{first:.2f}, {last:.2f}")
    assert last < 0.8 * first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_layer_ids": [0, 2, 3]}, r"is to read layers 0 2 3, and .* 1 3 4"),
        ({"target_layer_ids": [1, 4, 3]}, "is to read layers 1 4 3"),
        ({"target_layer_ids": None}, "is to read those of no layers"),
        ({"data_path": "/nowhere"}, "/nowhere is not what `draftfeed export` makes"),
    ],
)
def test_an_export_of_other_layers_is_refused(
    made: Made, options: dict[str, object], words: str
) -> None:
    """Ids from a default, or as another tool counts them: the shape is the same."""
    with pytest.raises(ExportError, match=words):
        transfer_of(made, **options)


def test_a_drafter_that_was_trained_on_other_layers_is_refused(made: Made, tmp_path: Path) -> None:
    """Its config.json decides, whatever is asked for."""
    config = {"model_type": "qwen3", "aux_hidden_state_layer_ids": [1, 3, 5]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="is to read layers 1 3 5"):
        transfer_of(made, from_pretrained=str(tmp_path))
    config["aux_hidden_state_layer_ids"] = [1, 3, 4]
    (tmp_path / "config.json").write_text(json.dumps(config))
    transfer_of(made, from_pretrained=str(tmp_path), target_layer_ids=None)


def test_another_verifier_is_refused(made: Made, tmp_path: Path) -> None:
    config = json.loads((made.target / "config.json").read_text())
    config["num_hidden_layers"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": None}))
    with pytest.raises(ExportError, match=r"has num_hidden_layers 7, and .* which has 6"):
        transfer_of(made, verifier_name_or_path=str(tmp_path))


def test_a_file_that_is_missing_or_cut_is_an_error_and_asks_no_server(
    made: Made, tmp_path: Path
) -> None:
    """A reader sees a half-written sample. speculators would go on, or ask vLLM for another."""
    transfer = ExportTransfer(tmp_path)
    with pytest.raises(ExportError, match=r"hs_3\.safetensors cannot be read"):
        transfer.get_cached(3)
    (tmp_path / "hidden_states").mkdir()
    whole = (made.files / "hidden_states/hs_3.safetensors").read_bytes()
    (tmp_path / "hidden_states/hs_3.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ExportError, match=r"hs_3\.safetensors cannot be read"):
        transfer.get_cached(3)
    with pytest.raises(ExportError, match="no server makes hidden states"):
        transfer.get_generated({})


def test_what_cannot_be_trained_on_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculators, "VERSION", "0.8.9")
    assert speculators.main([]) == 2
    assert "draftfeed: works with speculators 0.8.9, found 0.9.0" in capsys.readouterr().err
