"""Prompt files: JSONL in, tokenised prompts out, one at a time.

A line is a chat, `{"messages": [...], "tools": [...]}`, raw text, `{"prompt": "..."}`, or tokens,
`{"prompt_ids": [...]}`; in prefill mode each of them has its response, too. All may carry the
user's own `"id"`. The file is checked once from end to end when it is opened; after that only the
place of each line is held in memory, and prompts are tokenised when they are due.
"""

import hashlib
import logging
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from draftfeed_producer.errors import LineError, PromptError
from draftfeed_producer.prompt_lines import CaptureMode, Line, LineReader, Tokens
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.limits import MAX_EPOCHS

logger = logging.getLogger(__name__)

_TRIED_AT_START = 256
_EXAMPLES = 10


class PromptsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which prompts to run, and how they become tokens."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    """JSONL file, one prompt a line."""
    skip_bad: bool = False
    """Count lines that cannot be used and go on, instead of refusing the file."""
    shard_size: int = 4096
    """Lines per shard; a shard is owned by one producer."""
    epoch: int = 0
    """Part of every sample id, of the first epoch where there are several: raise it to run the
    same file once more."""
    epochs: int = 1
    """How often every prompt is delivered. From the second time on it comes out of the archive,
    where there is one and has it; else it is generated again."""
    thinking: bool | None = None
    """Passed to the chat template as `enable_thinking`; None leaves the template's default."""
    max_prompt_tokens: int | None = None
    """Longer prompts are bad lines; in prefill mode the response counts, too. None: what the
    model's context leaves beside a response that is still to be generated."""

    def __post_init__(self) -> None:
        if self.shard_size < 1:
            raise ValueError(f"shard_size is {self.shard_size}, it must be at least 1")
        if self.epoch < 0:
            raise ValueError(f"epoch is {self.epoch}, it must not be negative")
        if not 1 <= self.epochs <= MAX_EPOCHS:
            raise ValueError(f"epochs is {self.epochs}, it must be in 1 to {MAX_EPOCHS}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens is {self.max_prompt_tokens}, it must be >= 1")


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt as the engine takes it."""

    id: SampleId
    key: str
    """The line's own "id", or its ordinal."""
    input_ids: np.ndarray
    """int32[p], p >= 1."""
    response_ids: np.ndarray | None = None
    """int32[r], r >= 1, in prefill mode; None: the target answers."""
    finish_reason: str | None = None
    """Why that response ended, where the line says so."""

    @property
    def tokens(self) -> int:
        """Of the prompt and, where there is one, its response."""
        return len(self.input_ids) + (0 if self.response_ids is None else len(self.response_ids))


