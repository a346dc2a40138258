"""`draftfeed bench target` with a tiny target: what it writes, a plan reads."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from draftfeed_deploy import bench_target as module
from draftfeed_deploy import config as configuration
from draftfeed_deploy.bench_target import Options
from draftfeed_deploy.bench_target_arms import Arm, TransformersMachine
from draftfeed_deploy.bench_target_report import lines_of
from draftfeed_deploy.bench_target_result import Result, Turn, by_batch, point, ratio
from draftfeed_deploy.bench_target_turn import Unusable
from draftfeed_deploy.cli import main
from draftfeed_deploy.errors import BenchmarkFailed
from draftfeed_deploy.plan_measured import TargetBenchmark
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.errors import EngineError
from draftfeed_producer.prompts import Prompt
from tiny_models import make_qwen3

TOML = """
[engine]
name = "transformers"
dtype = "float32"
batch_size = 4
threads = 1
sampling = {{ max_new_tokens = 100, temperature = 1.0 }}
[target]
path = {model}
layer_ids = [1, 3]
[prompts]
path = {prompts}
[spool]
dir = {spool}
"""
QUICK = ["--max-batch", "2", "--tokens", "8"]
PLAN = """
extends = "b-split"
[target]
hidden_size = 512
[workload]
prompts = 1000
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("bench") / "qwen3")


