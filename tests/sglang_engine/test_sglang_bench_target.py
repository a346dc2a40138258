"""`draftfeed bench target` with SGLang on the CPU: one start with capture, one without."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from draftfeed_deploy.bench_target_result import Result, by_batch
from draftfeed_deploy.cli import main
from draftfeed_producer.engines.sglang import process
from draftfeed_producer.engines.sglang.messages import Settings, Start
from sglang_engines import ON_THE_CPU, PYTHON, Log, processes_of
from waiting import eventually

pytestmark = pytest.mark.timeout(600)

TOKENS = 24


def write_config(tmp_path: Path, model: Path) -> Path:
    prompts = tmp_path / "prompts.jsonl"
    words = ["hello", "fox", "the quick brown", "a small tokenizer"]
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    values = {
        "engine.name": "sglang",
        "engine.python": PYTHON,
        "engine.dtype": "float32",
        "engine.concurrency": 2,
        "engine.ring_bytes": 4 << 20,
        "engine.sampling.max_new_tokens": 64,
        "target.path": str(model),
        "target.layer_ids": [1, 3],
        "prompts.path": str(prompts),
        "spool.dir": str(tmp_path / "spool"),
        **{f"engine.args.{name}": value for name, value in ON_THE_CPU.items()},
    }
    config = tmp_path / "producer.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return config


def test_both_ways_are_measured_at_the_same_batches_and_nothing_is_left(
    tmp_path: Path,
    tiny_qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    starts: list[tuple[Start, dict[str, str]]] = []
    launch = process.HostProcess._launch

    def seen(self: process.HostProcess, python: str, settings: Settings, start: Start) -> object:
        started = launch(self, python, settings, start)
        environment = Path(f"/proc/{started.pid}/environ")
        # Empty for a moment, while the kernel lays out the new program.
        eventually(lambda: environment.read_bytes() != b"", "the host's environment is there")
        variables = dict(
            one.split("=", 1) for one in environment.read_text().split("\0") if "=" in one
        )
        starts.append((start, variables))
        return started

    monkeypatch.setattr(process.HostProcess, "_launch", seen)
    out = tmp_path / "target.json"
    config = write_config(tmp_path, tiny_qwen3)
    arguments = ["-c", str(config), "--out", str(out), "--tokens", str(TOKENS), "--minutes", "6"]
    with Log.kept() as log:
        code = main(["bench", "target", *arguments])
        log.assert_nothing_left()
    shown, errors = capsys.readouterr()
    assert code == 0, errors

    result = msgspec.json.decode(out.read_bytes(), type=Result)
    assert [*by_batch(result, True)] == [*by_batch(result, False)] == [1, 2]
    for one in result.points:
        for turn in one.rounds:
            assert turn.output_tokens_per_second > one.batch * (TOKENS - 1) / turn.seconds
            assert 0 < turn.first_token_seconds < turn.seconds
        # Several processes with torch in them.
        assert one.memory_bytes is not None
        assert one.memory_bytes > 200e6
    assert result.in_turns
    assert "advice   batch" in shown

    (bare, bare_variables), (captured, its_variables) = starts
    kept = {key for key in captured.args if key not in bare.args}
    assert kept == {
        "speculative_algorithm",
        "enable_return_aux_hidden_states",
        "return_aux_hidden_state_layer_ids",
    }
    assert {key: captured.args[key] for key in bare.args} == bare.args
    assert process.VARIABLE in its_variables
    assert process.VARIABLE not in bare_variables


@pytest.fixture
def running(tmp_path: Path, tiny_qwen3: Path) -> Iterator["subprocess.Popen[str]"]:
    config = write_config(tmp_path, tiny_qwen3)
    command = [str(Path(sys.executable).with_name("draftfeed")), "bench", "target"]
    process = subprocess.Popen(
        [*command, "-c", str(config), "--out", str(tmp_path / "target.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_while_the_engine_starts_leaves_none_of_its_processes(
    running: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    """A start takes minutes with a large target, and holds a GPU."""
    assert running.stdout is not None
    starting = (re.search(r"starting SGLang, process (\d+)", line) for line in running.stdout)
    host = next(int(found[1]) for found in starting if found)
    assert processes_of(host)
    running.send_signal(2)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130, output
    eventually(lambda: processes_of(host) == {}, "nothing left of the engine")
    assert not (tmp_path / "target.json").exists()
