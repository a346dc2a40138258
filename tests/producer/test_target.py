import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import tiny_models
from draftfeed_producer.engines import SamplingConfig, TransformersConfig, make_engine
from draftfeed_producer.engines.transformers import TransformersEngine, resolve_dtype
from draftfeed_producer.errors import LayerIdError, ModelError
from draftfeed_producer.target import TargetConfig, check_layer_ids, load_target, weights_digest
from draftfeed_proto.descriptor import Final
from draftfeed_proto.errors import LimitExceeded


def load(path: Path, **config: object):
    return load_target(TargetConfig(path=str(path), **config))  # type: ignore[arg-type]


def copy_of(model: Path, path: Path) -> Path:
    shutil.copytree(model, path)
    return path


def test_descriptor_of_a_plain_model(tiny_qwen3: Path):
    target = load(tiny_qwen3)
    descriptor = target.descriptor((1, 3, 5))
    assert descriptor.model == "qwen3"
    assert descriptor.layer_ids == (1, 3, 5)
    assert (descriptor.num_layers, descriptor.hidden_size, descriptor.vocab_size) == (6, 512, 512)
    assert (descriptor.dtype, descriptor.final) == ("fp16", "none")
    assert target.max_positions == 512


def test_descriptor_of_a_model_inside_a_multimodal_wrapper(tiny_qwen35_multimodal: Path):
    target = load(tiny_qwen35_multimodal)
    descriptor = target.descriptor((0, 7))
    assert (descriptor.num_layers, descriptor.hidden_size, descriptor.vocab_size) == (8, 512, 512)
    assert target.max_positions == 512


def test_layer_ids_default_to_the_dflash_formula(tiny_qwen35: Path):
    assert load(tiny_qwen35).descriptor().layer_ids == (1, 2, 3, 4, 5)


def test_revision_is_that_of_the_configuration_then_the_snapshot_then_the_files(
    tiny_qwen3: Path, tmp_path: Path
):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / commit
    copy_of(tiny_qwen3, snapshot)
    assert (load(snapshot).name, load(snapshot).revision) == ("acme/tiny", commit)
    assert load(snapshot, name="n", revision="r").revision == "r"
    assert load(snapshot, name="n", revision="r").name == "n"
    assert load(tiny_qwen3).revision == weights_digest(tiny_qwen3)


def test_a_copy_has_the_same_identity(tiny_qwen3: Path, tmp_path: Path):
    copy = copy_of(tiny_qwen3, tmp_path / "qwen3")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}, indent=8))
    load(copy).tokenizer.save_pretrained(copy)
    assert load(copy).descriptor((1,)) == load(tiny_qwen3).descriptor((1,))


def test_other_weights_have_another_revision(tiny_qwen3: Path, tmp_path: Path):
    copy = copy_of(tiny_qwen3, tmp_path / "qwen3")
    weights = load_file(copy / "model.safetensors")
    save_file({k: w * 1.01 for k, w in weights.items()}, copy / "model.safetensors")
    assert load(copy).revision != load(tiny_qwen3).revision


def test_another_chat_template_or_vocabulary_is_another_hash(tiny_qwen3: Path, tmp_path: Path):
    plain = load(tiny_qwen3).descriptor((1,))
    copy = copy_of(tiny_qwen3, tmp_path / "qwen3")
    tokenizer = load(copy).tokenizer
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(copy)
    template = load(copy).descriptor((1,))
    assert template.chat_template_hash != plain.chat_template_hash
    assert template.tokenizer_hash == plain.tokenizer_hash
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(copy)
    assert load(copy).descriptor((1,)).tokenizer_hash != plain.tokenizer_hash


def test_padding_a_batch_does_not_change_the_tokenizers_hash(tiny_qwen3: Path):
    target = load(tiny_qwen3)
    before = target.descriptor((1,)).tokenizer_hash
    target.tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=4)
    assert target.descriptor((1,)).tokenizer_hash == before


def damage_nothing_there(path: Path) -> None:
    shutil.rmtree(path)


def damage_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def damage_no_config(path: Path) -> None:
    (path / "config.json").unlink()


def damage_no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def damage_broken_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def damage_unknown_model(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "nonesuch"}')


def damage_no_language_model(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "vit"}')


