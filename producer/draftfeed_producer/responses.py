"""What the quality gate looks at, read off a sample's tokens."""

from typing import Any

import numpy as np

from draftfeed_producer.quality import Response, thinking_is_open

BEGIN, END = "<think>", "</think>"
PROMPT_TAIL = 8
"""Tokens at a prompt's end in which a template may begin the thinking."""
SHOWN_TOKENS = 48


class ResponseReader:
    """For one tokenizer, of Hugging Face. A target whose thinking tags are no tokens of their own
    is taken to think nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self._begin, self._end = vocabulary.get(BEGIN), vocabulary.get(END)

    def read(
        self, key: str, prompt_ids: np.ndarray, response_ids: np.ndarray, finish_reason: str
    ) -> Response:
        """prompt_ids: int32[p]; response_ids: int32[r], those with loss mask 1."""
        around = [*prompt_ids[-PROMPT_TAIL:].tolist(), *response_ids.tolist()]
        text = self._tokenizer.decode(response_ids[:SHOWN_TOKENS], skip_special_tokens=True)
        return Response(
            key=key,
            tokens=len(response_ids),
            identity=np.ascontiguousarray(response_ids).tobytes(),
            finish_reason=finish_reason,
            thinking_open=thinking_is_open(around, self._begin, self._end),
            text=text,
        )