@pytest.fixture
def path(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a configuration, in the directory that commands run in."""
    prompts = tmp_path / "prompts.jsonl"
    words = ["hello", "fox", "the quick brown", "a small tokenizer", "quick hello"]
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    values = {"model": str(model), "prompts": str(prompts), "spool": str(tmp_path / "spool")}
    path = tmp_path / "producer.toml"
    path.write_text(TOML.format(**{key: json.dumps(value) for key, value in values.items()}))
    monkeypatch.chdir(tmp_path)
    return path


def test_what_it_writes_changes_a_plan(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "target", "-c", str(path), *QUICK]) == 0
    shown = capsys.readouterr().out
    file = tmp_path / "bench-target.json"
    result = msgspec.json.decode(file.read_bytes(), type=Result)
    assert {(p.batch, p.capture) for p in result.points} == {
        (batch, capture) for batch in (1, 2) for capture in (True, False)
    }
    assert (result.response_tokens, result.output_includes_prefill) == (8, False)
    assert "advice   batch" in shown
    assert f"{result.prompts} of the prompt file" in shown
    assert not (tmp_path / "spool").exists()

    (tmp_path / "mine.toml").write_text(PLAN)
    plan = ["plan", "--scenario", "mine.toml", "--measured", str(file), "--json"]
    assert main(plan) == 0
    (planned,) = json.loads(capsys.readouterr().out)
    doubts = [one["text"] for one in planned["findings"] if one["text"].startswith(str(file))]
    assert any("the plan has 'RTX PRO 6000'" in one for one in doubts)
    best = max(by_batch(result, True).values(), key=lambda p: p.output_tokens_per_second)
    rate = planned["assumptions"]["rates.output_tokens_per_second"]
    assert (rate["value"], rate["source"]) == (best.output_tokens_per_second, "measured")
    assert planned["assumptions"]["layout.batch"]["value"] == best.batch
    tokens = 1000 * 500 * 6
    seconds = tokens / (best.output_tokens_per_second * 4)
    assert planned["results"]["output_seconds"]["value"] == pytest.approx(seconds)


def test_every_figure_is_of_its_rounds_and_plausible(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "other.json"
    arguments = ["--tokens", "8", "--max-batch", "3", "--out", str(out), "--json"]
    assert main(["bench", "target", "-c", str(path), *arguments]) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=Result)
    assert result == msgspec.json.decode(out.read_bytes(), type=Result)
    assert [p.batch for p in result.points if p.capture] == [1, 2, 3]
    assert result.in_turns
    for one in result.points:
        assert 1 <= len(one.rounds) <= 3
        rates = [turn.output_tokens_per_second for turn in one.rounds]
        assert min(rates) <= one.output_tokens_per_second <= max(rates)
        for turn in one.rounds:
            # Decoding cannot have taken longer than the whole round, nor a first token.
            assert turn.output_tokens_per_second > one.batch * 7 / turn.seconds
            assert 0 < turn.first_token_seconds < turn.seconds
        # A process with torch in it, and a tiny target.
        assert one.memory_bytes is not None
        assert 50e6 < one.memory_bytes < 20e9


def test_a_file_that_is_there_is_never_overwritten(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The figures of another machine are lost, and nobody notices."""
    (tmp_path / "bench-target.json").write_text("mine")
    assert main(["bench", "target", "-c", str(path), *QUICK]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bench-target.json cannot be written: " in line
    assert "choose another --out" in line
    assert (tmp_path / "bench-target.json").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_found_before_minutes_are_spent(
    path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "target", "-c", str(path), "--out", "nowhere/file.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draftfeed: nowhere/file.json cannot be written: No such file")


def test_the_synthetic_engine_has_nothing_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "synthetic.toml"
    path.write_text(f'[engine]\nname = "synthetic"\n[spool]\ndir = "{tmp_path}/spool"\n')
    assert main(["bench", "target", "-c", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bench target runs a target, and this engine has none" in line
    assert not (tmp_path / "bench-target.json").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--max-batch", "0"],
        ["--max-batch", "9" * 30],
        ["--tokens", "7"],
        ["--tokens", "x"],
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--minutes", "inf"],
    ],
)
def test_sizes_that_make_no_sense_are_refused(
    path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "target", "-c", str(path), *wrong])
    assert ended.value.code == 2
    assert f"argument {wrong[0]}: must be" in capsys.readouterr().err


def test_prompts_too_long_for_the_response_are_one_line(
    path: Path, capsys: pytest.CaptureFixture[str]
):
    """The tiny target has 512 positions."""
    assert main(["bench", "target", "-c", str(path), "--tokens", "600"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("no prompt leaves room for 600 more tokens")


def test_prompts_that_have_responses_are_answered_anew(path: Path, tmp_path: Path):
    line = {"prompt": "hello", "response": "the quick brown fox " * 9}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    arguments = [*QUICK, "--set", "capture.mode=prefill"]
    assert main(["bench", "target", "-c", str(path), *arguments]) == 0
    result = msgspec.json.decode((tmp_path / "bench-target.json").read_bytes(), type=Result)
    assert result.prompts == 1
    assert result.prompt_tokens < 10


Output = Callable[[int, bool, int], float]
"""(batch, captured, round) to tokens per second"""


@pytest.fixture
def sweep(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The real engine; of its figures the output is replaced, so that it can be known."""

    def run(
        output: Output,
        options: Options,
        fails: Sequence[tuple[int, int]] = (),
        error: Exception | None = None,
    ) -> Result:
        counts: dict[tuple[int, bool], int] = {}
        turn = Arm.turn

        def altered(
            self: Arm, prompts: Sequence[Prompt], tokens: int, left_seconds: float | None = None
        ) -> Turn:
            key = len(prompts), self.captures
            number = counts[key] = counts.get(key, -1) + 1
            if (len(prompts), number) in fails:
                raise error or Unusable("so it was")
            real = turn(self, prompts, tokens, left_seconds)
            rate = output(*key, number)
            return msgspec.structs.replace(real, output_tokens_per_second=rate)

        monkeypatch.setattr(Arm, "turn", altered)
        config = configuration.load(path, ProducerConfig)
        return module.measure(config, str(path), options, Console(quiet=True))

    return run


def batches_of(result: Result) -> list[int]:
    return list(by_batch(result, True))


def test_it_stops_when_two_doublings_gave_little(sweep: Callable[..., Result]):
    rates = {1: 100, 2: 180, 4: 185, 8: 190}
    result = sweep(lambda batch, captured, _: rates[batch], Options(most=64, tokens=8))
    assert batches_of(result) == [1, 2, 4, 8]
    assert result.cut == "2 doublings in a row gave less than 5% each"
    assert "advice   batch 2: doubling it gives less than 5% more output" in "\n".join(
        lines_of(result)
    )


def test_it_goes_on_after_one_that_gave_little(sweep: Callable[..., Result]):
    """One noisy batch must not end a sweep."""
    rates = {1: 100, 2: 101, 4: 200, 8: 400}
    result = sweep(lambda batch, captured, _: rates[batch], Options(most=8, tokens=8))
    assert (batches_of(result), result.cut) == ([1, 2, 4, 8], "")
    assert "--max-batch 16 tries more" in "\n".join(lines_of(result))


class OneByOne(TransformersMachine):
    """As on a GPU that has room for one engine."""

    in_turns = False

    def arms(self) -> Generator[list[Arm]]:
        for both in super().arms():
            bare, captured = both
            yield [captured]
            yield [bare]


def test_what_comes_after_is_measured_at_the_same_batches_however_flat(
    sweep: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
):
    """The one engine's batches would have no counterpart."""
    monkeypatch.setattr(module, "TransformersMachine", OneByOne)
    rates = {1: 100, 2: 180, 4: 360}
    result = sweep(
        lambda batch, captured, _: rates[batch] if captured else 100, Options(most=4, tokens=8)
    )
    assert [(p.batch, p.capture) for p in result.points] == [
        (batch, capture) for batch in (1, 2, 4) for capture in (False, True)
    ]
    assert (result.in_turns, result.cut) == (False, "")


def test_time_is_shared_by_what_comes_one_after_the_other(
    sweep: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "TransformersMachine", OneByOne)
    result = sweep(lambda batch, *_: 100.0 * batch, Options(most=64, tokens=8, minutes=1e-6))
    assert [(p.batch, p.capture) for p in result.points] == [(1, False), (1, True)]
    assert result.cut == "time was up before batch 2: --minutes gives more"


def test_time_that_is_up_is_said(sweep: Callable[..., Result]):
    result = sweep(lambda batch, *_: 100.0 * batch, Options(most=64, tokens=8, minutes=1e-6))
    assert batches_of(result) == [1]
    assert result.cut == "time was up before batch 2: --minutes gives more"
    assert [len(one.rounds) for one in result.points] == [1, 1]


def test_a_batch_that_takes_longer_than_the_time_that_is_left_is_ended(path: Path):
    """A round at a larger batch may take longer than any before it gave reason to expect, and the
    time that is given is for all of the command."""
    config = configuration.load(path, ProducerConfig)
    began = time.monotonic()
    turn, sweeping = Arm.turn, Options(most=2, tokens=64, minutes=60)
    with pytest.MonkeyPatch.context() as patch:

        def slow(
            self: Arm, prompts: Sequence[Prompt], tokens: int, left_seconds: float | None
        ) -> Turn:
            return turn(self, prompts, tokens, 0.01 if len(prompts) == 2 else left_seconds)

        patch.setattr(Arm, "turn", slow)
        result = module.measure(config, str(path), sweeping, Console(quiet=True))
    assert batches_of(result) == [1]
    assert result.cut == "time was up in batch 2: --minutes gives more"
    assert time.monotonic() - began < 60


def test_loading_is_in_the_time_that_is_given(sweep: Callable[..., Result]):
    """Two minutes were those after a start that nobody bounded."""
    options = Options(most=64, tokens=8, minutes=5, began=time.monotonic() - 301)
    result = sweep(lambda batch, *_: 100.0 * batch, options)
    assert batches_of(result) == [1]
    assert [len(one.rounds) for one in result.points] == [1, 1]


def test_who_is_first_changes_and_the_ratio_is_of_the_same_round(sweep: Callable[..., Result]):
    """A machine that slows down while it is measured slows both: A B, B A, A B."""
    order: list[bool] = []

    def output(batch: int, captured: bool, number: int) -> float:
        order.append(captured)
        return 100 / 2**number * (0.9 if captured else 1.0)

    result = sweep(output, Options(most=1, tokens=8))
    assert order == [False, True, True, False, False, True]
    captured, bare = (by_batch(result, which)[1] for which in (True, False))
    found = ratio(captured, bare, in_turns=True)
    assert (found.least, found.median, found.most) == pytest.approx((0.9, 0.9, 0.9))
    assert "the capture costs 10.0% of the output there" in "\n".join(lines_of(result))


def test_a_batch_that_the_engine_cannot_hold_ends_it_and_keeps_the_rest(
    sweep: Callable[..., Result],
):
    result = sweep(lambda batch, *_: 100.0 * batch, Options(most=8, tokens=8), fails=[(4, 0)])
    assert (batches_of(result), result.cut) == ([1, 2], "batch 4: so it was")


@pytest.mark.parametrize(
    "error",
    [BenchmarkFailed("not answered"), RuntimeError("CUDA error\nand more"), EngineError("died")],
)
def test_an_engine_that_fails_later_keeps_what_was_measured(
    sweep: Callable[..., Result], error: Exception
):
    """Minutes of a GPU were lost with it."""
    options = Options(most=8, tokens=8)
    result = sweep(lambda batch, *_: 100.0 * batch, options, [(4, 0)], error)
    words = " ".join(str(error).split())
    assert (batches_of(result), result.cut) == ([1, 2], f"batch 4: {words}")
    again = sweep(lambda batch, *_: 100.0 * batch, Options(most=1, tokens=8), [(1, 1)], error)
    assert [len(one.rounds) for one in again.points] == [1, 1]


def test_a_second_engine_that_does_not_start_keeps_what_the_first_has_measured(
    sweep: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
):
    class OnlyOne(OneByOne):
        def arms(self) -> Generator[list[Arm]]:
            for number, arms in enumerate(super().arms()):
                if number:
                    raise EngineError("no room on the GPU")
                yield arms

    monkeypatch.setattr(module, "TransformersMachine", OnlyOne)
    result = sweep(lambda batch, *_: 100.0 * batch, Options(most=2, tokens=8))
    assert [(p.batch, p.capture) for p in result.points] == [(1, True), (2, True)]
    assert result.cut == "no room on the GPU"
    assert lines_of(result)


def test_a_second_engine_that_fails_keeps_what_the_first_has_measured(
    sweep: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "TransformersMachine", OneByOne)

    def warm_up(self: Arm, prompt: Prompt, start_seconds: float) -> None:
        if not self.captures:
            raise EngineError("ended while it started")

    monkeypatch.setattr(Arm, "warm_up", warm_up)
    result = sweep(lambda batch, *_: 100.0 * batch, Options(most=2, tokens=8))
    assert [(p.batch, p.capture) for p in result.points] == [(1, True), (2, True)]
    assert result.cut == "ended while it started"


def test_a_round_that_went_wrong_is_left_out(sweep: Callable[..., Result]):
    result = sweep(lambda batch, *_: 100.0 * batch, Options(most=2, tokens=8), fails=[(1, 1)])
    assert {p.batch: len(p.rounds) for p in result.points} == {1: 1, 2: 3}


def test_nothing_to_show_is_a_failed_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def none(self: Arm, *turn: object) -> Turn:
        raise Unusable("so it was")

    monkeypatch.setattr(Arm, "turn", none)
    assert main(["bench", "target", "-c", str(path), *QUICK]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "draftfeed: nothing could be measured: batch 1: so it was"


def test_an_engine_that_has_no_room_for_a_batch_is_noticed(path: Path):
    """Staging memory for one sample: the second request waits for the first."""
    row_bytes = 2 * 2 * 512
    overrides = [f"capture.staging_bytes={110 * row_bytes}", "engine.sampling.max_new_tokens=90"]
    config = configuration.load(path, ProducerConfig, overrides)
    result = module.measure(config, "", Options(most=2, tokens=90), Console(quiet=True))
    assert batches_of(result) == [1]
    assert result.cut.startswith("batch 2: the engine did not have 2 requests at a time")


def turns(*rates: float) -> list[Turn]:
    def one(rate: float) -> Turn:
        return Turn(
            output_tokens_per_second=rate,
            prefill_tokens_per_second=10 * rate,
            first_token_seconds=1 / rate,
            memory_bytes=None,
            seconds=1.0,
        )

    return [one(rate) for rate in rates]


def made(points: dict[tuple[int, bool], list[Turn]], **changes: Any) -> Result:
    return Result(
        format="draftfeed-bench-target-1",
        points=tuple(point(*key, value) for key, value in points.items()),
        **{
            "target": "t",
            "engine": "sglang",
            "device": "a card",
            "gpus_per_replica": 2,
            "output_includes_prefill": False,
            "prompt_tokens": 10,
            "response_tokens": 8,
            "dtype": "bfloat16",
            "layer_ids": (1, 3),
            "prompts": 3,
            "memory_of": "most that a GPU had in use, by nvidia-smi",
            "in_turns": False,
            "most": 1,
            "cut": "",
            "cores": 2,
            "others_cores": 0.0,
            **changes,
        },
    )


def test_a_machine_that_had_other_work_is_said_to_have_had():
    points = {(1, True): turns(5), (1, False): turns(5)}
    busy, idle = (list(lines_of(made(points, others_cores=cores))) for cores in (0.7, 0.05))
    assert "busy     other processes used 0.7 of 2 cores meanwhile" in "\n".join(busy)
    assert "busy" not in "\n".join(idle)


def test_what_was_not_measured_in_turns_is_compared_each_with_each():
    result = made({(1, True): turns(90, 99), (1, False): turns(100, 110)})
    captured, bare = (by_batch(result, which)[1] for which in (True, False))
    found = ratio(captured, bare, in_turns=False)
    assert (found.least, found.most) == pytest.approx((90 / 110, 99 / 100))
    assert "all with capture came before all without" in "\n".join(lines_of(result))


def test_a_batch_without_a_counterpart_is_shown_and_not_compared():
    result = made({(1, True): turns(5), (2, True): turns(9), (1, False): turns(5)}, cut="no time")
    text = "\n".join(lines_of(result))
    assert "what the capture costs there was not measured" in text
    assert "ended    no time" in text


def test_the_file_is_the_one_that_plans_read():
    """A field of another name would be taken for one that is not there."""
    fields = set(TargetBenchmark.__struct_fields__)
    assert fields < set(Result.__struct_fields__)


@pytest.fixture
def running(path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [str(Path(sys.executable).with_name("draftfeed")), "bench", "target", "-c", str(path)]
    process = subprocess.Popen(
        [*command, "--minutes", "60", "--tokens", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_ends_it_at_once_and_leaves_no_file(
    running: "subprocess.Popen[str]", tmp_path: Path
):
    assert running.stdout is not None
    assert any("batch 1" in line for line in running.stdout)
    running.send_signal(2)
    output, _ = running.communicate(timeout=30)
    assert running.returncode == 130, output
    assert output.splitlines()[-1] == "draftfeed: interrupted"
    assert not (tmp_path / "bench-target.json").exists()
