"""`draftfeed producer --check` with SGLang on the CPU: one start, three captures."""

import json
from pathlib import Path

import pytest

from draftfeed_deploy.cli import main
from sglang_engines import ON_THE_CPU, PYTHON
from tiny_models import make_qwen3

pytestmark = pytest.mark.timeout(600)


def test_an_engine_that_generated_captures_the_same_tokens_in_one_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start takes a minute, and minutes with a large target: the check has to do with one."""
    prompts = tmp_path / "prompts.jsonl"
    words = ["hello", "fox", "the quick brown"]
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    values = {
        "engine.name": "sglang",
        "engine.python": PYTHON,
        "engine.dtype": "float32",
        "engine.ring_bytes": 4 << 20,
        "engine.sampling.max_new_tokens": 8,
        "target.path": str(make_qwen3(tmp_path / "qwen3")),
        "target.layer_ids": [1, 3],
        "target.final": "postnorm",
        "prompts.path": str(prompts),
        "spool.dir": str(tmp_path / "spool"),
        "spool.quota_bytes": 1_000_000,
        **{f"engine.args.{name}": value for name, value in ON_THE_CPU.items()},
    }
    config = tmp_path / "producer.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    code = main(["producer", "-c", str(config), "--check"])
    out = capsys.readouterr().out
    assert (code, out.splitlines()[-1]) == (0, "PASSED"), out
    assert out.count(" equal ") == 3
    assert "ok      final states are postnorm: " in out
    assert not (tmp_path / "spool").exists()
