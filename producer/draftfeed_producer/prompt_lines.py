"""One line of a prompt file: what it may say, and the tokens it becomes."""

import itertools
import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from draftfeed_producer.errors import LineError
from draftfeed_producer.rendered import THINK, THOUGHT, says_calls, says_response
from draftfeed_proto.limits import MAX_NAME_CHARS

CaptureMode = Literal["live", "prefill"]

_GIVE_IDS = 'give "prompt_ids" and "response_ids"'
_SHOWN = 40
_CALLED = "called_"
"""How functions are called to see whether a template writes them."""


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs `content`")

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt in one of three forms, with or without its response in the same form."""

    id: str | None = None
    messages: list[_Message] | None = None
    """With a response when the last one is the assistant's."""
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    response: str | None = None
    prompt_ids: list[_TokenId] | None = None
    response_ids: list[_TokenId] | None = None
    finish_reason: str | None = None
    sample: str | None = None
    """Of which sample a line is that a producer wrote. Nothing here asks."""

    def __post_init__(self) -> None:
        if [self.messages, self.prompt, self.prompt_ids].count(None) != 2:
            raise ValueError('a line has either "messages" or "prompt" or "prompt_ids"')
        self._check_partners()
        for field, name in (("id", self.id), ("finish_reason", self.finish_reason)):
            if name is not None and not _is_name(name):
                raise ValueError(
                    f'"{field}" must have 1 to {MAX_NAME_CHARS} characters, all of them Unicode'
                )
        if self.messages == []:
            raise ValueError('"messages" is empty')

    @property
    def has_response(self) -> bool:
        if self.messages is not None:
            return self.messages[-1].role == "assistant"
        return self.response is not None or self.response_ids is not None

    def _check_partners(self) -> None:
        for field, other in (
            ("tools", "messages"),
            ("response", "prompt"),
            ("response_ids", "prompt_ids"),
        ):
            if getattr(self, field) is not None and getattr(self, other) is None:
                raise ValueError(f'"{field}" need "{other}"')


class Tokens(NamedTuple):
    prompt: np.ndarray
    """int32[p], p >= 1"""
    response: np.ndarray | None
    """int32[r], r >= 1; None: the target has yet to answer."""


