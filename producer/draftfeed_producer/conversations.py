"""Finished conversations as JSON lines beside the stream, each prompt once, in a form that prefill
mode reads again.

A line is written when its sample is in the spool. What a kill or a full disk left out is written at
the next start from the spool's tokens; what the spool has lost meanwhile is taken out again, since
it is generated anew. Each line says of which sample it is, so that a file of another prompt file or
epoch, whose prompts may be called the same, is never taken for this one.
"""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from draftfeed_producer.errors import OutputFileError
from draftfeed_producer.prompts import PromptFile
from draftfeed_producer.spool import Spool
from draftfeed_producer.spool.files import sync_directory
from draftfeed_proto.chunk import decode_tokens
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

Table = dict[str, Any]
BEGIN, END = "<think>", "</think>"
START = b'{"id":'
"""Of every line that is written here."""
_ANOTHER = "choose another [output] conversations"


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written beside the stream."""

    conversations: str | None = None
    """File for finished conversations, as JSON lines; appended to. None: no such file."""
    form: Literal["messages", "ids"] = "messages"
    """messages: as the prompt was, with the response as text, but for lines that prefill mode would
    refuse so. ids: tokens, exactly as they were generated."""


class Writer:
    """Makes lines. `ends` are the tokens that end a response."""

    def __init__(
        self, config: OutputConfig, file: PromptFile, tokenizer: Any, ends: set[int]
    ) -> None:
        self._ids_only = config.form == "ids"
        self._file, self._tokenizer, self._ends = file, tokenizer, ends

    def line(
        self, id: SampleId, input_ids: np.ndarray, loss_mask: np.ndarray, finish_reason: str
    ) -> bytes:
        """input_ids: int32[n+1]; loss_mask: uint8[n+1], 1 on the response. Raises PromptError when
        the prompt file was changed."""
        prompt = msgspec.json.decode(self._file.raw(id.ordinal))
        mask = loss_mask.astype(bool)
        about: Table = {"id": self._file.key(id.ordinal), "sample": str(id)}
        about["finish_reason"] = finish_reason
        if not self._ids_only and "prompt_ids" not in prompt:
            line = _encoded(about | self._with_text(prompt, input_ids[mask]))
            if self._file.takes(line):
                return line
        ids = {"prompt_ids": input_ids[~mask].tolist(), "response_ids": input_ids[mask].tolist()}
        return _encoded(about | ids)

    def _with_text(self, prompt: Table, response: np.ndarray) -> Table:
        """A chat template writes the end token itself, behind a plain prompt nobody does."""
        if "messages" in prompt and len(response) and int(response[-1]) in self._ends:
            response = response[:-1]
        text: str = self._tokenizer.decode(response, skip_special_tokens=False)
        if "prompt" in prompt:
            return {"prompt": prompt["prompt"], "response": text}
        kept = {key: prompt[key] for key in ("tools",) if prompt.get(key) is not None}
        return {**kept, "messages": [*prompt["messages"], _answer(text)]}


def _encoded(line: Table) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _answer(text: str) -> Table:
    """Thinking apart from the rest, as chat templates want it."""
    thought, ended, rest = text.partition(END)
    if not ended:
        return {"role": "assistant", "content": text}
    thought = thought.strip().removeprefix(BEGIN).strip()
    answer = {"role": "assistant", "content": rest.lstrip()}
    return {**answer, "reasoning_content": thought} if thought else answer


def _is_made(spool: Spool, id: SampleId) -> bool:
    """Whether it is not to be generated: it may be unfinished after a rollback, and archived."""
    return spool.finished(id) or spool.header_of(id) is not None


class Conversations:
    """The file. Owns it, and a lock on it, until `close()`. One thread uses it."""

    def __init__(self, path: Path, writer: Writer) -> None:
        """Raises OutputFileError when it cannot be opened, or another process writes it."""
        self._path, self._writer = path.resolve(), writer  # a link stays one when it is replaced
        self._written = IdSet()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OutputFileError(path, f"cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise OutputFileError(path, "another producer writes it; give each its own") from None

    def reconcile(self, spool: Spool, ids: IdSet) -> None:
        """Before anything is generated: the file is made to say what the spool does.

        ids: prompts of the spool's shards. Raises OutputFileError for a file of another prompt
        file's, or that cannot be written.
        """
        try:
            self._keep_whole(spool, ids)
            self._recover(spool, ids)
            os.fsync(self._fd)
        except OSError as error:
            raise OutputFileError(self._path, f"cannot be written: {error.strerror}") from None

    def write(self, sample: Sample) -> None:
        """A sample that is made again has its line already. Raises OSError; nothing of the line is
        left then."""
        if sample.id not in self._written:
            line = self._writer.line(
                sample.id, sample.input_ids, sample.loss_mask, sample.finish_reason
            )
            self._append(sample.id, line)

    def close(self) -> None:
        os.close(self._fd)

    def _append(self, id: SampleId, line: bytes) -> None:
        end = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self._written.add(id)

    def _keep_whole(self, spool: Spool, ids: IdSet) -> None:
        """Cut a torn tail, and leave out what is to be generated again."""
        if not os.fstat(self._fd).st_size:
            return
        part = self._path.with_name(self._path.name + ".part")
        try:
            if dropped := self._copy_whole(part, spool, ids):
                logger.warning(
                    "%s: %d lines are not whole, or are generated again", self._path, dropped
                )
                self._replace(part)
        finally:
            part.unlink(missing_ok=True)

    def _copy_whole(self, part: Path, spool: Spool, ids: IdSet) -> int:
        """Lines that the copy has not. Raises OutputFileError."""
        dropped = 0
        status = os.fstat(self._fd)
        with part.open("wb") as kept:
            os.fchmod(kept.fileno(), stat.S_IMODE(status.st_mode))
            with suppress(PermissionError):  # then it is this user's
                os.fchown(kept.fileno(), status.st_uid, status.st_gid)
            for number, line in enumerate(self._lines(), start=1):
                id = self._sample(line, number, spool, ids)
                if id is None or id in self._written or not _is_made(spool, id):
                    dropped += 1
                    continue
                self._written.add(id)
                kept.write(line if line.endswith(b"\n") else line + b"\n")
                dropped += not line.endswith(b"\n")
            kept.flush()
            os.fsync(kept.fileno())
        return dropped

    def _sample(self, line: bytes, number: int, spool: Spool, ids: IdSet) -> SampleId | None:
        """None for a torn tail. Raises OutputFileError."""
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            torn = not line.endswith(b"\n")
            if torn and (number > 1 or line.startswith(START[: len(line)])):
                return None
            raise self._refused(
                number, "is damaged: it is not JSON; without it, the file can be used"
            ) from None
        name = found.get("sample") if isinstance(found, dict) else None
        try:
            id = SampleId.parse(name if isinstance(name, str) else "")
        except ValueError:
            raise self._refused(number, f"does not say of which sample it is; {_ANOTHER}") from None
        if id in ids:
            return id
        shards = spool.shards
        whose = "prompt of this producer"
        if id.dataset != shards.dataset or id.epoch not in shards.each_epoch:
            whose = f"prompt of this file and epoch ({shards.dataset}/{shards.epoch})"
        raise self._refused(number, f"is of sample {id}, which is no {whose}; {_ANOTHER}")

    def _refused(self, number: int, reason: str) -> OutputFileError:
        return OutputFileError(self._path, f"line {number} {reason}")

    def _replace(self, part: Path) -> None:
        fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(part, self._path)
        sync_directory(self._path.absolute().parent)
        os.close(self._fd)
        self._fd = fd

    def _lines(self) -> Iterator[bytes]:
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            yield from file

    def _recover(self, spool: Spool, ids: IdSet) -> None:
        """Write what the spool has and the file has not."""
        gone = 0
        lines = self._written.in_epoch(0)
        for id in ids:
            if id.in_epoch(0) in lines or id in spool.tombstones or not _is_made(spool, id):
                continue
            header = spool.header_of(id)
            lines.add(id.in_epoch(0))  # of later epochs it is the same, unless it was made again
            if header is None:
                gone += 1
                continue
            try:
                tokens = decode_tokens(spool.read_chunk(id, 0))
            except ProtoError:  # it is damaged: whoever reads it will have it made again
                continue
            self._append(id, self._writer.line(id, *tokens, header.finish_reason))
        if gone:
            logger.warning(
                "%s: %d samples ended before this file was written; their tokens are gone",
                self._path,
                gone,
            )
