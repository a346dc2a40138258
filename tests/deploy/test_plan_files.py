"""Plan files: what they extend, a model's config.json, measurements; and bad ones, in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftfeed_deploy.cli import main

MINE = """
extends = "b-split"
title = "mine"
[workload]
prompts = 1000
"""
DENSE = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
HYBRID = {
    "text_config": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "full_attention_interval": 4,
        "linear_num_value_heads": 48,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
}
POINTS = [
    {
        "batch": 32,
        "capture": True,
        "output_tokens_per_second": 700,
        "prefill_tokens_per_second": 6100,
    },
    {"batch": 64, "capture": True, "output_tokens_per_second": 900, "memory_bytes": 80e9},
    {"batch": 128, "capture": False, "output_tokens_per_second": 990, "later_field": 1},
]
BENCHMARK = {
    "format": "draftfeed-bench-target-1",
    "target": "qwen",
    "engine": "sglang",
    "device": "a card",
    "gpus_per_replica": 2,
    "output_includes_prefill": True,
    "prompt_tokens": 100,
    "response_tokens": 64,
    "points": POINTS,
}

FITTING = {
    **BENCHMARK,
    "device": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "hidden_size": 5120,
    "prompt_tokens": 300,
}
"""Of what the shipped b-split plans."""


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], file: str, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--scenario", file, *arguments, "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    return only


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_a_file_says_only_what_differs_from_what_it_extends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = planned(capsys, write(tmp_path / "mine.toml", MINE))
    assert (found["scenario"], found["title"]) == ("mine", "mine")
    assert found["results"]["response_tokens"]["value"] == 1000 * 500 * 6
    assert found["assumptions"]["workload.response_tokens"]["value"] == 500
    assert found["claims"] == []  # they were about another workload


def test_a_file_beside_it_can_be_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "mine.toml", MINE)
    other = write(tmp_path / "other.toml", 'extends = "mine.toml"\n[workload]\nepochs = 1\n')
    found = planned(capsys, other)
    assert found["results"]["response_tokens"]["value"] == 1000 * 500


@pytest.mark.parametrize("kinds", [None, ["linear_attention"] * 3 + ["full_attention"]])
def test_a_hybrid_targets_memory_is_read_from_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: list[str] | None
):
    """The file extends a scenario that has these figures: what it says of a config outdoes them."""
    config = json.loads(json.dumps(HYBRID))
    config["text_config"] |= {"num_hidden_layers": 32, "num_key_value_heads": 2}
    if kinds:
        config["text_config"]["layer_types"] = kinds * 8
        del config["text_config"]["full_attention_interval"]
    write(tmp_path / "config.json", json.dumps(config))
    text = MINE + '[target]\nconfig = "config.json"\nhead_dim = 128\n'
    found = planned(capsys, write(tmp_path / "mine.toml", text))
    assert found["results"]["memory_token_bytes"]["value"] == 8 * 2 * 1 * 128 * 2
    assert found["results"]["memory_state_bytes"]["value"] == 153_944_064 / 4
    assert found["assumptions"]["target.kv_heads"]["note"] == "config.json"
    assert found["assumptions"]["target.head_dim"]["note"] == ""


def test_the_scenarios_figures_are_those_of_such_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path / "config.json", json.dumps(HYBRID))
    results = planned(capsys, "b-split")["results"]
    assert planned(capsys, "b-split", "--set", f"target.config={file}")["results"] == results
    assert results["memory_token_bytes"]["value"] == 32_768


def test_a_dense_targets_memory_is_read_from_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "config.json", json.dumps(DENSE))
    text = WHOLE.replace("[target]", '[target]\nconfig = "model"')
    found = planned(capsys, write(tmp_path / "mine.toml", text))
    assert found["results"]["row_bytes"]["value"] == 5 * 576 * 2
    assert found["results"]["memory_token_bytes"]["value"] == 30 * 2 * 3 * 64 * 2
    assert found["results"]["memory_state_bytes"]["value"] == 0
    assert found["assumptions"]["target.kv_layers"]["note"] == "config.json"


WHOLE = """
[workload]
prompts = 10
prompt_tokens = 20
response_tokens = 30
[target]
weights_bytes = 270e6
[hardware]
gpu = "none"
gpus = 1
memory_bytes = 8e9
memory_bytes_per_second = 20e9
flops = 1e11
[layout]
replicas = 1
gpus_per_replica = 1
[rates]
output_tokens_per_second = 100
prefill_tokens_per_second = 300
[training]
gpus = 1
"""


def test_unknown_memory_is_said_and_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = WHOLE.replace("[target]", "[target]\nhidden_size = 576")
    found = planned(capsys, write(tmp_path / "mine.toml", text))
    assert "fits_longest" not in found["results"]
    assert any("is not known" in one["text"] for one in found["findings"])
    assert found["results"]["output_seconds"]["value"] == pytest.approx(3)


def test_a_measurement_replaces_an_assumption_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = MINE + "[measured]\noutput_tokens_per_second = 1000\nratio = 1.2\n"
    found = planned(capsys, write(tmp_path / "mine.toml", text))
    assert found["results"]["output_seconds"]["value"] == pytest.approx(1000 * 500 * 6 / 4000)
    rate = found["assumptions"]["rates.output_tokens_per_second"]
    assert (rate["source"], rate["note"]) == ("measured", "[measured], assumed 1250")
    assert found["assumptions"]["stream.ratio"]["source"] == "measured"


def test_what_is_set_outdoes_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It was passed over without a word."""
    text = MINE + "[measured]\noutput_tokens_per_second = 1000\nprefill_tokens_per_second = 6000\n"
    mine, benchmark = (
        write(tmp_path / "mine.toml", text),
        write(tmp_path / "target.json", json.dumps(FITTING)),
    )
    settings = ["rates.output_tokens_per_second=1100", "rates.prefill_share=0.1"]
    flags = [word for setting in settings for word in ("--set", setting)]
    for more in ([], ["--measured", benchmark]):
        assumed = planned(capsys, mine, *flags, *more)["assumptions"]
        rate = assumed["rates.output_tokens_per_second"]
        assert (rate["value"], rate["source"], rate["note"]) == (1100, "given", "--set")
        assert assumed["rates.prefill_share"]["value"] == 0.1
    rate = assumed["layout.batch"]
    assert (rate["value"], rate["source"]) == (64, "measured")


