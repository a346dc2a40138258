"""`draftfeed quality`: the producer's gate over responses that exist."""

import json
import random
from pathlib import Path

import pytest

import chat_targets
from draftfeed_deploy.cli import main


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_targets.make_target(tmp_path_factory.mktemp("t") / "target", chat_targets.PLAIN)


def write(path: Path, answers: list[str]) -> Path:
    """Half of them in ShareGPT's form."""
    with path.open("w") as file:
        for number, answer in enumerate(answers):
            question = f"Question {number}?"
            row: dict[str, list[dict[str, str]]] = {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
            if number % 2:
                turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
                row = {"conversations": turns}
            file.write(json.dumps(row) + "\n")
    return path


def judge(file: Path, target: Path, *arguments: str) -> int:
    return main(["quality", str(file), "--target", str(target), *arguments])


def test_87_percent_of_ok_would_stop_the_producer(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
):
    numbers = random.Random(0)
    answers = ["OK." if numbers.random() < 0.87 else f"the fox {n} " * 9 for n in range(1000)]
    file = write(tmp_path / "done.jsonl", answers)
    assert judge(file, target, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["closes_after"] <= 200
    assert found["responses"] == 1000
    assert found["common"] == [{"text": "OK.", "times": answers.count("OK.")}]
    assert found["degenerate"]["short"] == answers.count("OK.")
    assert judge(file, target) == 1
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith(f"FAILED: the gate closes after {found['closes_after']} responses: ")
    assert head.count('"OK."') == 3
    assert any(f'{answers.count("OK.")} times "OK."' in line for line in rest)


def test_a_small_file_is_judged_at_its_end(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
):
    """It has less than half a window, at which the producer would look first."""
    assert judge(write(tmp_path / "done.jsonl", ["OK."] * 45), target) == 1
    head = capsys.readouterr().out.splitlines()[0]
    assert head.startswith(
        "FAILED: the gate closes after 45 responses: 45 of 45 responses in a row are"
    )
    answers = ["OK."] * 9 + [f"the quick brown fox {n} says hello" for n in range(40)]
    assert judge(write(tmp_path / "good.jsonl", answers), target) == 0


def test_one_word_answers_and_tool_calls_pass(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
):
    """Unless somebody is stricter."""
    numbers = random.Random(0)

    def answer(n: int) -> str:
        kind = numbers.random()
        if kind < 0.3:
            return numbers.choice(["Yes", "No", f"{n}"])
        if kind < 0.6:
            return f"the quick brown fox says {n} hello to a small tokenizer"
        return f'{{"name": "weather", "city": {n % 300}}}' if kind < 0.95 else '{"name": "time"}'

    file = write(tmp_path / "done.jsonl", [answer(n) for n in range(1000)])
    assert judge(file, target) == 0
    assert capsys.readouterr().out.startswith("PASSED: 1,000 responses")
    assert judge(file, target, "--set", "quality.max_share=0.2") == 1


def test_thinking_without_an_end_is_found_by_its_tags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = chat_targets.make_target(tmp_path / "target", chat_targets.PLAIN)
    answers = [f"<think>\nWait, {n} fox fox fox fox fox fox" for n in range(120)]
    assert judge(write(tmp_path / "done.jsonl", answers), target) == 1
    assert "thinking without an end" in capsys.readouterr().out


def test_broken_rows_are_named(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path / "done.jsonl", ["a quick brown fox says hello to a small tokenizer"])
    with file.open("a") as more:
        more.write('{"prompt": "no response"}\n{\n')
    assert judge(file, target) == 0
    text = capsys.readouterr().out
    assert "2 broken rows" in text
    assert "row 2: has no response" in text
    assert "row 3: is not JSON" in text


def test_a_file_without_responses_is_one_line(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n')
    assert judge(file, target) == 2
    errors = capsys.readouterr().err.splitlines()
    (line,) = [one for one in errors if one.startswith("draftfeed: ")]
    assert "has no responses that can be used, row 1: " in line
