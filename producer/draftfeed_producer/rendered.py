"""Does the text that a chat template made of messages say what they say, and nothing else?

Templates are programs that come with the model. They drop thinking or invent it, leave tool calls
out, write a text of their own behind an answer, and none of it raises an error; all of it is then
under the loss mask, or missing there.
"""

import json
from collections.abc import Collection, Iterator
from typing import Any

THINK, THOUGHT = "<think>", "</think>"

Call = dict[str, Any]


def says_response(
    rest: str,
    reasoning: str,
    content: str,
    calls: Collection[Call],
    *,
    opened: bool,
    marks: Collection[str],
) -> bool:
    """Whether `rest` is the reasoning between its tags, then the content, then the calls, each
    once, and beside them blanks and marks alone.

    rest: what the template puts behind the prompt. opened: whether the prompt ends inside the
    thinking. marks: the tokenizer's special tokens, as text. Around calls there may be anything but
    thinking, since every template writes them in a form of its own.
    """
    if reasoning:
        head, found, rest = rest.partition(reasoning)
        tagged = opened or THINK in head
        if not found or not _blank(head if opened else head.replace(THINK, "", 1), marks):
            return False
        if tagged:
            between, found, rest = rest.partition(THOUGHT)
            if not found or not _blank(between, marks):
                return False
    elif opened:
        content = content.removeprefix(THINK).lstrip()
    lead, found, tail = rest.partition(content) if content else ("", "", rest)
    if found != content or not _blank(lead, marks):
        return False
    return _says_calls_alone(tail, calls) if calls else _blank(tail, marks)


def says_calls(text: str, calls: Collection[Call]) -> bool:
    """Whether each function's name and all of its arguments are in there, in whatever form."""
    return all(_in(word, text) for call in calls for word in _words(call))


def _says_calls_alone(tail: str, calls: Collection[Call]) -> bool:
    own = json.dumps(list(calls))
    invented = any(tail.count(tag) > own.count(tag) for tag in (THINK, THOUGHT))
    return not invented and says_calls(tail, calls)


def _blank(text: str, marks: Collection[str]) -> bool:
    for mark in marks:
        text = text.replace(mark, "")
    return not text.strip()


def _words(call: Call) -> Iterator[str]:
    function = call.get("function", call)
    if not isinstance(function, dict):
        return
    yield str(function.get("name", ""))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            yield arguments
            return
    yield from _leaves(arguments)


def _leaves(value: Any) -> Iterator[str]:
    """Of truth values and nothing: templates write each of them in several ways."""
    match value:
        case dict():
            for key, inner in value.items():
                yield str(key)
                yield from _leaves(inner)
        case list():
            for inner in value:
                yield from _leaves(inner)
        case str():
            yield value
        case int() | float() if not isinstance(value, bool):
            yield json.dumps(value)


def _in(word: str, text: str) -> bool:
    """As it is, or inside a JSON text, which may itself be inside one."""
    escaped = json.dumps(word)[1:-1]
    unicode = json.dumps(word, ensure_ascii=False)[1:-1]
    twice = json.dumps(unicode, ensure_ascii=False)[1:-1]
    return any(form in text for form in (word, escaped, unicode, twice))
