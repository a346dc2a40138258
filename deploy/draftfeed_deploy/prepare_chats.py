"""Rows as people publish them, in the form that the producer's prompt file has.

OpenAI's `messages` and ShareGPT's `conversations`, with tool calls; text and ids as they are.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from draftfeed_producer.errors import LineError

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""Of ShareGPT and those who write it otherwise."""
CALLS = ("function_call", "tool_call")
"""Whose text is a call as JSON."""
AS_IT_IS = ("prompt", "response", "prompt_ids", "response_ids", "finish_reason")
MESSAGE_KEYS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Of a message, what was thought, as one or the other calls it."""
TURN_KEYS = ("from", "value")
KNOWN = ("id", "sample", "messages", "conversations", "tools", "system", *AS_IT_IS)

Table = dict[str, Any]


def line_of(row: Table) -> Table:
    """A line of a prompt file, not checked yet; other columns are left out. Raises LineError."""
    line: Table = {key: row[key] for key in AS_IT_IS if row.get(key) is not None}
    if row.get("id") is not None:
        if not isinstance(row["id"], str | int | float):
            raise LineError('"id" is neither text nor a number')
        line["id"] = str(row["id"])
    if row.get("messages") is not None:
        line["messages"] = [_message(one, row) for one in _list(row["messages"], "messages")]
    elif row.get("conversations") is not None:
        turns = _list(row["conversations"], "conversations")
        line["messages"] = [*_system(row), *(_message(one, row) for one in turns)]
    tools = _tools(row.get("tools"))
    if tools:
        line["tools"] = tools
    return line


def left_out(row: Table) -> set[str]:
    """What the line has not of a row, such as "lang" or "messages[].weight"."""
    names = row.keys() - set(KNOWN)
    for column, known in (
        ("messages", {*MESSAGE_KEYS, *REASONING, "function_call"}),
        ("conversations", set(TURN_KEYS)),
    ):
        turns = row.get(column)
        for turn in _list(turns, column) if turns is not None else ():
            names |= {f"{column}[].{key}" for key, value in turn.items() if value is not None} - {
                f"{column}[].{key}" for key in known
            }
    return names


def without_response(line: Table) -> tuple[Table, bool]:
    """(the line as a prompt, whether it had a response)"""
    messages = line.get("messages")
    kept = {key: value for key, value in line.items() if key not in _OF_RESPONSES}
    if messages and messages[-1]["role"] == "assistant":
        return {**kept, "messages": messages[:-1]}, True
    return kept, "response" in line or "response_ids" in line


def encoded(table: Table, order: Literal["sorted"] | None = None) -> bytes:
    """As JSON. Raises LineError."""
    try:
        return msgspec.json.encode(table, order=order)
    # A lone surrogate, a number that JSON readers do not take, a value that Parquet alone has.
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError) as error:
        raise LineError(f"cannot be written as JSON: {error}") from None


_OF_RESPONSES = ("response", "response_ids", "finish_reason")


def _list(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        value = _json(value, name)
    if not isinstance(value, list):
        raise LineError(f'"{name}" is not a list')
    return value


def _system(row: Table) -> list[Table]:
    """ShareGPT's own column for it."""
    text = row.get("system")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text else []


def _message(turn: Any, row: Table) -> Table:
    if not isinstance(turn, Mapping):
        raise LineError("a message is not an object")
    if "from" in turn:
        return _turn(turn)
    message = {key: turn[key] for key in MESSAGE_KEYS if turn.get(key) is not None}
    thought = next((turn[key] for key in REASONING if turn.get(key)), None)
    if thought is not None:
        message["reasoning_content"] = thought
    if turn.get("function_call") and not message.get("tool_calls"):
        message["tool_calls"] = [turn["function_call"]]
    role = message.get("role")
    if isinstance(role, str):
        message["role"] = ROLES.get(role, role)
    if message.get("tool_calls"):
        calls = _list(message["tool_calls"], "tool_calls")
        message["tool_calls"] = [_call(call) for call in calls]
        message.setdefault("content", "")  # many templates read it without asking
    else:
        message.pop("tool_calls", None)
    return message


def _turn(turn: Mapping[str, Any]) -> Table:
    """Of ShareGPT."""
    who, text = turn["from"], turn.get("value")
    if not isinstance(who, str) or who not in ROLES:
        known = ", ".join(ROLES)
        raise LineError(f'"from" is {who!r}; known are {known}')
    if not isinstance(text, str):
        raise LineError('a turn has no "value"')
    if who not in CALLS:
        return {"role": ROLES[who], "content": text}
    calls = _json(text, who)
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> Table:
    """With its arguments as an object, which is what most templates write out rightly."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise LineError("a tool call has no function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, "arguments") if arguments.strip() else {}
    whole = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **whole} if call.get("id") else whole


def _tools(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    tools = _list(value, "tools")
    return [_json(tool, "tools") if isinstance(tool, str) else tool for tool in tools]


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise LineError(f'"{name}" is a text that is not JSON') from None