def damage_no_tokenizer(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


def damage_cut_weights(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\xff" * 100)


DAMAGES = {
    damage_nothing_there: "is not a directory",
    damage_a_file: "is not a directory",
    damage_no_config: "has no config.json",
    damage_no_weights: "has no weights",
    damage_broken_config: "config",
    damage_unknown_model: "config cannot be used",
    damage_no_language_model: "is not a language model: its config has no vocab_size",
    damage_no_tokenizer: "has no tokenizer",
    damage_cut_weights: "not a safetensors file",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_directory_that_is_not_a_model_is_one_clear_line(damage, tiny_qwen3, tmp_path: Path):
    copy = copy_of(tiny_qwen3, tmp_path / "model")
    damage(copy)
    with pytest.raises(ModelError) as caught:
        load(copy)
    message = str(caught.value)
    assert DAMAGES[damage] in message
    assert message.startswith(str(copy))
    assert "\n" not in message


def test_weights_of_another_shape_are_one_clear_line(tiny_qwen3: Path, tmp_path: Path):
    copy = copy_of(tiny_qwen3, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 300}))
    with pytest.raises(ModelError, match="weights cannot be loaded") as caught:
        TransformersEngine(TransformersConfig(dtype="float32"), load(copy), (1,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layer_ids", "reason"),
    [
        ((), "there are none"),
        ((1, 6), "6 is out of range, the target has 6 layers"),
        ((-1, 2), "-1 is out of range"),
        ((1, 1), "1 is repeated"),
        ((3, 2), "2 comes after 3: sort them"),
        ((2, 3, 2), "2 is repeated"),
    ],
)
def test_bad_layer_ids_are_refused_with_the_valid_range(layer_ids, reason: str):
    with pytest.raises(LayerIdError) as caught:
        check_layer_ids(layer_ids, 6)
    assert reason in str(caught.value)
    assert "from 0 to 5" in str(caught.value)


def test_the_last_block_may_be_asked_for():
    assert check_layer_ids([0, 5], 6) == (0, 5)


def test_make_engine_from_configuration_alone(tiny_qwen3: Path):
    config = TransformersConfig(dtype="float32", sampling=SamplingConfig(max_new_tokens=2))
    engine = make_engine(config, TargetConfig(path=str(tiny_qwen3), layer_ids=(2, 5)))
    assert engine.descriptor.layer_ids == (2, 5)
    engine.close()


@pytest.mark.parametrize("final", ["prenorm", "postnorm"])
def test_the_final_state_is_asked_for_in_the_configuration(tiny_qwen3: Path, final: Final):
    config = TransformersConfig(dtype="float32", sampling=SamplingConfig(max_new_tokens=2))
    target = TargetConfig(path=str(tiny_qwen3), layer_ids=(2, 4), final=final)
    engine = make_engine(config, target)
    assert (engine.descriptor.final, engine.descriptor.layers) == (final, 3)
    engine.close()


def test_a_final_state_beside_as_many_layers_as_there_may_be_is_refused(tiny_qwen3: Path):
    """No chunk could hold it: better than to find out with the first sample."""
    target = load(tiny_qwen3)
    target.text_config.num_hidden_layers = 70
    assert target.descriptor(range(64)).layers == 64
    with pytest.raises(LimitExceeded, match="is 65, the limit is 64"):
        target.descriptor(range(64), "postnorm")


def test_a_target_whose_final_norm_is_not_known_has_no_state_after_it(tmp_path: Path):
    """GPT-NeoX calls it otherwise, and it is a LayerNorm."""
    tiny_models.make_tokenizer(tmp_path)
    config = GPTNeoXConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, **tiny_models.SIZES
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    for_test, target = TransformersConfig(dtype="float32"), load(tmp_path)
    with pytest.raises(ModelError, match='"prenorm" needs none'):
        TransformersEngine(for_test, target, (1,), final="postnorm")
    TransformersEngine(for_test, target, (1,), final="prenorm").close()


def test_bfloat16_is_chosen_only_where_it_is_computed_in():
    native = any("bf16" in name and has for name, has in torch.cpu.get_capabilities().items())
    assert resolve_dtype("auto", "cpu") is (torch.bfloat16 if native else torch.float32)
    assert resolve_dtype("auto", "cuda:0") is torch.bfloat16
    assert resolve_dtype("float32", "cuda:0") is torch.float32
