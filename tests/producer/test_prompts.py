import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from draftfeed_producer.errors import PromptError
from draftfeed_producer.prompts import PromptFile, PromptsConfig, prompt_limit
from draftfeed_proto.ids import IdSet


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_models.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def chat(text: str, **fields: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields})


@pytest.fixture
def opened(tmp_path: Path, tokenizer: Any):
    files: list[PromptFile] = []

    def open_lines(*lines: str | bytes, limit: int = 200, **config: Any) -> PromptFile:
        path = tmp_path / "prompts.jsonl"
        raw = [line.encode() if isinstance(line, str) else line for line in lines]
        path.write_bytes(b"".join(line + b"\n" for line in raw))
        file = PromptFile(PromptsConfig(path=str(path), **config), tokenizer, limit)
        files.append(file)
        return file

    yield open_lines
    for file in files:
        file.close()


def test_chats_and_raw_prompts_become_tokens(opened, tokenizer: Any):
    file = opened(chat("hello fox", id="a"), json.dumps({"prompt": "hello fox"}))
    first, second = file.prompts()
    assert tokenizer.decode(first.input_ids) == (
        "<|im_start|>user\nhello fox<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(second.input_ids) == "hello fox"
    assert (first.key, second.key) == ("a", "1")
    assert first.input_ids.dtype == np.int32


def test_ids_name_the_bytes_of_the_file_and_the_raw_line(opened, tmp_path: Path):
    lines = [chat(f"number {i}") for i in range(5)]
    lines[1] = "{broken"
    file = opened(*lines, skip_bad=True, shard_size=2, epoch=3)
    data = (tmp_path / "prompts.jsonl").read_bytes()
    dataset = hashlib.sha256(data).hexdigest()[:16]
    assert [str(id) for id in file.ids()] == [
        f"{dataset}/3/0/0",
        f"{dataset}/3/1/2",
        f"{dataset}/3/1/3",
        f"{dataset}/3/2/4",
    ]
    assert [prompt.id for prompt in file.prompts()] == list(file.ids())
    assert (file.lines, len(file), file.shards.ranges, file.bad) == (5, 4, (0, 3), {1})
    assert [str(id) for id in file.skipped()] == [f"{dataset}/3/0/1"]


BROKEN = {
    '{"messages": [': "truncated",
    "": "blank",
    "[1, 2]": "Expected `object`",
    '{"messages": [{"role": "user", "content": "x"}], "mesages": 1}': "unknown field `mesages`",
    '{"id": "x"}': 'either "messages" or "prompt"',
    '{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}': "either",
    '{"messages": []}': "is empty",
    '{"messages": [{"role": "robot", "content": "x"}]}': "Invalid enum value 'robot'",
    '{"messages": [{"role": "user"}]}': "needs `content`",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}': (
        "the last message is the assistant's"
    ),
    '{"prompt": ""}': "has no tokens",
    '{"prompt": "x", "tools": []}': '"tools" need "messages"',
    '{"prompt": 3}': "Expected `str | null`, got `int`",
    '{"id": 7, "prompt": "x"}': "Expected `str | null`, got `int`",
    json.dumps({"prompt": "fox " * 300}): "the limit is 200",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named_with_its_number_and_reason(opened, line: str):
    with pytest.raises(PromptError) as caught:
        opened(chat("one"), chat("two"), line, chat("four"))
    assert caught.value.line == 3
    assert ", line 3: " in str(caught.value)
    assert BROKEN[line] in caught.value.reason
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", BROKEN)
def test_skip_bad_counts_and_goes_on(opened, line: str):
    file = opened(chat("one"), chat("two"), line, chat("four"), skip_bad=True)
    assert [prompt.id.ordinal for prompt in file.prompts()] == [0, 1, 3]
    assert file.bad == {2}
    assert [error.line for error in file.examples] == [3]


def test_text_that_is_not_utf8_is_a_broken_line(opened):
    with pytest.raises(PromptError, match="line 2: Invalid UTF-8"):
        opened(chat("one"), b'{"prompt": "\xff"}')


def test_duplicate_ids_are_refused_with_both_line_numbers(opened):
    lines = [chat("one", id="x"), chat("two"), chat("three", id="x")]
    with pytest.raises(PromptError, match=r"line 3: \"id\" 'x' is also that of line 1"):
        opened(*lines)
    assert opened(*lines, skip_bad=True).bad == {2}


def test_an_id_equal_to_another_lines_number_is_a_duplicate(opened):
    with pytest.raises(PromptError, match=r"line 3: \"id\" '1' is also that of line 2"):
        opened(chat("one"), chat("two"), chat("three", id="1"))