def test_both_rates_of_a_benchmark_are_of_the_same_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A small batch may prefill faster than the one that is planned with."""
    points = [
        {**POINTS[0], "prefill_tokens_per_second": 6100},
        {**POINTS[1], "prefill_tokens_per_second": 5800},
    ]
    benchmark = write(tmp_path / "target.json", json.dumps({**FITTING, "points": points}))
    mine = write(tmp_path / "mine.toml", MINE)
    assumed = planned(capsys, mine, "--measured", benchmark)["assumptions"]
    assert assumed["layout.batch"]["value"] == 64
    assert assumed["rates.prefill_tokens_per_second"]["value"] == 5800


@pytest.mark.parametrize(("mode", "rate", "batch"), [("live", 900, 64), ("prefill", 990, 128)])
def test_a_benchmark_of_the_target_replaces_rates_and_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, rate: float, batch: float
):
    """What it was with capture, where it is captured while generating, and without otherwise."""
    text = MINE + f'[layout]\ncapture = "{mode}"\n[rates]\nprefill_share = 0.1\n'
    benchmark = write(tmp_path / "target.json", json.dumps(BENCHMARK))
    mine = write(tmp_path / "mine.toml", text)
    found = planned(capsys, mine, "--measured", benchmark)
    assumed = found["assumptions"]
    assert assumed["rates.output_tokens_per_second"]["value"] == rate
    assert assumed["rates.output_tokens_per_second"]["source"] == "measured"
    assert benchmark in assumed["rates.output_tokens_per_second"]["note"]
    assert assumed["layout.batch"]["value"] == batch
    assert assumed["rates.prefill_share"]["value"] is None
    assert found["results"]["prefill_seconds"]["value"] == 0  # it is in the output rate
    assert assumed["rates.prefill_tokens_per_second"]["value"] == 5000  # that batch has none


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cpu: AMD EPYC"}, "measured on 'cpu: AMD EPYC'; the plan has 'RTX PRO 6000'"),
        ({"gpus_per_replica": 1}, "measured on 1 GPUs a replica; the plan has 2"),
        ({"prompt_tokens": 59}, "measured with prompts of 59 tokens; the plan's have 328"),
        ({"prompt_tokens": 3000}, "measured with prompts of 3,000 tokens; the plan's have 328"),
        ({"hidden_size": None}, "measured with target qwen; the plan names none to compare"),
        ({"cut": "time was up before batch 16"}, "it ended early: time was up before batch 16"),
        ({"others_cores": 1.5, "cores": 2}, "other processes used 1.5 of 2 cores meanwhile"),
        ({"format": "draftfeed-bench-target-1"}, ""),
    ],
)
def test_a_benchmark_of_something_else_is_doubted_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
):
    """It went into the plan without a word, and days hung on it."""
    file = write(tmp_path / "target.json", json.dumps({**FITTING, **change}))
    found = planned(capsys, "b-split", "--measured", file)
    doubts = [one for one in found["findings"] if one["text"].startswith(file)]
    assert [one["text"].partition(": ")[2].startswith(words) for one in doubts] == [True] * bool(
        words
    )
    assert all(one["grade"] == "warning" for one in doubts)
    assert main(["plan", "b-split", "--measured", file]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("directory", "doubted"),
    [
        ("Qwen", False),
        ("other", True),
        ("models--org--qwen/snapshots/0123abc", False),
        ("models--org--other/snapshots/0123abc", True),
    ],
)
def test_the_name_of_a_benchmarks_target_is_that_of_the_plans_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], directory: str, doubted: bool
):
    (tmp_path / directory).mkdir(parents=True)
    write(tmp_path / directory / "config.json", json.dumps(HYBRID))
    mine = write(tmp_path / "mine.toml", f'{MINE}[target]\nconfig = "{directory}"\n')
    file = write(tmp_path / "target.json", json.dumps({**FITTING, "target": "org/qwen"}))
    found = planned(capsys, mine, "--measured", file)
    named = [one["text"] for one in found["findings"] if "measured with target" in one["text"]]
    assert bool(named) == doubted


def test_a_benchmark_of_a_target_of_another_width_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path / "target.json", json.dumps({**FITTING, "hidden_size": 576}))
    line = fails(capsys, "b-split", "--measured", file)
    assert "qwen has hidden size 576, and the plan's has 5120" in line


def test_one_sees_which_values_are_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """All that came from a shipped scenario was "given", as one's own figures are."""
    write(tmp_path / "mine.toml", MINE + "[layout]\nbatch = 8\n")
    other = write(tmp_path / "other.toml", 'extends = "mine.toml"\n[workload]\nepochs = 1\n')
    assert main(["plan", other, "--set", "layout.replicas=2"]) == 0
    shown = capsys.readouterr().out
    beside = [line.strip() for line in shown.splitlines()]
    assert "given: workload.epochs 1" in beside
    assert "mine: layout.batch 8" in beside
    assert "--set: layout.replicas 2" in beside
    assert any(line.endswith("a-pro6000: workload.prompt_tokens 328") for line in beside)
    assert shown.splitlines()[0] == "other"  # the title is that of another plan


