import difflib
import json
import re
import unicodedata
from collections import Counter
from importlib.resources import files
from typing import Any

from draftfeed_deploy.cli import DEMO_PROMPTS

NOT_ENGLISH = {"fr", "de", "es", "it", "pt", "nl", "pl", "zh", "ja", "ko", "ru", "hi", "ar", "tr"}
WIDE_SCRIPTS = {"zh", "ja", "ko", "ru", "hi", "ar"}
ONE_WORD = re.compile(
    r"\b(yes or no|(one|single) word|true or false|capital of|how old|which is (bigger|larger))\b",
    re.IGNORECASE,
)


def load(name: str) -> list[dict[str, Any]]:
    text = (files("draftfeed_deploy") / "data" / name).read_text("utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


PROMPTS, HELD_OUT = load("prompts.jsonl"), load("heldout.jsonl")


def kind(prompt: dict[str, Any]) -> str:
    return prompt["id"].split("-")[0]


def said(prompt: dict[str, Any]) -> str:
    """What the people in the conversation said, without case, accents' encoding and punctuation."""
    text = " ".join(m["content"] for m in prompt["messages"] if m["role"] != "system")
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def test_files_hold_200_and_16_prompts_with_unique_ids() -> None:
    assert (len(PROMPTS), len(HELD_OUT)) == (DEMO_PROMPTS, 16) == (200, 16)
    assert max(Counter(prompt["id"] for prompt in PROMPTS + HELD_OUT).values()) == 1


def test_prompts_are_conversations_that_wait_for_an_answer() -> None:
    for prompt in PROMPTS + HELD_OUT:
        assert prompt.keys() == {"id", "messages"}
        assert re.fullmatch(r"[a-z]+-h?\d+", prompt["id"])
        roles = [message["role"] for message in prompt["messages"]]
        talk = roles[1:] if roles[0] == "system" else roles
        assert len(talk) % 2 == 1, prompt["id"]
        assert talk == (["user", "assistant"] * len(talk))[: len(talk)], prompt["id"]
        assert all(m.keys() == {"role", "content"} for m in prompt["messages"]), prompt["id"]
        assert all(m["content"].strip() for m in prompt["messages"]), prompt["id"]


def test_prompts_are_short_and_ask_for_more_than_a_word() -> None:
    for prompt in PROMPTS + HELD_OUT:
        assert sum(len(m["content"]) for m in prompt["messages"]) < 420, prompt["id"]
        assert not ONE_WORD.search(prompt["messages"][-1]["content"]), prompt["id"]


def test_at_least_thirty_prompts_are_not_in_english_and_look_it() -> None:
    foreign = [prompt for prompt in PROMPTS if kind(prompt) in NOT_ENGLISH]
    assert len(foreign) >= 30
    assert {kind(p) for p in foreign} == NOT_ENGLISH
    for prompt in foreign:
        if kind(prompt) in WIDE_SCRIPTS:
            assert not said(prompt).isascii(), prompt["id"]


def test_kinds_are_varied_and_mixed() -> None:
    counts = Counter(map(kind, PROMPTS))
    assert len(counts) >= 25
    assert max(counts.values()) <= 25
    # A run that is stopped early should still have seen most kinds.
    assert len({kind(p) for p in PROMPTS[:60]}) >= 20


def test_tool_prompts_list_tools_that_are_valid_json() -> None:
    tools = [prompt for prompt in PROMPTS if kind(prompt) == "tool"]
    assert len(tools) >= 15
    for prompt in tools:
        system = prompt["messages"][0]
        assert system["role"] == "system"
        starts = [m.start() for m in re.finditer(r'\{"name": "', system["content"])]
        assert starts, prompt["id"]
        for start in starts:
            tool, _ = json.JSONDecoder().raw_decode(system["content"], start)
            assert {"name", "parameters"} == tool.keys()


def test_no_prompt_appears_twice_or_nearly_twice() -> None:
    """Held-out loss would mean nothing if its prompts had been trained on."""
    texts = [said(prompt) for prompt in PROMPTS + HELD_OUT]
    assert len(set(texts)) == len(texts)
    words = [set(text.split()) for text in texts]
    for i, mine in enumerate(words):
        for j, yours in enumerate(words[:i]):
            if len(mine & yours) > 0.5 * min(len(mine), len(yours)):
                likeness = difflib.SequenceMatcher(None, texts[i], texts[j], autojunk=False).ratio()
                assert likeness < 0.7, (texts[i], texts[j])
