"""A drafter as others load it: the same weights, the same layers, and errors in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import smollm2_samples
import tiny_target
from draftfeed_consumer import drafter_files
from draftfeed_consumer.errors import DrafterError
from draftfeed_consumer.trainers import dflash
from draftfeed_consumer.trainers.specforge import train
from draftfeed_consumer.trainers.specforge_checkpoints import STATE_FILE
from memory_stream import MemoryStream

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's output_dir with two checkpoints."""
    out = tmp_path_factory.mktemp("drafter")
    run = tiny_target.run(tiny_target_dir, out, num_layers=2, save_interval_steps=4)
    train(MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(6)), run)
    return out


@pytest.fixture
def exported(trained: Path, tmp_path: Path) -> Path:
    out = tmp_path / "exported"
    out.mkdir()
    drafter_files.export(drafter_files.read(trained), out, "float32")
    return out


def on_one_input(drafter: Any) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return drafter.eval()(
            target_hidden=torch.randn(1, 7, drafter.fc.in_features, generator=random),
            noise_embedding=torch.randn(1, 4, tiny_target.HIDDEN, generator=random),
            position_ids=torch.arange(11)[None],
            is_causal=False,
        )


def test_a_run_means_its_newest_checkpoint(trained: Path) -> None:
    newest = drafter_files.read(trained)
    assert newest.path.name == "drafter-1.2-step6"
    older = drafter_files.read(trained / "drafter-1.1-step4")
    assert not torch.equal(older.weights["fc.weight"], newest.weights["fc.weight"])
    assert older.layer_ids == newest.layer_ids == tiny_target.LAYER_IDS


def test_specforge_loads_the_export_as_the_drafter_that_was_trained(
    trained: Path, exported: Path, tiny_target_dir: Path
) -> None:
    training = dflash.build_training_model(dflash.load_config(trained), tiny_target_dir).draft_model
    untrained = on_one_input(training)
    dflash.load_weights(training, drafter_files.read(trained).path)
    expected = on_one_input(training)
    assert not torch.equal(expected, untrained)
    theirs: Any = dflash.DFlashDraftModel
    loaded, report = theirs.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.block_size == 4
    assert loaded.mask_token_id == 3
    assert torch.equal(on_one_input(loaded), expected)
    assert torch.equal(on_one_input(drafter_files.load(drafter_files.read(exported))), expected)


def test_specforge_reads_the_layers_that_the_stream_carried(
    exported: Path, tiny_target_dir: Path
) -> None:
    """By the states that its inference picks: shifted ids have the same shape."""
    from specforge.modeling.draft.dflash import extract_context_feature

    theirs: Any = dflash.DFlashDraftModel
    loaded = theirs.from_pretrained(exported)
    states, hidden_states = states_of(tiny_target_dir)
    picked = extract_context_feature(hidden_states, loaded.target_layer_ids)
    torch.testing.assert_close(picked[0], states.flatten(1))
    shifted = [layer + 1 for layer in loaded.target_layer_ids]
    wrong = extract_context_feature(hidden_states, shifted)[0]
    assert (wrong - states.flatten(1)).norm() > 0.1 * states.norm()


