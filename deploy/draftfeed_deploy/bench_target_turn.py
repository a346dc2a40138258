"""From when each token was there to rates."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from draftfeed_producer.prompts import Prompt
from draftfeed_proto.ids import SampleId


class Unusable(Exception):
    """A turn whose figures would not be what they say, and why. The sweep goes on without it."""


class OutOfTime(Exception):
    """The time for all of the benchmark was up in the middle of a turn."""


@dataclass
class Response:
    """Of one request."""

    prompt_tokens: int
    submitted: float
    """time.monotonic(), as all times here."""
    at: list[float] = field(default_factory=list)
    """When it had `tokens`."""
    tokens: list[int] = field(default_factory=list)


class Watch:
    """Sees every request of a turn, from when the engine takes it."""

    def __init__(self) -> None:
        self._responses: dict[SampleId, Response] = {}
        self._made_again = False

    def begin(self) -> None:
        self._responses, self._made_again = {}, False

    def feed(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        for prompt in prompts:
            self._responses[prompt.id] = Response(len(prompt.input_ids), time.monotonic())
            yield prompt

    def __call__(self, id: SampleId, tokens: int, at: float) -> None:
        """Hears of progress. See `trial.Progress`."""
        response = self._responses[id]
        self._made_again |= bool(response.tokens) and tokens <= response.tokens[-1]
        response.at.append(at)
        response.tokens.append(tokens)

    def responses(self, count: int, tokens: int) -> list[Response]:
        """All of a turn that should have had `count` requests of `tokens` each. Raises Unusable."""
        found = list(self._responses.values())
        if self._made_again:
            raise Unusable("the engine made a response a second time; its log says why")
        if len(found) < count or any(not r.tokens or r.tokens[-1] != tokens for r in found):
            raise Unusable(f"not all of {count} responses have {tokens} tokens")
        return found


def output_rate(responses: Sequence[Response]) -> float:
    """Tokens per second of decoding: those that came between the first token of the last request
    and the last token of the first, in which all of them are decoding. Between two words of a
    response's progress its tokens are taken to come evenly. Raises Unusable when there is no such
    time."""
    begin = max(response.at[0] for response in responses)
    end = min(response.at[-1] for response in responses)
    if end <= begin:
        raise Unusable(
            f"the engine did not have {len(responses)} requests at a time: [capture] staging_bytes "
            "or its KV cache holds fewer"
        )
    made = sum(_tokens_at(one, end) - _tokens_at(one, begin) for one in responses)
    return made / (end - begin)


def prefill_rate(responses: Sequence[Response]) -> float:
    """Prompt tokens per second of requests that generate nothing more than one token: from when the
    first is submitted to when the last is answered."""
    seconds = max(r.at[-1] for r in responses) - min(r.submitted for r in responses)
    return sum(response.prompt_tokens for response in responses) / seconds


def first_token_seconds(responses: Sequence[Response]) -> float:
    """Median over requests, each from its own submission."""
    return median(response.at[0] - response.submitted for response in responses)


def _tokens_at(response: Response, at: float) -> float:
    return float(np.interp(at, response.at, response.tokens))
