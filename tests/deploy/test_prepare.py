"""`draftfeed prepare`: published chat sets into prompt files that the producer takes."""

import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import chat_targets
from draftfeed_deploy.cli import main
from draftfeed_deploy.prepare_rows import MAX_LINE_BYTES
from draftfeed_producer.prompts import PromptFile, PromptsConfig
from draftfeed_producer.target import TargetConfig, load_target

Table = dict[str, Any]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {
        name: chat_targets.make_target(folder / name, getattr(chat_targets, name))
        for name in ("QWEN3", "OPENING", "DROPPING", "PLAIN", "CLOSED")
    }


def user(text: str) -> Table:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> Table:
    return {"role": "assistant", "content": text, **more}


def write(path: Path, *rows: Table | bytes) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def run(source: Path, target: Path, *arguments: str, code: int = 0) -> tuple[list[Table], Table]:
    """(lines of the prompt file, the report)"""
    out = source.parent / "prompts.jsonl"
    words = ["prepare", source, out, "--target", target, *arguments]
    assert main([str(word) for word in words]) == code
    assert not out.with_name("prompts.jsonl.part").exists()
    assert "<svg" in out.with_name("prompts.jsonl.report.html").read_text() or code
    report = json.loads(out.with_name("prompts.jsonl.report.json").read_text())
    lines = out.read_text().splitlines() if out.exists() else []
    return [json.loads(line) for line in lines], report


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("draftfeed:")]
    return line


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OPENAI = {
    "id": "tool-1",
    "tools": [WEATHER],
    "messages": [
        user("Weather in Rome?"),
        says(
            "",
            tool_calls=[
                {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        ),
        {"role": "tool", "content": "12 degrees", "tool_call_id": "c1"},
        says("Twelve degrees."),
    ],
    "source": "somewhere",
}
SHAREGPT = {
    "id": 7,
    "system": "Be brief.",
    "tools": json.dumps([WEATHER]),
    "conversations": [
        {"from": "human", "value": "Weather in Rome?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "12 degrees"},
        {"from": "gpt", "value": "Twelve degrees."},
    ],
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def test_openai_and_sharegpt_with_tool_calls_become_prompts(
    tmp_path: Path, targets: dict[str, Path]
):
    source = write(tmp_path / "set.jsonl", OPENAI, SHAREGPT, {"prompt": "Once"})
    lines, report = run(source, targets["PLAIN"])
    first, second, third = lines
    assert first["messages"] == [
        user("Weather in Rome?"),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
        {"role": "tool", "content": "12 degrees", "tool_call_id": "c1"},
    ]
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        user("Weather in Rome?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "12 degrees"},
    ]
    assert first["tools"] == second["tools"] == [WEATHER]
    assert third == {"id": "row-3", "prompt": "Once"}
    assert (first["id"], second["id"]) == ("tool-1", "7")
    assert (report["written"], report["responses_cut"], report["with_tools"]) == (3, 2, 2)
    assert report["columns_left_out"] == {"source": 1}


@pytest.mark.parametrize("mode", ["live", "prefill"])
def test_the_producer_takes_the_file_and_counts_the_same(
    tmp_path: Path, targets: dict[str, Path], mode: Any
):
    numbers = random.Random(0)
    rows = [
        {"messages": [user(f"Question {n}"), says("fox " * numbers.randint(5, 30) + str(n))]}
        for n in range(50)
    ]
    source = write(tmp_path / "set.jsonl", *rows)
    _, report = run(source, targets["PLAIN"], "--mode", mode, "--max-new-tokens", "64")
    target = load_target(TargetConfig(path=str(targets["PLAIN"])))
    config = PromptsConfig(path=str(tmp_path / "prompts.jsonl"))
    file = PromptFile(config, target.tokenizer, report["max_tokens"], mode)
    prompts = list(file.prompts())
    file.close()
    assert [prompt.key for prompt in prompts] == [f"row-{n}" for n in range(1, 51)]
    assert report["prompt_tokens"]["total"] == sum(len(prompt.input_ids) for prompt in prompts)
    if mode == "live":
        assert report["loss_mask_sums"] is None
        assert report["max_tokens"] == chat_targets.CONTEXT - 64
        return
    sums = [len(prompt.response_ids) for prompt in prompts if prompt.response_ids is not None]
    found = report["loss_mask_sums"]
    assert (found["total"], found["least"], found["most"]) == (sum(sums), min(sums), max(sums))
    assert sum(found["counts"]) == len(sums) == 50


def test_parquet_is_read_as_jsonl_is(tmp_path: Path, targets: dict[str, Path]):
    """Its structs have all fields that any row has; null is none."""
    rows = [
        {"messages": [user("hello"), says("fox")], "tools": None, "id": None},
        {
            "messages": [user("again"), says("brown", reasoning_content="hm")],
            "tools": None,
            "id": "b",
        },
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    lines, _ = run(tmp_path / "set.parquet", targets["PLAIN"])
    assert lines == [
        {"id": "row-1", "messages": [user("hello")]},
        {"id": "b", "messages": [user("again")]},
    ]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.binary(), pyarrow.large_binary()])
def test_text_that_parquet_does_not_call_text_is_text(
    tmp_path: Path, targets: dict[str, Path], kind: Any
):
    """Older writers do not; it was taken as base64, and passed."""
    message = pyarrow.struct([("role", kind), ("content", kind)])
    rows = pyarrow.table(
        {
            "id": pyarrow.array([b"a", b"b", b"c"]).cast(kind),
            "messages": pyarrow.array(
                [[{"role": b"user", "content": text}] for text in ("Köln".encode(), b"x", b"y")],
                pyarrow.list_(
                    pyarrow.struct([("role", pyarrow.binary()), ("content", pyarrow.binary())])
                ),
            ).cast(pyarrow.list_(message)),
        }
    )
    pyarrow.parquet.write_table(rows, tmp_path / "set.parquet")
    lines, report = run(tmp_path / "set.parquet", targets["PLAIN"])
    assert lines[0] == {"id": "a", "messages": [user("Köln")]}
    assert report["written"] == 3


def test_bytes_that_are_no_text_are_named(tmp_path: Path, targets: dict[str, Path]):
    table = pyarrow.table({"prompt": pyarrow.array([b"fox", b"\xff\xfe"], pyarrow.binary())})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    lines, report = run(tmp_path / "set.parquet", targets["PLAIN"])
    assert [line["prompt"] for line in lines] == ["fox"]
    assert report["faults"] == [{"row": 2, "reason": "has text that is not UTF-8"}]


def test_a_byte_order_mark_costs_no_row(tmp_path: Path, targets: dict[str, Path]):
    source = write(tmp_path / "set.jsonl", b'\xef\xbb\xbf{"prompt": "fox"}', {"prompt": "x"})
    lines, _ = run(source, targets["PLAIN"])
    assert [line["prompt"] for line in lines] == ["fox", "x"]


def test_what_is_left_out_of_messages_is_told(tmp_path: Path, targets: dict[str, Path]):
    """Thinking, calls and weights went without a word."""
    called = {
        "role": "assistant",
        "content": "x",
        "function_call": {"name": "f", "arguments": "{}"},
    }
    source = write(
        tmp_path / "set.jsonl",
        {"messages": [user("1"), called, {"role": "function", "name": "f", "content": "y"}]},
        {"messages": [user("2"), says("x", reasoning="deep"), user("on")]},
        {"messages": [user("3"), says("x", thinking="deep"), user("on")]},
        {"messages": [user("4"), says("x", weight=0, refusal=None), user("on")]},
        {"conversations": [{"from": "human", "value": "5", "image": "x.png"}]},
    )
    lines, report = run(source, targets["PLAIN"])
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert lines[0]["messages"][1]["tool_calls"] == [call]
    assert lines[0]["messages"][2] == {"role": "tool", "name": "f", "content": "y"}
    assert [line["messages"][1]["reasoning_content"] for line in lines[1:3]] == ["deep", "deep"]
    assert report["columns_left_out"] == {"messages[].weight": 1, "conversations[].image": 1}


def test_a_parquet_row_that_is_not_utf8_is_named_and_costs_no_other(
    tmp_path: Path, targets: dict[str, Path]
):
    texts = pyarrow.array([b"fox", b"\xff\xfe", b"hello"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, texts.buffers())
    table = pyarrow.table({"prompt": column})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    lines, report = run(tmp_path / "set.parquet", targets["PLAIN"])
    assert [line["prompt"] for line in lines] == ["fox", "hello"]
    assert report["faults"] == [{"row": 2, "reason": "has text that is not UTF-8"}]


def test_duplicates_and_long_ones_are_left_out_by_number(
    tmp_path: Path, targets: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    source = write(
        tmp_path / "set.jsonl",
        {"messages": [user("fox"), says("one answer")]},
        {"messages": [user("fox"), says("and another")]},  # to the same prompt
        {"messages": [user("zq " * 60)]},
        {"id": "other", "prompt": "fox"},
        {"prompt": "fox"},
    )
    lines, report = run(source, targets["PLAIN"], "--max-prompt-tokens", "60")
    assert [line["id"] for line in lines] == ["row-1", "other"]
    assert (report["duplicates"], report["over_long"], report["broken"]) == (2, 1, 0)
    assert [fault["row"] for fault in report["faults"]] == [2, 3, 5]
    text = capsys.readouterr().out
    assert "row 2: is a duplicate of row 1" in text
    assert "row 3: " in text
    assert "the limit is 60" in text


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_without_an_id_takes_none_that_is_a_number(
    tmp_path: Path, targets: dict[str, Path], order: int
):
    rows: list[Table] = [{"id": 2, "prompt": "fox"}, {"prompt": "hello"}, {"id": 1, "prompt": "a"}]
    lines, report = run(write(tmp_path / "set.jsonl", *rows[::order]), targets["PLAIN"])
    assert sorted(line["id"] for line in lines) == ["1", "2", "row-2"]
    assert report["broken"] == 0


BROKEN: dict[str, tuple[Table | bytes, str]] = {
    "not JSON": (b"{", "is not JSON"),
    "not an object": (b"[1]", "is not a JSON object"),
    "deep": (b'{"messages": ' + b"[" * 5000, "is not JSON"),
    "blank": (b"  ", "is blank"),
    "nothing in it": ({"text": "x"}, "either"),
    "no list": ({"messages": "x"}, "not JSON"),
    "a message that is none": ({"messages": ["x"]}, "not an object"),
    "unknown speaker": ({"conversations": [{"from": "alien", "value": "x"}]}, "'alien'"),
    "nothing said": ({"conversations": [{"from": "human"}]}, 'no "value"'),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type"),
    "a call without a name": (
        {"messages": [user("x"), says("", tool_calls=[{"function": {}}]), user("y")]},
        "no function with a name",
    ),
    "arguments that are not JSON": (
        {
            "conversations": [
                {"from": "human", "value": "x"},
                {"from": "function_call", "value": "{"},
            ]
        },
        "not JSON",
    ),
    "no Unicode": (b'{"prompt": "\\ud800"}', "JSON"),
    "a number too large": (b'{"prompt_ids": [123456789012345678901234567890]}', "prompt_ids"),
    "a role that is no word": ({"messages": [{"role": ["user"], "content": "x"}]}, "role"),
    "a speaker that is no word": ({"conversations": [{"from": {}, "value": "x"}]}, '"from" is {}'),
    "only an answer": ({"messages": [says("x")]}, "empty"),
    "a number beyond all bounds": (b'{"prompt": "y", "n": 1e400}', "out of range"),
    "an id that is none": ({"prompt": "y", "id": {"a": 1}}, '"id" is neither text nor a number'),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_row_is_named_and_costs_no_other(
    tmp_path: Path, targets: dict[str, Path], what: str
):
    row, reason = BROKEN[what]
    source = write(tmp_path / "set.jsonl", {"id": "good", "prompt": "x"}, row, {"prompt": "z"})
    lines, report = run(source, targets["PLAIN"])
    assert [line["prompt"] for line in lines] == ["x", "z"]
    ((fault),) = report["faults"]
    assert fault["row"] == 2
    assert reason in fault["reason"]


def test_an_id_that_comes_again_costs_no_row(tmp_path: Path, targets: dict[str, Path]):
    """Sets are put together of parts that each count from 1."""
    rows = [{"id": 1, "prompt": "x"}, {"id": 1, "prompt": "y"}, {"id": 1, "prompt": "x"}]
    lines, report = run(write(tmp_path / "set.jsonl", *rows), targets["PLAIN"])
    assert [(line["id"], line["prompt"]) for line in lines] == [("1", "x"), ("1#2", "y")]
    assert (report["renamed"], report["duplicates"], report["broken"]) == (1, 1, 0)


def test_a_line_without_end_is_not_held_in_memory(tmp_path: Path, targets: dict[str, Path]):
    long = b'{"prompt": "' + b"x" * (2 * MAX_LINE_BYTES) + b'"}'
    source = write(tmp_path / "set.jsonl", {"prompt": "a"}, long, {"prompt": "b"})
    lines, report = run(source, targets["PLAIN"])
    assert [line["prompt"] for line in lines] == ["a", "b"]
    assert "is longer than" in report["faults"][0]["reason"]


THOUGHT = says("Yes.", reasoning_content="Seven is prime.")
PLAINLY = says("Yes.")
SWITCHES = [
    # template, thinking, answers, what is wrong
    ("QWEN3", "on", THOUGHT, ""),
    ("QWEN3", "off", PLAINLY, ""),
    ("QWEN3", "template", THOUGHT, ""),
    ("QWEN3", "template", PLAINLY, "invents"),
    ("OPENING", "on", THOUGHT, ""),
    ("OPENING", "off", PLAINLY, ""),
    ("DROPPING", "on", THOUGHT, "drops"),
    ("PLAIN", "on", THOUGHT, "drops"),
    ("PLAIN", "template", PLAINLY, ""),
    ("CLOSED", "on", THOUGHT, "is over"),
]


@pytest.mark.parametrize(("template", "thinking", "answer", "wrong"), SWITCHES)
def test_a_template_that_drops_or_invents_thinking_is_an_error(
    tmp_path: Path,
    targets: dict[str, Path],
    template: str,
    thinking: str,
    answer: Table,
    wrong: str,
):
    """It would be in the loss mask, or not in it, for every sample and without a word."""
    rows = [{"messages": [user(f"Is {n} prime?"), answer]} for n in range(3)]
    source = write(tmp_path / "set.jsonl", *rows)
    arguments = ("--mode", "prefill", "--thinking", thinking, "--set", "quality.max_share=1")
    lines, report = run(source, targets[template], *arguments, code=int(bool(wrong)))
    assert bool(report["errors"]) == bool(wrong)
    assert len(lines) == (0 if wrong else 3)
    said = " ".join([*report["errors"], *(fault["reason"] for fault in report["faults"])])
    assert wrong in said


def test_what_each_switch_does_is_in_the_report(tmp_path: Path, targets: dict[str, Path]):
    source = write(tmp_path / "set.jsonl", {"messages": [user("Is 7 prime?")]})
    _, report = run(source, targets["OPENING"])
    on, off, template = report["probes"]
    assert (on["opens"], on["closes"], on["fault"]) == (True, False, "")
    assert "Only one and seven divide it." in on["mask"]
    assert (off["opens"], off["closes"], off["fault"]) == (False, True, "")
    assert "<think>" not in off["mask"]
    assert template["opens"]
    assert on["prompt_end"].endswith("assistant\n<think>\n")


def test_a_template_without_thinking_is_no_cause_for_alarm(
    tmp_path: Path, targets: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    """Below PASSED it said that the template drops, invents or rewrites something."""
    source = write(tmp_path / "set.jsonl", {"messages": [user("Is 7 prime?")]})
    run(source, targets["PLAIN"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "thinking" in line)
    assert line.startswith("  thinking   this chat template has none")
    page = (tmp_path / "prompts.jsonl.report.html").read_text()
    assert "this chat template has none" in page
    assert "drops, invents" not in page


@pytest.mark.parametrize("template", ["QWEN3", "OPENING", "DROPPING", "CLOSED"])
def test_what_a_template_with_thinking_does_is_still_told(
    tmp_path: Path, targets: dict[str, Path], capsys: pytest.CaptureFixture[str], template: str
):
    source = write(tmp_path / "set.jsonl", {"messages": [user("Is 7 prime?")]})
    run(source, targets[template])
    lines = [line for line in capsys.readouterr().out.splitlines() if "  thinking " in line]
    assert [line.split()[1] for line in lines] == ["on:", "off:", "template:"]


def test_columns_of_rows_that_are_left_out_are_not_listed(tmp_path: Path, targets: dict[str, Path]):
    """They were, and somebody looked for what the prompt file lacks."""
    good = {"messages": [user("Is 7 prime?")]}
    source = write(
        tmp_path / "set.jsonl",
        {**good, "lang": "en"},
        {**good, "again": 1},
        {"messages": [{"role": "robot", "content": "x"}], "broken": 1},
    )
    _, report = run(source, targets["PLAIN"])
    assert report["columns_left_out"] == {"lang": 1}


def test_thinking_that_the_prompt_ends_is_an_error_when_it_was_asked_for(
    tmp_path: Path, targets: dict[str, Path]
):
    """Nothing fails: the target just never thinks."""
    source = write(tmp_path / "set.jsonl", {"messages": [user("Is 7 prime?")]})
    lines, report = run(source, targets["CLOSED"], "--thinking", "on", code=1)
    assert lines == []
    assert "is over" in report["errors"][0]


def test_a_template_that_refuses_most_chats_is_not_asked_a_million_times(
    tmp_path: Path, targets: dict[str, Path]
):
    rows = [{"messages": [user(f"{n}?"), PLAINLY]} for n in range(500)]
    source = write(tmp_path / "set.jsonl", *rows)
    _, report = run(source, targets["QWEN3"], "--mode", "prefill", code=1)
    assert report["rows"] == 200
    assert "refuses 200 of 200 chats" in report["errors"][0]


def test_responses_that_are_all_the_same_are_an_error(tmp_path: Path, targets: dict[str, Path]):
    numbers = random.Random(0)
    rows = [
        {"messages": [user(f"{n}?"), says("OK." if numbers.random() < 0.87 else f"fox {n} " * 9)]}
        for n in range(300)
    ]
    source = write(tmp_path / "set.jsonl", *rows)
    lines, report = run(source, targets["PLAIN"], "--mode", "prefill", code=1)
    assert lines == []
    assert "the quality gate closes at row" in report["errors"][0]
    assert '"OK."' in report["errors"][0]


def test_a_small_set_of_one_answer_is_an_error(tmp_path: Path, targets: dict[str, Path]):
    """Less than half a window, at which the producer would look first."""
    rows = [{"messages": [user(f"{n}?"), says("OK.")]} for n in range(40)]
    source = write(tmp_path / "set.jsonl", *rows)
    _, report = run(source, targets["PLAIN"], "--mode", "prefill", code=1)
    assert "the quality gate closes at the end: 40 of 40 responses in a row" in report["errors"][0]


def test_the_page_shows_faults_as_text(tmp_path: Path, targets: dict[str, Path]):
    source = write(tmp_path / "set.jsonl", {"prompt": "x"}, b"<script>alert(1)</script>")
    run(source, targets["PLAIN"])
    page = (tmp_path / "prompts.jsonl.report.html").read_text()
    assert "<script" not in page
    assert "Tokens of prompts" in page
    assert not re.search(r"\$[a-z{]", page)


def test_a_prompt_file_that_is_there_is_not_replaced(
    tmp_path: Path, targets: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    """Its content is part of every sample's id; a run may be using it."""
    source = write(tmp_path / "set.jsonl", {"prompt": "x"})
    out = write(tmp_path / "out.jsonl", {"prompt": "mine"})
    line = fails(capsys, "prepare", source, out, "--target", targets["PLAIN"])
    assert "is there already" in line
    assert json.loads(out.read_text()) == {"prompt": "mine"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.jsonl", "o.jsonl"], "missing.jsonl: cannot be read"),
        (["set.jsonl", "nowhere/o.jsonl"], "cannot be written"),
        (["set.jsonl", "o.jsonl", "--max-new-tokens", "4096"], "leaves no room"),
        (["set.jsonl", "o.jsonl", "--max-prompt-tokens", "0"], "max_prompt_tokens"),
        (["set.jsonl", "o.jsonl", "--set", "quality.widow=1"], "did you mean 'window'?"),
        (["set.jsonl", "o.jsonl", "--set", "spool.dir=x"], "only keys of [quality]"),
        (["bad.parquet", "o.jsonl"], "is not Parquet"),
        (["dir.parquet", "o.jsonl"], "dir.parquet"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    targets: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "set.jsonl", {"prompt": "x"})
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    (tmp_path / "dir.parquet").mkdir()
    assert words in fails(capsys, "prepare", *arguments, "--target", targets["PLAIN"])
    assert not list(tmp_path.glob("o.jsonl*"))


def test_a_set_without_a_usable_row_fails_and_says_why(tmp_path: Path, targets: dict[str, Path]):
    source = write(tmp_path / "set.jsonl", b"x", b"y")
    lines, report = run(source, targets["PLAIN"], code=1)
    assert lines == []
    assert report["errors"] == ["none of the 2 rows can be used"]


@pytest.mark.parametrize(
    ("package", "source"),
    [("transformers", "set.jsonl"), ("matplotlib", "set.jsonl"), ("pyarrow", "set.parquet")],
)
def test_a_package_that_is_missing_is_one_line_with_the_cure(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    source: str,
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    line = fails(capsys, "prepare", source, tmp_path / "out.jsonl", "--target", tmp_path)
    assert line.endswith(
        f"needs {package}, which is not installed; in the checkout run: pip install '.[prepare]'"
    )