def test_a_short_title_heads_its_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mine = write(tmp_path / "x1.toml", MINE)
    assert main(["plan", "b-split", mine]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["b-split", "mine"]
    assert "x1: mine" in lines
    assert "b-split: B: eight RTX PRO 6000 generate, eight B200 train" in lines


def test_a_plan_without_prices_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "b-split"]) == 0
    assert "no cost is shown: [prices] has none" in capsys.readouterr().out
    assert main(["plan", "b-split", "--set", "prices.training_node_per_hour=30"]) == 0
    shown = capsys.readouterr().out
    assert "no cost is shown" not in shown
    assert "USD, in all" in shown


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"points": []}, "points"),
        ({"points": POINTS[2:]}, "no point that was measured with capture"),
        ({"format": "other"}, "format"),
        ({"output_includes_prefill": "yes"}, "output_includes_prefill"),
        ({"points": [{"batch": 1, "capture": True, "output_tokens_per_second": 0}]}, "points"),
    ],
)
def test_a_benchmark_that_cannot_be_used_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
):
    file = write(tmp_path / "target.json", json.dumps({**BENCHMARK, **change}))
    line = fails(capsys, "--scenario", "b-split", "--measured", file)
    assert line.startswith(f"draftfeed: {file}: ")
    assert words in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[workload\n", "is not TOML"),
        ("", "workload"),
        (MINE + "[layuot]\nbatch = 1\n", "did you mean 'layout'?"),
        (MINE + "[layout]\nbacth = 1\n", "did you mean 'batch'?"),
        (MINE + "[layout]\nbatch = 0\n", "layout.batch"),
        (MINE + "[layout]\nreplicas = 0.5\n", "layout.replicas is 0.5, which is no whole number"),
        (MINE + "[layout]\nbatch = nan\n", "layout.batch"),
        (MINE + "[layout]\nbatch = inf\n", "layout.batch"),
        (MINE + '[layout]\nbatch = "64"\n', "layout.batch"),
        (MINE + '[layout]\nlater_epochs = "again"\n', "layout.later_epochs"),
        (MINE + "[target]\nweights_bytes = -1\n", "target.weights_bytes"),
        (MINE + "target = 1\n", "target"),
        (MINE.replace("prompts = 1000", "longest_tokens = 100"), "longest_tokens"),
        (MINE.replace("b-split", "missing"), "neither a file nor a scenario"),
        (MINE.replace("b-split", "missing.toml"), "cannot be read"),
        (MINE.replace("b-split", "mine.toml"), "or itself"),
        ("extends = 1\n", "extends"),
        (MINE + '[target]\nconfig = "nowhere"\n', "cannot be read"),
        (WHOLE, "target.hidden_size"),
    ],
)
def test_a_bad_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
):
    line = fails(capsys, "--scenario", write(tmp_path / "mine.toml", text))
    assert line.startswith("draftfeed: ")
    assert words in line