def test_a_line_found_bad_only_now_is_no_prompt_from_then_on(opened, tokenizer: Any):
    file = opened(*(chat(f"number {i}", id=f"k{i}") for i in range(4)), skip_bad=True)
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('system first') }}"
    try:
        assert file.find(2) is None
    finally:
        tokenizer.chat_template = template
    assert [id.ordinal for id in file.ids()] == [0, 1, 3]
    assert file.skipped() == IdSet([file.id(2)])
    assert [prompt.id.ordinal for prompt in file.prompts()] == [0, 1, 3]


def test_an_empty_file_is_refused(opened):
    with pytest.raises(PromptError, match="is empty"):
        opened()


def test_a_file_without_one_usable_line_is_refused(opened):
    with pytest.raises(PromptError, match="none of its 2 lines can be used"):
        opened("{", "{", skip_bad=True)


def test_a_missing_file_is_one_clear_line(tmp_path: Path, tokenizer: Any):
    config = PromptsConfig(path=str(tmp_path / "absent.jsonl"))
    with pytest.raises(PromptError, match="cannot be read: No such file"):
        PromptFile(config, tokenizer, 100)


def test_a_last_line_without_newline_counts(tmp_path: Path, tokenizer: Any):
    path = tmp_path / "p.jsonl"
    path.write_text(chat("one") + "\n" + chat("two"))
    file = PromptFile(PromptsConfig(path=str(path)), tokenizer, 100)
    assert [prompt.id.ordinal for prompt in file.prompts()] == [0, 1]
    file.close()


def test_tools_reach_the_chat_template(opened, tokenizer: Any):
    tool = {"type": "function", "function": {"name": "weather"}}
    (prompt,) = opened(chat("rain?", tools=[tool])).prompts()
    assert '"name": "weather"' in tokenizer.decode(prompt.input_ids)


def test_tool_calls_and_text_parts_pass(opened):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    assert len(list(opened(json.dumps({"messages": messages})).prompts())) == 1


@pytest.mark.parametrize(("thinking", "end"), [(None, "\n"), (True, "\n"), (False, "</think>")])
def test_thinking_is_the_templates_default_unless_configured(opened, tokenizer, thinking, end):
    """Thinking templates drop or invent `<think>` in the mask."""
    (prompt,) = opened(chat("x"), thinking=thinking).prompts()
    assert tokenizer.decode(prompt.input_ids).endswith(end)


def test_what_the_chat_template_refuses_is_a_broken_line(opened, tokenizer: Any):
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('system first') }}"
    try:
        with pytest.raises(PromptError, match="line 1: the chat template refuses it: system first"):
            opened(chat("x"))
    finally:
        tokenizer.chat_template = template


def test_prompts_can_be_read_in_any_order(opened):
    file = opened(*(chat(f"number {i}", id=f"k{i}") for i in range(10)))
    assert [prompt.key for prompt in file.prompts([7, 2, 2])] == ["k7", "k2", "k2"]
    assert file.prompt(9).key == "k9"
    with pytest.raises(PromptError, match="has 10 lines"):
        file.prompt(10)


def test_a_line_found_too_long_only_when_it_is_due(opened):
    """Past the first lines only long ones are tokenised at the start; this one is short in bytes
    and long in tokens, because its template adds more than the line has."""
    lines = [chat("x")] * 300 + [json.dumps({"messages": [{"role": "user", "content": "q"}] * 3})]
    fits = len(next(opened(*lines).prompts()).input_ids)
    strict = opened(*lines, limit=2 * len(lines[-1]))
    assert len(strict.prompt(300).input_ids) > fits
    file = opened(*lines, limit=fits, skip_bad=True)
    assert len(list(file.prompts())) == 300
    assert file.bad == {300}


def test_a_file_that_changes_in_use_is_noticed(opened, tmp_path: Path):
    file = opened(chat("one"), chat("two"))
    path = tmp_path / "prompts.jsonl"
    path.write_text(chat("six") + "\n" + chat("ten") + "\n")
    os.utime(path, ns=(1, 1))
    with pytest.raises(PromptError, match="was changed while in use"):
        file.prompt(0)


def test_prompt_limit_leaves_room_for_the_response():
    config = PromptsConfig(path="x")
    assert prompt_limit(config, 8192, 512) == 7680
    assert prompt_limit(PromptsConfig(path="x", max_prompt_tokens=100), 8192, 512) == 100
    with pytest.raises(PromptError, match="leaves no room"):
        prompt_limit(config, 512, 512)


@pytest.mark.parametrize("bad", [{"shard_size": 0}, {"epoch": -1}, {"max_prompt_tokens": 0}])
def test_config_refuses_impossible_numbers(bad: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(bad))):
        PromptsConfig(path="x", **bad)  # type: ignore[arg-type]