def test_speculators_converts_the_export(
    exported: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Its ids name transformers' hidden states, of which the first is the embedding."""
    pytest.importorskip("speculators", reason="speculators is not installed")
    from speculators.convert.dflash import DFlashConverter
    from speculators.models.dflash import DFlashDraftModel

    DFlashConverter().convert(exported, tmp_path / "converted", base_model=str(tiny_target_dir))
    loaded = DFlashDraftModel.from_pretrained(str(tmp_path / "converted"))
    ours = drafter_files.read(exported)
    theirs = loaded.state_dict()
    for name, tensor in ours.weights.items():
        assert torch.equal(theirs[name], tensor), name
    assert loaded.block_size == 4
    assert loaded.mask_token_id == 3
    states, hidden_states = states_of(tiny_target_dir)
    picked = torch.cat([hidden_states[id] for id in loaded.target_layer_ids], dim=-1)
    torch.testing.assert_close(picked[0], states.flatten(1))


def states_of(target: Path) -> tuple[torch.Tensor, Any]:
    """[n, L, H] as the stream carries them, and transformers' hidden states of the same ids."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = torch.arange(5, 25)
    with torch.no_grad():
        outputs = model(ids[None], output_hidden_states=True).hidden_states
        return smollm2_samples.forward_states(model, ids, tiny_target.LAYER_IDS), outputs


def test_the_config_has_the_fields_of_published_drafters(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_bytes())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == 4
    assert config["num_target_layers"] == tiny_target.LAYERS
    assert config["num_hidden_layers"] == 2
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [1, 2, 4]}
    assert config["dtype"] == "float32"
    assert {path.name for path in exported.iterdir()} == {"config.json", "model.safetensors"}


def test_weights_are_served_in_bfloat16(trained: Path, tmp_path: Path) -> None:
    drafter = drafter_files.read(trained)
    drafter_files.export(drafter, tmp_path, "bfloat16")
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == drafter.weights.keys()
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert torch.equal(weights["fc.weight"], drafter.weights["fc.weight"].bfloat16())
    assert json.loads((tmp_path / "config.json").read_bytes())["dtype"] == "bfloat16"


def test_a_block_size_inside_dflash_config_is_found(exported: Path) -> None:
    """Where the newer of z-lab's drafters have it."""
    edit(
        exported, lambda config: config["dflash_config"].update(block_size=config.pop("block_size"))
    )
    assert drafter_files.load(drafter_files.read(exported)).block_size == 4


def edit(drafter: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = drafter / "config.json"
    config = json.loads(path.read_bytes())
    change(config)
    path.write_text(json.dumps(config))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_weight(drafter: Path) -> None:
    from safetensors.torch import save_file

    weights = load_file(drafter / "model.safetensors")
    del weights["norm.weight"]
    save_file(weights, drafter / "model.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights cut short": (
        lambda path: cut(path / "model.safetensors"),
        "model.safetensors cannot be read",
    ),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "is no drafter"),
    "a weight is missing": (without_weight, "its weights do not fit its config: Missing key"),
    "no config": (lambda path: (path / "config.json").unlink(), "is no drafter"),
    "config cut short": (lambda path: cut(path / "config.json"), "config.json cannot be read"),
    "another model": (
        lambda path: edit(path, lambda config: config.update(architectures=["Qwen3ForCausalLM"])),
        "is not of a DFlashDraftModel",
    ),
    "no layers": (
        lambda path: edit(path, lambda config: config["dflash_config"].pop("target_layer_ids")),
        "has no target_layer_ids",
    ),
    "no block size": (
        lambda path: edit(path, lambda config: config.pop("block_size")),
        "has no block_size",
    ),
    "nonsense in the config": (
        lambda path: edit(path, lambda config: config.update(layer_types=["none"] * 2)),
        "SpecForge cannot use its config",
    ),
    "another shape": (
        lambda path: edit(path, lambda config: config.update(intermediate_size=80)),
        "its weights do not fit its config: size mismatch",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_one_line(exported: Path, damage: str) -> None:
    do, expected = DAMAGE[damage]
    do(exported)
    assert expected in line_of(exported)


def test_a_damaged_checkpoint_is_one_line(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert "is no drafter" in line_of(run)
    (run / "drafter.json").write_bytes((trained / "drafter.json").read_bytes())
    assert "has no complete checkpoint yet" in line_of(run)
    checkpoint = run / "drafter-1.2-step6"
    checkpoint.mkdir()
    torch.save({"global_step": 6}, checkpoint / STATE_FILE)
    assert "has no drafter in it" in line_of(run)
    source = trained / "drafter-1.2-step6" / STATE_FILE
    (checkpoint / STATE_FILE).write_bytes(source.read_bytes())
    assert drafter_files.read(run).path == checkpoint
    cut(checkpoint / STATE_FILE)
    assert "cannot be read as a checkpoint" in line_of(run)
    (checkpoint / STATE_FILE).write_bytes(source.read_bytes())
    (run / "drafter.json").write_text("{")
    assert "drafter.json is damaged" in line_of(run)
    (run / "drafter.json").unlink()
    assert "has no drafter.json" in line_of(checkpoint)


def line_of(drafter: Path) -> str:
    with pytest.raises(DrafterError) as caught:
        drafter_files.load(drafter_files.read(drafter))
    line = str(caught.value)
    assert "\n" not in line
    assert not line.startswith("[trainer]")
    return line


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", 64), ("vocab_size", 256), ("num_hidden_layers", 8)]
)
def test_another_targets_drafter_is_refused(
    trained: Path, tiny_target_dir: Path, tmp_path: Path, name: str, value: int
) -> None:
    drafter = drafter_files.read(trained)
    drafter_files.check_target(drafter, tiny_target_dir)
    config = json.loads((tiny_target_dir / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(DrafterError, match=f"is of another target.*{value}"):
        drafter_files.check_target(drafter, tmp_path)


def test_layers_that_the_target_does_not_have_are_refused(
    trained: Path, tiny_target_dir: Path
) -> None:
    drafter = drafter_files.read(trained)
    saved = dflash.load_config(trained)
    beyond = msgspec.structs.replace(saved, layer_ids=(1, tiny_target.LAYERS)).to_specforge()
    with pytest.raises(DrafterError, match=r"reads layers \(1, 6\), and .* has 6"):
        drafter_files.check_target(drafter._replace(config=beyond), tiny_target_dir)