class PromptFile:
    """A prompt file that has been checked, and its prompts in any order.

    Owns an open file until `close()`. Not for several threads at once.
    """

    def __init__(
        self,
        config: PromptsConfig,
        tokenizer: Any,
        max_prompt_tokens: int,
        mode: CaptureMode = "live",
        vocab_size: int | None = None,
    ) -> None:
        """Reads the whole file once. `tokenizer` is a Hugging Face tokenizer; in prefill mode the
        limit is of prompt and response together. `vocab_size` None: the tokenizer's.

        Raises PromptError for the first line that cannot be used, unless `skip_bad`, and for a
        file that has no usable line.
        """
        self._config = config
        self._path = Path(config.path)
        vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self._reader = LineReader(tokenizer, config.thinking, mode, vocab_size, max_prompt_tokens)
        self._prefill = LineReader(tokenizer, config.thinking, "prefill", vocab_size)
        self._max_prompt_tokens = max_prompt_tokens
        self._starts = array("q")
        self._bad: set[int] = set()
        self.examples: list[PromptError] = []
        """The first few bad lines."""
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            raise PromptError(self._path, None, f"cannot be read: {error.strerror}") from None
        try:
            self.dataset = self._index()
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        """Prompts that can be used."""
        return self.lines - len(self._bad)

    @property
    def lines(self) -> int:
        return len(self._starts) - 1

    @property
    def shards(self) -> Shards:
        """All of the file."""
        count = -(-self.lines // self._config.shard_size)
        return Shards(self.dataset, self._config.epoch, (0, count), self._config.epochs)

    @property
    def bad(self) -> frozenset[int]:
        """Ordinals of the lines that were skipped so far. Grows when a prompt turns out too long
        or its chat template refuses it only when it is tokenised."""
        return frozenset(self._bad)

    def id(self, ordinal: int) -> SampleId:
        shard = ordinal // self._config.shard_size
        return SampleId(self.dataset, self._config.epoch, shard, ordinal)

    def ids(self) -> IdSet:
        """Of all prompts that can be used, in every epoch."""
        return line_ids(self.shards, self.lines, self._config.shard_size) - self.skipped()

    def skipped(self) -> IdSet:
        """Of the lines that are no prompts, so far as is known by now."""
        first = IdSet(map(self.id, sorted(self._bad)))
        return IdSet.union(first.in_epoch(epoch) for epoch in self.shards.each_epoch)

    def prompt(self, ordinal: int) -> Prompt:
        """Raises PromptError when the line cannot be used."""
        line = self._parse(self._read(ordinal), ordinal)
        tokens = self._tokens(line, ordinal)
        key = _key(line, ordinal)
        return Prompt(self.id(ordinal), key, tokens.prompt, tokens.response, line.finish_reason)

    def prompts(self, ordinals: Iterable[int] | None = None) -> Iterator[Prompt]:
        """The prompts of these lines (default: all), lazily; bad ones are left out.

        Raises PromptError for a line found bad only now, unless `skip_bad`.
        """
        for ordinal in range(self.lines) if ordinals is None else ordinals:
            if (prompt := self.find(ordinal)) is not None:
                yield prompt

    def find(self, ordinal: int) -> Prompt | None:
        """The prompt of a line; None when the line is skipped.

        Raises PromptError for a line found bad only now, unless `skip_bad`.
        """
        if ordinal in self._bad:
            return None
        try:
            return self.prompt(ordinal)
        except PromptError as error:
            self._skip(ordinal, error)
            return None

    def raw(self, ordinal: int) -> bytes:
        """The line as it is. Raises PromptError when there is none, or the file was changed."""
        return self._read(ordinal)

    def key(self, ordinal: int) -> str:
        """What a prompt's samples are called. Raises PromptError."""
        return _key(self._parse(self._read(ordinal), ordinal), ordinal)

    def takes(self, finished: bytes) -> bool:
        """Whether prefill mode would take such a line, with a response."""
        try:
            self._prefill.tokens(self._prefill.parse(finished))
        except LineError:
            return False
        return True

    def close(self) -> None:
        self._file.close()

    def _index(self) -> str:
        """Checks every line, notes where it starts, and returns the hash of the bytes."""
        digest = hashlib.sha256()
        seen: dict[str, int] = {}
        start = 0
        for ordinal, raw in enumerate(self._file):
            digest.update(raw)
            self._starts.append(start)
            start += len(raw)
            try:
                self._check(raw, ordinal, seen)
            except PromptError as error:
                self._skip(ordinal, error)
        self._starts.append(start)
        self._stamp = self._file_stamp()
        if not len(self):
            reason = f"none of its {self.lines} lines can be used" if self.lines else "is empty"
            raise PromptError(self._path, None, reason)
        if self._bad:
            logger.warning("%s: skipped %d of %d lines", self._path, len(self._bad), self.lines)
        return digest.hexdigest()[:16]

    def _check(self, raw: bytes, ordinal: int, seen: dict[str, int]) -> None:
        line = self._parse(raw, ordinal)
        # Tokenising a million prompts takes minutes. A token is at least a byte, so only lines
        # that are long can be too long; the first lines show whether the template fits at all.
        long = 2 * len(raw) > self._max_prompt_tokens
        if ordinal < _TRIED_AT_START or long or line.prompt_ids is not None:
            self._tokens(line, ordinal)
        key = _key(line, ordinal)
        first = seen.setdefault(key, ordinal)
        if first != ordinal:
            raise self._error(ordinal, f'"id" {key!r} is also that of line {first + 1}')

    def _parse(self, raw: bytes, ordinal: int) -> Line:
        try:
            return self._reader.parse(raw)
        except LineError as error:
            raise self._error(ordinal, str(error)) from None

    def _tokens(self, line: Line, ordinal: int) -> Tokens:
        try:
            tokens = self._reader.tokens(line)
        except LineError as error:
            raise self._error(ordinal, str(error)) from None
        given = tokens.response
        what = "prompt" if given is None else "prompt and response"
        count = len(tokens.prompt) + (0 if given is None else len(given))
        if count > self._max_prompt_tokens:
            reason = f"{what} of {count} tokens, the limit is {self._max_prompt_tokens}"
            raise self._error(ordinal, reason)
        return tokens

    def _read(self, ordinal: int) -> bytes:
        if not 0 <= ordinal < self.lines:
            raise PromptError(self._path, None, f"has {self.lines} lines, none at {ordinal}")
        if self._file_stamp() != self._stamp:
            reason = "was changed while in use; restart with the file you want"
            raise PromptError(self._path, None, reason)
        start, stop = self._starts[ordinal], self._starts[ordinal + 1]
        return os.pread(self._file.fileno(), stop - start, start)

    def _file_stamp(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _skip(self, ordinal: int, error: PromptError) -> None:
        if not self._config.skip_bad or error.line is None:
            raise error
        self._bad.add(ordinal)
        if len(self.examples) < _EXAMPLES:
            self.examples.append(error)

    def _error(self, ordinal: int, reason: str) -> PromptError:
        return PromptError(self._path, ordinal + 1, reason)


def _key(line: Line, ordinal: int) -> str:
    return str(ordinal) if line.id is None else line.id


def line_ids(shards: Shards, lines: int, shard_size: int) -> IdSet:
    """Ids of all lines of a file of so many, in every epoch."""
    starts = range(0, lines, shard_size)
    return IdSet.from_wire(
        [
            (shards.dataset, epoch, shard, start, [min(shard_size, lines - start)])
            for epoch in shards.each_epoch
            for shard, start in enumerate(starts)
        ]
    )


def prompt_limit(config: PromptsConfig, max_positions: int, max_new_tokens: int) -> int:
    """Longest prompt, in tokens, that leaves room for the whole response.

    Raises PromptError when there is none.
    """
    limit = max_positions - max_new_tokens
    if limit < 1:
        reason = f"max_new_tokens = {max_new_tokens} leaves no room in {max_positions} positions"
        raise PromptError(config.path, None, reason)
    return limit if config.max_prompt_tokens is None else min(limit, config.max_prompt_tokens)
