"""`draftfeed producer --check`: a wrong capture, which would train happily, must not pass."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from draftfeed_consumer import final_norm
from draftfeed_deploy import check as module
from draftfeed_deploy import config as configuration
from draftfeed_deploy.check import Findings, bounded, check
from draftfeed_deploy.check_report import lines_of
from draftfeed_deploy.cli import main
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import Engine, make_engine
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.service import open_prompts
from draftfeed_proto.descriptor import Final
from draftfeed_proto.sample import LayerCounters, Sample
from tiny_models import make_qwen3

TOML = """
[engine]
name = "transformers"
dtype = "float32"
threads = 1
sampling = {{ max_new_tokens = 100, temperature = 1.0 }}
[target]
path = {model}
layer_ids = [1, 3]
[prompts]
path = {prompts}
[spool]
dir = {spool}
quota_bytes = 1_000_000
min_free_bytes = 0
[server]
bind = {bind}
"""
SAME = "the same tokens in one pass give the same rows"
IN_PLACE = "another token changes its own row and none before it"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("check") / "qwen3")


@pytest.fixture
def path(tmp_path: Path, model: Path) -> Iterator[Path]:
    """Of a configuration whose address is taken."""
    prompts = tmp_path / "prompts.jsonl"
    words = ["hello", "fox", "the quick brown", "a small tokenizer"]
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {
            "model": str(model),
            "prompts": str(prompts),
            "spool": str(tmp_path / "spool"),
            "bind": f"tcp://127.0.0.1:{taken.getsockname()[1]}",
        }
        quoted = {key: json.dumps(value) for key, value in values.items()}
        path = tmp_path / "producer.toml"
        path.write_text(TOML.format(**quoted))
        yield path


class Altered:
    """An engine whose samples are passed through a function with the prompt each was made of."""

    def __init__(self, engine: Engine, alter: Callable[[Prompt, Sample], Sample]) -> None:
        self._engine, self._alter = engine, alter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, prompts: Iterator[Prompt]) -> Iterator[Sample]:
        taken = list(prompts)
        made = {prompt.id: prompt for prompt in taken}
        for sample in self._engine.run(iter(taken)):
            yield self._alter(made[sample.id], sample)


@pytest.fixture
def checked(path: Path) -> Callable[..., tuple[dict[str, str], Findings]]:
    """Of the configuration with overrides: {what failed: why}, and what was found."""

    def run(wrap: Callable[[Engine], Any] = lambda engine: engine, *overrides: str):
        config = configuration.load(path, ProducerConfig, overrides)
        with ExitStack() as stack:
            source = open_prompts(config, stack)
            short = bounded(config, str(path))
            engine = make_engine(short.engine, config.target, config.capture)
            stack.callback(engine.close)
            findings = check(config, wrap(engine), source, Console(quiet=True))
        lines, passed = lines_of(config, str(path), findings)
        failed = [line.split(None, 1)[1] for line in lines if line.startswith("FAILED ")]
        assert passed == (not failed), lines
        assert lines[-1] == ("PASSED" if passed else "FAILED")
        return dict(line.split(": ", 1) for line in failed), findings

    return run


def shifted(sample: Sample) -> Sample:
    rows = np.concatenate([sample.hidden_states[1:], sample.hidden_states[-1:]])
    return msgspec.structs.replace(sample, hidden_states=rows)


def test_the_command_prints_a_table_and_touches_neither_spool_nor_address(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["producer", "-c", str(path), "--check"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "PASSED"
    assert "(layers 1,3 of 6, hidden 512, fp16" in out[0]
    assert [line.split()[0] for line in out[3:6]] == ["0", "1", "2"]
    assert all("equal" in line for line in out[3:6])
    assert not (tmp_path / "spool").exists()


def test_responses_are_short_whatever_is_configured(checked: Any) -> None:
    failed, findings = checked()
    assert failed == {}
    assert {int(s.loss_mask.sum()) for s in findings.live.samples.values()} <= set(range(1, 33))
    assert len(findings.live.samples) == 3
    assert findings.longest_rows == 511


def test_rows_shifted_by_one_while_generating_fail(checked: Any) -> None:
    """The last sampled token has no row: off by one between ids and rows trains happily."""
    failed, _ = checked(
        lambda engine: Altered(engine, lambda p, s: s if p.response_ids is not None else shifted(s))
    )
    assert set(failed) == {SAME}
    assert "sample 0 is off by " in failed[SAME]
    assert "at row 0, layer" in failed[SAME]


def test_rows_shifted_by_one_in_every_capture_fail(checked: Any) -> None:
    """Two captures with the same fault agree with each other."""
    failed, findings = checked(lambda engine: Altered(engine, lambda _, sample: shifted(sample)))
    assert set(failed) == {IN_PLACE}
    assert f"at row {findings.changed.position - 1}, layer" in failed[IN_PLACE]


def test_rows_of_another_sample_fail(checked: Any) -> None:
    """Batch > 1 with a cached prefix: rows land in another request."""
    first: list[np.ndarray] = []

    def swap(prompt: Prompt, sample: Sample) -> Sample:
        first.append(sample.hidden_states)
        rows = np.resize(first[0], sample.hidden_states.shape)
        live = prompt.response_ids is None
        return msgspec.structs.replace(sample, hidden_states=rows) if live else sample

    failed, _ = checked(lambda engine: Altered(engine, swap))
    assert set(failed) == {SAME}
    assert "sample 0" not in failed[SAME]
    assert "sample 1 is off by" in failed[SAME]


def test_rows_of_zeros_and_infinities_fail(checked: Any) -> None:
    """An all-zero row passes every other check when both captures have it."""

    def spoil(_: Prompt, sample: Sample) -> Sample:
        counters = (LayerCounters(0, 0, 0, 0), LayerCounters(0, 2, 0, 1))
        return msgspec.structs.replace(sample, counters=counters)

    failed, _ = checked(lambda engine: Altered(engine, spoil))
    name = "no non-finite values, no rows of zeros"
    assert failed == {name: "layer 3: 6 non-finite values, 3 zero rows"}


KINDS: list[Final] = ["prenorm", "postnorm"]


@pytest.mark.parametrize("final", KINDS)
def test_final_states_are_compared_as_the_layers_are(
    checked: Any, path: Path, capsys: pytest.CaptureFixture[str], final: Final
) -> None:
    assert main(["producer", "-c", str(path), "--check", "--set", f"target.final={final}"]) == 0
    out = capsys.readouterr().out
    assert f"(layers 1,3 of 6, final state {final}, hidden 512" in out
    assert re.search(rf"^{final} +0 +0 +\d+ +0$", out, re.MULTILINE), out  # a line of counters
    assert f"ok      final states are {final}: " in out

    def of_another_row(prompt: Prompt, sample: Sample) -> Sample:
        states = sample.hidden_states.copy()
        states[:, -1] = shifted(sample).hidden_states[:, -1]
        live = prompt.response_ids is None
        return msgspec.structs.replace(sample, hidden_states=states) if live else sample

    failed, _ = checked(lambda engine: Altered(engine, of_another_row), f"target.final={final}")
    assert set(failed) == {SAME}
    assert f"at row 0, layer {final}" in failed[SAME]


@pytest.mark.parametrize("said", KINDS)
def test_final_states_of_the_other_kind_than_the_stream_says_fail(
    checked: Any, said: Final
) -> None:
    """Pre-norm and post-norm mixed up: two captures agree with each other, and labels are wrong."""
    given = "prenorm" if said == "postnorm" else "postnorm"

    class Mislabelled:
        def __init__(self, engine: Engine) -> None:
            self._engine = engine
            self.descriptor = msgspec.structs.replace(engine.descriptor, final=said)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    failed, _ = checked(Mislabelled, f"target.final={given}")
    assert set(failed) == {f"final states are {said}"}
    assert "that of sample 0 is " in failed[f"final states are {said}"]


def test_final_states_of_a_target_whose_norm_is_not_known_are_passed_over(
    checked: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(final_norm.ADDED, "qwen3")
    failed, findings = checked(lambda engine: engine, "target.final=postnorm")
    assert failed == {}
    lines, _ = lines_of(configuration.load(path, ProducerConfig), "producer.toml", findings)
    assert any("final states are postnorm: not checked: " in line for line in lines)


def test_a_sample_that_arrives_otherwise_than_it_was_made_fails(checked: Any, path: Path) -> None:
    _, findings = checked()
    assert findings.passage is not None
    damaged = dict.fromkeys(findings.passage.digests, "0" * 32)
    passage = findings.passage._replace(digests=damaged)
    config = configuration.load(path, ProducerConfig)
    lines, passed = lines_of(config, "producer.toml", findings._replace(passage=passage))
    assert not passed
    assert any("sample 0 did not arrive as it was made" in line for line in lines)


def test_an_engine_that_makes_nothing_is_stopped_in_time_and_fails(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(Altered):
        stopped = threading.Event()

        def run(self, prompts: Iterator[Prompt]) -> Iterator[Sample]:
            list(prompts)
            assert self.stopped.wait(60)
            yield from ()

        def stop(self) -> None:
            self.stopped.set()

    monkeypatch.setattr(module, "CAPTURE_SECONDS", 0.1)
    failed, _ = checked(lambda engine: Stuck(engine, lambda _, sample: sample))
    assert "not finished in time" in failed["samples with a row for every fed token"]
    assert SAME in failed


def test_a_quota_larger_than_the_disk_fails(checked: Any) -> None:
    """Generation would stop at the free-space floor in mid-week."""
    failed, _ = checked(lambda engine: engine, "spool.quota_bytes=1_000_000_000_000_000")
    assert set(failed) == {"the disk holds what the spool may hold"}


def test_prefill_mode_is_checked_on_the_responses_of_the_file(
    checked: Any, path: Path, tmp_path: Path
) -> None:
    line = {"prompt": "hello", "response": "the quick brown fox " * 9}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    failed, findings = checked(lambda engine: engine, "capture.mode=prefill")
    assert failed == {}
    (sample,) = findings.live.samples.values()
    assert sample.loss_mask.sum() == 32


def test_the_synthetic_engine_has_nothing_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "synthetic.toml"
    path.write_text(f'[engine]\nname = "synthetic"\n[spool]\ndir = "{tmp_path}/spool"\n')
    assert main(["producer", "-c", str(path), "--check"]) == 2
    assert "--check runs a target, and this engine has none" in capsys.readouterr().err


def test_ctrl_c_ends_it_cleanly(path: Path) -> None:
    command = [str(Path(sys.executable).with_name("draftfeed")), "producer", "-c", str(path)]
    process = subprocess.Popen(
        [*command, "--check"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        assert any("reading the prompt file" in line for line in process.stdout)
        process.send_signal(2)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert "Traceback" not in output