class LineReader:
    """Reads lines for one tokenizer and one way to capture.

    What is prompt and what is response is told apart by position: the tokens of the whole begin
    with those of the prompt, or the line is refused. Neither is ever tokenised again.
    """

    def __init__(
        self,
        tokenizer: Any,
        thinking: bool | None,
        mode: CaptureMode,
        vocab_size: int,
        max_tokens: int | None = None,
    ) -> None:
        """max_tokens: text that must be longer is not tokenised, which would take memory."""
        self._tokenizer, self._mode, self._vocab_size = tokenizer, mode, vocab_size
        self._options = {} if thinking is None else {"enable_thinking": thinking}
        self._max_tokens = max_tokens
        self._most_chars = math.inf if max_tokens is None else max_tokens * _longest(tokenizer)
        self._marks = _marks(tokenizer)
        self._takes_tools: bool | None = None
        """Whether the chat template does. None: not tried yet."""

    def parse(self, raw: bytes) -> Line:
        """Raises LineError."""
        if not raw.strip():
            raise LineError("is blank")
        try:
            line = _decoder.decode(raw)
        except msgspec.DecodeError as error:  # its subclass ValidationError included
            raise LineError(str(error)) from None
        if line.has_response and self._mode == "live":
            what = "it has a response" if line.messages is None else _ASSISTANT_LAST
            raise LineError(
                f"{what}: cut it, the target answers; or have it captured as it is, with "
                '[capture] mode = "prefill"'
            )
        if self._mode == "prefill" and not line.has_response:
            raise LineError(
                'has no response, and in [capture] mode = "prefill" nothing is generated: end it '
                'with the assistant\'s message, "response" or "response_ids"'
            )
        if line.finish_reason is not None and not line.has_response:
            raise LineError('"finish_reason" is of a response, and there is none')
        return line

    def tokens(self, line: Line) -> Tokens:
        """Raises LineError."""
        if line.prompt_ids is not None:
            tokens = self._given(line.prompt_ids, line.response_ids)
        elif line.prompt is not None:
            tokens = self._from_text(line.prompt, line.response)
        else:
            tokens = self._from_chat(line)
        if not len(tokens.prompt):
            raise LineError("has no tokens")
        if tokens.response is not None and not len(tokens.response):
            raise LineError("the response has no tokens")
        return tokens

    def _given(self, prompt: list[int], response: list[int] | None) -> Tokens:
        largest = max([*prompt, *(response or ())], default=0)
        if largest >= self._vocab_size:
            raise LineError(f"token id {largest}, but the target has {self._vocab_size} tokens")
        return Tokens(_array(prompt), None if response is None else _array(response))

    def _from_text(self, text: str, response: str | None) -> Tokens:
        prompt = self._ids(text)
        if response is None:
            return Tokens(_array(prompt), None)
        return _divided(prompt, self._ids(text + response))

    def _from_chat(self, line: Line) -> Tokens:
        assert line.messages is not None
        if not line.has_response:
            return Tokens(_array(self._rendered_ids(self._asked(line, line.messages))), None)
        if len(line.messages) == 1:
            raise LineError("the only message is the assistant's: a prompt comes before it")
        *before, answer = line.messages
        prompt = self._asked(line, before)
        whole = self._without_trailer(self._render(line.messages, line.tools, ask=False))
        _check_rendered(prompt, whole, answer, self._marks)
        if line.finish_reason == "length":  # the target did not come to the end that is written
            whole = prompt + self._without_end(whole[len(prompt) :])
        return _divided(self._rendered_ids(prompt), self._rendered_ids(whole))

    def _asked(self, line: Line, messages: list[_Message]) -> str:
        """The prompt of these messages. Raises LineError when something is not in it."""
        prompt = self._render(messages, line.tools, ask=True)
        if line.tools and self._takes_tools is None:
            self._takes_tools = self._render(messages, None, ask=True) != prompt
        if line.tools and not self._takes_tools:
            raise LineError(f"the chat template leaves `tools` out: do so, too, or {_GIVE_IDS}")
        calls = [call for message in messages for call in message.tool_calls or ()]
        if calls and not (says_calls(prompt, calls) and self._writes_calls(line, messages)):
            raise LineError(f"the chat template leaves earlier tool calls out; {_GIVE_IDS}")
        return prompt

    def _writes_calls(self, line: Line, messages: list[_Message]) -> bool:
        """Whether calls are where the messages have them: their words may be in the list of tools
        and in the question."""
        names = (f"{_CALLED}{number}_" for number in itertools.count())
        renamed = [
            msgspec.structs.replace(
                message, tool_calls=[_called(call, next(names)) for call in message.tool_calls]
            )
            if message.tool_calls
            else message
            for message in messages
        ]
        text = self._render(renamed, line.tools, ask=True)
        count = sum(len(message.tool_calls or ()) for message in messages)
        return all(f"{_CALLED}{number}_" in text for number in range(count))

    def _rendered_ids(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, **options: bool) -> list[int]:
        """Raises LineError."""
        if len(text) > self._most_chars:
            raise LineError(
                f"text of {len(text):,} characters is more than {self._max_tokens:,} tokens"
            )
        ids: list[int] = self._tokenizer(text, **options)["input_ids"]
        return ids

    def _without_trailer(self, whole: str) -> str:
        """Templates put a line break after the token that ends a turn; the target stops before."""
        text = whole.rstrip()
        return text if text.endswith(self._marks) else whole

    def _without_end(self, response: str) -> str:
        while ended := next(filter(response.endswith, self._marks), ""):
            response = response.removesuffix(ended)
        return response

    def _render(
        self, messages: list[_Message], tools: list[dict[str, Any]] | None, *, ask: bool
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                msgspec.to_builtins(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=ask,
                **self._options,
            )
        # Templates are programs that come with the model: they raise what they like.
        except Exception as error:  # noqa: BLE001
            raise LineError(f"the chat template refuses it: {error}") from None
        assert isinstance(text, str)
        return text


_ASSISTANT_LAST = "the last message is the assistant's"
_decoder = msgspec.json.Decoder(Line)


def _is_name(text: str) -> bool:
    """Whether it can be a sample's key; a lone surrogate passes JSON but is no Unicode."""
    lone_surrogate = any("\ud800" <= character <= "\udfff" for character in text)
    return 0 < len(text) <= MAX_NAME_CHARS and not lone_surrogate


def _called(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": {**function, "name": name}}
    return {**call, "name": name}


def _array(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, np.int32)


def _divided(prompt: list[int], whole: list[int]) -> Tokens:
    """Raises LineError when the tokens of the whole do not begin with those of the prompt."""
    if whole[: len(prompt)] != prompt:
        raise LineError(
            "with the response behind it, the prompt becomes other tokens: one spans the border, "
            f"or the tokenizer adds one at the end; {_GIVE_IDS}"
        )
    return Tokens(_array(prompt), _array(whole[len(prompt) :]))


def _check_rendered(prompt: str, whole: str, message: _Message, marks: tuple[str, ...]) -> None:
    """Raises LineError unless the whole is the prompt and then what the message says."""
    mend = f"set [prompts] thinking or say `reasoning_content`, or {_GIVE_IDS}"
    if not whole.startswith(prompt):
        raise LineError(
            "the chat template changes the prompt when the response follows: it rewrites earlier "
            f"turns, or drops or invents thinking; {mend}"
        )
    rest = whole[len(prompt) :]
    if not says_response(
        rest,
        (message.reasoning_content or "").strip(),
        message.text.strip(),
        message.tool_calls or (),
        opened=prompt.rstrip().endswith(THINK),
        marks=marks,
    ):
        raise LineError(
            f"the chat template makes {rest[:_SHOWN]!r} of the response: it drops, invents or "
            f"rewrites something, such as thinking or tool calls; {mend}"
        )


def _marks(tokenizer: Any) -> tuple[str, ...]:
    """Special tokens as text, the end of a turn among them. Thinking is never beside the point."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    return tuple(sorted(special - {THINK, THOUGHT}, key=len, reverse=True))


def _longest(tokenizer: Any) -> int:
    """Characters of a token, at most."""
    return max(map(len, tokenizer.get_vocab()), default=1)
