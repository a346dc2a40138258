"""An SGLang that cannot capture is refused at the start, in one line that says why."""

from pathlib import Path
from typing import Any

import pytest

from draftfeed_producer.engines import CaptureConfig, SGLangConfig
from draftfeed_producer.engines.sglang import engine as sglang_engine
from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.errors import EngineError
from draftfeed_producer.target import TargetConfig, load_target
from engine_suite import make_prompts
from sglang_engines import ON_THE_CPU, PYTHON, Log

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def refusal(path: Path, python: str = PYTHON, *, prefix_cache: bool = False, **args: object) -> str:
    """Why the engine does not start, in its one line. It leaves nothing behind."""
    config = SGLangConfig(
        python=python, dtype="float32", ring_bytes=1 << 20, args={**ON_THE_CPU, **args}
    )
    capture = CaptureConfig(prefix_cache=prefix_cache)
    engine = SGLangEngine(config, load_target(TargetConfig(path=str(path))), (0, 2), capture)
    with Log.kept() as log:
        try:
            with pytest.raises(EngineError) as caught:
                list(engine.run(iter(make_prompts([4]))))
        finally:
            engine.close()
        log.assert_nothing_left()
    reason = str(caught.value)
    assert len(reason.splitlines()) == 1
    return reason


def test_a_version_that_the_hooks_were_not_written_for(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
):
    """Hooks of another version miss, or see something else, and SGLang only logs it."""
    monkeypatch.setattr(sglang_engine, "KNOWN_VERSIONS", ("0.5.22", "0.5.24"))
    reason = refusal(tiny_qwen3)
    assert "SGLang is 0.5.23" in reason
    assert "0.5.22, 0.5.24" in reason


def test_a_plugin_that_is_left_out(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch):
    """SGLANG_PLUGINS in somebody's profile: no rows, no error."""
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    reason = refusal(tiny_qwen3)
    assert "did not load the plugin `draftfeed`" in reason
    assert "SGLANG_PLUGINS=other" in reason


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"attention_backend": "no_such_backend"}, "no_such_backend"),
    ],
)
def test_arguments_that_sglang_refuses(tiny_qwen3: Path, args: dict[str, Any], words: str):
    """[engine.args] are SGLang's own: so is what it says of them."""
    assert words in refusal(tiny_qwen3, **args)


def test_the_hybrids_prefix_cache_as_sglang_chooses_it_needs_a_gpu(tiny_qwen35: Path):
    """Where SGLang plans ahead, its cache wants snapshots of recurrent states, made on a GPU only.
    With args.disable_overlap_schedule there is a cache on a CPU, too."""
    assert "Mamba cache state snapshots" in refusal(tiny_qwen35, prefix_cache=True)


def test_an_interpreter_that_is_not_there(tiny_qwen3: Path, tmp_path: Path):
    reason = refusal(tiny_qwen3, python=str(tmp_path / "python"))
    assert "[engine] python" in reason
    assert "No such file" in reason


def test_an_interpreter_without_draftfeed(tiny_qwen3: Path, tmp_path: Path):
    """`pip install` into one environment, [engine] python of another."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nexec /usr/bin/env python3 -I -S "$@"\n')
    python.chmod(0o755)
    assert "No module named 'draftfeed_producer'" in refusal(tiny_qwen3, python=str(python))
