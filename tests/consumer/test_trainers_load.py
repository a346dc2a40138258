import importlib.metadata
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from draftfeed_consumer.assets import AssetsConfig
from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.trainers import TrainerConfig, TrainerRun, load, resolve, specforge
from draftfeed_proto.assets import TARGET_MANIFEST


def some_training(stream: object, run: TrainerRun) -> None:
    """Found by name in the tests below."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def config(target: Path, **values: Any) -> TrainerConfig:
    return TrainerConfig(target=target, output_dir=target / "out", **values)


def test_a_function_is_found_by_module_and_name(target: Path) -> None:
    train, run = load(config(target, function=f"{__name__}:some_training", options={"a": 1}))
    assert train is some_training
    assert run.options == {"a": 1}


def test_the_shipped_trainer_is_found_by_kind(target: Path) -> None:
    train, _ = load(config(target, kind="specforge"))
    assert train is specforge.train


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "one and not both"),
        ({"kind": "specforge", "function": "a:b"}, "one and not both"),
        ({"kind": "spekforge"}, "'spekforge' is not known"),
        ({"function": "no_colon"}, '"module:function"'),
        ({"function": "no_such_module_anywhere:train"}, "No module named"),
        ({"function": "json:no_such_function"}, "no function 'no_such_function'"),
        ({"kind": "specforge", "threads": 0}, "threads is 0"),
        ({"kind": "specforge", "options": {"blok_size": 4}}, "did you mean 'block_size'?"),
        ({"kind": "specforge", "options": {"block_size": 1}}, "block_size must be at least 2"),
        ({"kind": "specforge", "options": {"batch_size": "2"}}, "options.batch_size"),
        ({"kind": "specforge", "options": {"init": "zero"}}, "options.init"),
    ],
)
def test_what_cannot_run_is_named(target: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainerError) as caught:
        load(config(target, **values))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_that_is_no_model_directory(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="is not a model directory"):
        load(TrainerConfig(kind="specforge", target=tmp_path, output_dir=tmp_path))


def test_another_version_of_specforge_is_refused_with_the_fix(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specforge, "VERSION", "9.9.9")
    with pytest.raises(
        TrainerError, match=r"works with SpecForge 9\.9\.9, found 0\.2\.0; in the checkout run: pip"
    ):
        load(config(target, kind="specforge"))


def test_without_specforge_the_command_that_installs_it_is_printed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        TrainerError, match=r"in the checkout run: pip install .*--no-deps specforge==0\.2\.0"
    ):
        load(config(target, kind="specforge"))


def test_without_its_extra_the_missing_package_is_named(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name)
    )
    with pytest.raises(
        TrainerError, match=r"needs accelerate; in the checkout run: pip install '\.\["
    ):
        load(config(target, kind="specforge"))


def test_output_dir_that_cannot_be_written_is_known_at_once(target: Path) -> None:
    settings = TrainerConfig(function="json:dumps", output_dir=Path("/dev/null/x"))
    with pytest.raises(TrainerError, match="output_dir /dev/null/x cannot be written: Not a dir"):
        load(settings)


def test_the_config_reads_from_a_table() -> None:
    table = {
        "kind": "specforge",
        "target": "a",
        "output_dir": "b",
        "policy": {"saturated": "reject"},
    }
    read = msgspec.convert(table, TrainerConfig, dec_hook=lambda kind, value: kind(value))
    assert read.policy.saturated == "reject"


def test_resolve_gives_any_callable() -> None:
    assert resolve("json:dumps") is __import__("json").dumps


def test_specforge_without_a_target_says_what_is_missing(tmp_path: Path) -> None:
    assets = AssetsConfig(fetch=False)
    with pytest.raises(TrainerError, match="target is missing"):
        load(TrainerConfig(kind="specforge", output_dir=tmp_path, assets=assets))


def test_a_target_that_is_still_to_be_fetched_is_not_missed(tmp_path: Path) -> None:
    _, run = load(TrainerConfig(kind="specforge", output_dir=tmp_path))
    assert run.target is None
    assert run.partial
    assert run.with_target(tmp_path).target_dir == tmp_path


@pytest.mark.parametrize("fetched", [False, True], ids=["to be fetched", "in the cache"])
def test_what_needs_more_of_the_target_than_producers_serve_is_refused(
    fetched: bool, target: Path, tmp_path: Path
) -> None:
    """Symptom: a drafter that was to start from the target's blocks starts from random ones."""
    copy = Path(shutil.copytree(target, tmp_path / "target"))
    (copy / TARGET_MANIFEST).write_text("{}")
    settings = TrainerConfig(
        kind="specforge",
        target=copy if fetched else None,
        output_dir=tmp_path,
        options={"init": "target"},
    )
    with pytest.raises(TrainerError, match=r'options.init = "target" copies blocks') as caught:
        load(settings)
    assert "\n" not in str(caught.value)
