"""What the quality gate looks at, read off a sample's tokens; and the gate over a run's samples."""

import hashlib
import logging
from typing import Any

import numpy as np

from draftfeed_producer.quality import (
    GateFigures,
    QualityConfig,
    QualityGate,
    Response,
    thinking_is_open,
)
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

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
            identity=hashlib.blake2b(response_ids.tobytes(), digest_size=16).digest(),
            finish_reason=finish_reason,
            thinking_open=thinking_is_open(around, self._begin, self._end),
            text=text,
        )


class Gatekeeper:
    """The quality gate over samples as they are finished. One thread shows it samples; any may
    ask for the alarm and the figures."""

    def __init__(self, reader: ResponseReader, config: QualityConfig) -> None:
        self._reader, self._gate = reader, QualityGate(config)
        self.alarm = ""
        """Why nothing more may be generated; empty while the gate is open."""
        self.figures = GateFigures()

    @property
    def most_running(self) -> int | None:
        """See QualityGate. Only for the thread that shows it samples."""
        return self._gate.most_running

    def look_at(self, sample: Sample, number: int) -> None:
        """number: how many were begun before it. Tells the log when it closes."""
        mask = sample.loss_mask.astype(bool)
        ids, reason = sample.input_ids, sample.finish_reason
        response = self._reader.read(sample.key, ids[~mask], ids[mask], reason)
        alarm = self._gate.add(response, number)
        self.figures = self._gate.figures
        if alarm is not None:
            self.alarm = f"the quality gate is closed: {alarm}"
            logger.error(
                "%s. No prompt is begun any more. Those that run are finished, and what is in the "
                "spool is served. To go on, end this and start it with another [quality]",
                self.alarm,
            )
