"""Ids from the formula, while the drafter was trained on others: same shape, no error."""

import json
from pathlib import Path

import pytest

import chat_targets
from draftfeed_deploy.cli import main
from draftfeed_deploy.prepare_layers import layers_of
from draftfeed_producer.target import Target, TargetConfig, load_target
from draftfeed_proto.descriptor import Expectation
from draftfeed_proto.errors import DescriptorMismatch


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = chat_targets.make_target(
        tmp_path_factory.mktemp("t") / "target", chat_targets.PLAIN, num_hidden_layers=24
    )
    return load_target(TargetConfig(path=str(path)))


def drafter(path: Path, ids: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"dflash_config": {"target_layer_ids": ids}}))
    return path


def test_a_drafter_trained_on_other_layers_is_found_before_the_run(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
):
    ids = [2, 7, 12, 17, 22]
    path = drafter(tmp_path / "drafter", ids)
    formula = [1, 6, 11, 16, 21]  # of 24 blocks: 1 + i * 20 / 4
    source = tmp_path / "set.jsonl"
    source.write_text('{"prompt": "x"}\n')
    words = ["prepare", source, tmp_path / "out.jsonl", "--target", target.path, "--drafter", path]
    assert main([str(word) for word in words]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "layers" in line]
    assert f"{ids}, not {formula} as by default: write layer_ids = {ids}" in line
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["layers"] == {"drafter": ids, "default": formula}


def test_what_it_says_to_write_refuses_the_formulas_stream(tmp_path: Path, target: Target):
    layers = layers_of(drafter(tmp_path / "drafter", [2, 7, 12, 17, 22]), target)
    expectation = Expectation(layer_ids=layers.drafter)
    with pytest.raises(DescriptorMismatch, match="layer_ids") as refused:
        expectation.check(target.descriptor())
    assert str(target.descriptor().layer_ids) in str(refused.value)
    assert str(layers.drafter) in str(refused.value)
    expectation.check(target.descriptor(layers.drafter))


def test_the_formulas_own_are_no_matter(tmp_path: Path, target: Target):
    layers = layers_of(drafter(tmp_path / "drafter", list(target.descriptor().layer_ids)), target)
    assert "by default" in str(layers)
    assert "write" not in str(layers)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 24], "out of range"),
        ([2, 1], "sort them"),
        ("x", "not a list"),
        ([True], "not a list"),
        ([], "there are none"),
        (None, "not a list"),
    ],
)
def test_ids_that_cannot_be_are_one_line(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str], ids: object, words: str
):
    source = tmp_path / "set.jsonl"
    source.write_text('{"prompt": "x"}\n')
    path = drafter(tmp_path / "drafter", ids)
    arguments = ["prepare", source, tmp_path / "o", "--target", target.path, "--drafter", path]
    assert main([str(word) for word in arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    (line,) = [one for one in errors if one.startswith("draftfeed: ")]
    assert words in line


def test_a_directory_that_is_no_drafter_is_one_line(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "set.jsonl"
    source.write_text('{"prompt": "x"}\n')
    for path, words in ((target.path, "no dflash_config"), (tmp_path / "no", "cannot be read")):
        arguments = ["prepare", source, tmp_path / "o", "--target", target.path, "--drafter", path]
        assert main([str(word) for word in arguments]) == 2
        assert words in capsys.readouterr().err
