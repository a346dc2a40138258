"""What a chat template makes of thinking: does the loss mask get what the target thought, no less
and nothing that it did not?

Templates drop thinking from turns that are over, write empty `<think>` blocks that nobody
generated, or open one in the prompt. Each is tried with an answer that was made up for it.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from draftfeed_producer.errors import LineError
from draftfeed_producer.prompt_lines import LineReader

BEGIN, END = "<think>", "</think>"
QUESTION, THOUGHT, ANSWER = "Is seven prime?", "Only one and seven divide it.", "Yes, it is."
Thinking = Literal["on", "off", "template"]
SWITCH: dict[Thinking, bool | None] = {"on": True, "off": False, "template": None}


class Probe(Struct, frozen=True):
    """What one way of thinking comes to."""

    thinking: Thinking
    """"template": as it is by default."""
    prompt_end: str
    """How a prompt ends, from the last turn on."""
    opens: bool
    """Whether the prompt ends inside a thinking block."""
    closes: bool
    """Whether it ends with one that is over: the target does not think."""
    mask: str
    """What of the made-up answer is under the loss mask, or why it cannot be."""
    fault: str
    """Empty when that is the answer, thinking included where there is some, and nothing else."""


def makes_of_thinking(probe: Probe) -> bool:
    """Whether the template opens, ends, writes or keeps a thinking block in it."""
    return probe.opens or probe.closes or BEGIN in probe.mask or THOUGHT in probe.mask


def probe(tokenizer: Any, thinking: Thinking, vocab_size: int) -> Probe:
    """Raises LineError when the template refuses a plain question."""
    reader = LineReader(tokenizer, SWITCH[thinking], "live", vocab_size)
    question = {"role": "user", "content": QUESTION}
    prompt = _decoded(tokenizer, _tokens(reader, [question]).prompt)
    end = prompt[prompt.rfind(QUESTION) + len(QUESTION) :]
    opens = end.rfind(BEGIN) > end.rfind(END)
    closes = END in end and not opens
    thinks = opens or thinking == "on"
    answer = {"role": "assistant", "content": ANSWER}
    if thinks:
        answer["reasoning_content"] = THOUGHT
    mask, fault = _mask(tokenizer, thinking, vocab_size, [question, answer], thinks)
    if thinking == "on" and closes:
        fault = "thinking is on, and the prompt ends with a thinking block that is over"
    return Probe(thinking, end, opens, closes, mask, fault)


def _mask(
    tokenizer: Any, thinking: Thinking, vocab_size: int, messages: list[Any], thinks: bool
) -> tuple[str, str]:
    reader = LineReader(tokenizer, SWITCH[thinking], "prefill", vocab_size)
    try:
        response = _tokens(reader, messages).response
    except LineError as error:
        return "", str(error)
    mask = _decoded(tokenizer, response)
    if thinks and THOUGHT not in mask:
        return mask, "the template drops the thinking from the response"
    if not thinks and BEGIN in mask:
        return mask, "the template invents a thinking block in the response"
    if ANSWER not in mask:
        return mask, "the template drops the answer"
    if not mask.rstrip().endswith(tuple(tokenizer.all_special_tokens)):
        return mask, "the template writes no end token behind the answer"
    return mask, ""


def _tokens(reader: LineReader, messages: list[Any]) -> Any:
    return reader.tokens(reader.parse(msgspec.json.encode({"messages": messages})))


def _decoded(tokenizer: Any, ids: Any) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text