def test_a_file_without_end_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.toml").symlink_to("/dev/zero")
    assert "has more than" in fails(capsys, str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    "config",
    [
        "[1, 2]",
        "{",
        "{}",
        '{"text_config": 3}',
        '{"num_hidden_layers": "x"}',
        "[" * 100_000,
        *(
            json.dumps({**DENSE, key: value})
            for key in ("num_hidden_layers", "hidden_size", "vocab_size", "head_dim")
            for value in ("x", "12", -1, 1e300, True)
        ),
        json.dumps({**DENSE, "layer_types": "full"}),
        json.dumps({**DENSE, "full_attention_interval": "4"}),
    ],
)
def test_a_bad_config_of_a_target_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str
):
    write(tmp_path / "config.json", config)
    text = MINE + '[target]\nconfig = "config.json"\n'
    line = fails(capsys, "--scenario", write(tmp_path / "mine.toml", text))
    assert "config.json" in line


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ('result = "elapsed_seconds"\nunit = "fortnights"', "unit must be one of"),
        ('result = "elapsed"\nunit = "d"', "no result 'elapsed'"),
        ('result = "elapsed_seconds"\nunit = "TB"', "is in seconds"),
        (
            'result = "prefill_seconds"\nunit = "%"\n'
            'against = ["rates.output_includes_prefill=true"]',
            "is 0 in what it is against",
        ),
    ],
)
def test_a_claim_about_nothing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], claim: str, words: str
):
    text = f'{MINE}[[claims]]\nsays = "it"\nvalue = 1\nrounding = 1\n{claim}\n'
    assert words in fails(capsys, "--scenario", write(tmp_path / "mine.toml", text))


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str]):
    assert "--list" in fails(capsys)
    assert "neither" in fails(capsys, "--scenario", "z-split")
    assert "--set" in fails(capsys, "--scenario", "b-split", "--set", "layout.batch")
    assert "side by side" in fails(capsys, *["--scenario", "b-split"] * 9)
