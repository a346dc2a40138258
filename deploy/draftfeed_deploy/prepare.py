"""A published data set into a checked prompt file: what can be used, and what was found."""

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import xxhash
from msgspec import Struct
from rich.console import Console

from draftfeed_deploy.errors import ConfigError, OutputError
from draftfeed_deploy.prepare_chats import encoded, left_out, line_of, without_response
from draftfeed_deploy.prepare_layers import layers_of
from draftfeed_deploy.prepare_report import FAULTS_KEPT, Fault, Report, distribution
from draftfeed_deploy.prepare_rows import Row, progressing, rows
from draftfeed_deploy.prepare_template import SWITCH, Thinking, probe
from draftfeed_deploy.spool_contents import Progressing
from draftfeed_producer.engines.config import SamplingConfig
from draftfeed_producer.errors import LineError
from draftfeed_producer.prompt_lines import CaptureMode, LineReader, Tokens
from draftfeed_producer.prompts import PromptsConfig, prompt_limit
from draftfeed_producer.quality import QualityConfig, QualityGate, own_reasons
from draftfeed_producer.responses import ResponseReader
from draftfeed_producer.target import Target

TEMPLATE_ROWS = 200
"""Chats after which a template that refuses most of them ends the work."""
_TEMPLATE = "the chat template"
"""How its refusals begin."""


class Options(Struct, frozen=True, kw_only=True):
    source: Path
    out: Path
    mode: CaptureMode
    thinking: Thinking
    prompts: PromptsConfig
    """As the producer will have them."""
    sampling: SamplingConfig
    """In live mode its longest response has to fit beside the prompt."""
    quality: QualityConfig
    drafter: Path | None = None
    """Whose layers are looked up."""


class Prepared(Struct, frozen=True):
    line: bytes
    tokens: Tokens
    with_tools: bool
    cut: bool
    """Whether it had a response that is not in the line."""
    finish_reason: str


class _Stop(Exception):
    """The template refuses so much that the rest is not read."""


class Preparation:
    """Reads a source once, from end to end. One thread uses it."""

    def __init__(self, options: Options, target: Target) -> None:
        """Raises PromptError when no prompt could leave room for a response, and what layers_of
        raises."""
        self._options, self._target = options, target
        to_come = options.sampling.max_new_tokens if options.mode == "live" else 0
        limit = prompt_limit(options.prompts, target.max_positions, to_come)
        tokenizer, vocab_size = target.tokenizer, int(target.text_config.vocab_size)
        thinking = SWITCH[options.thinking]
        self._reader = LineReader(tokenizer, thinking, options.mode, vocab_size, limit)
        self._responses = ResponseReader(tokenizer)
        self._gate = QualityGate(options.quality)
        self._seen: dict[bytes, int] = {}
        """By a digest of what a row says, the first that is used or too long."""
        self._ids: set[str] = set()
        self._prompts, self._masks = array("q"), array("q")
        self._chats = self._refused = 0
        self.report = Report(
            source=str(options.source),
            out=str(options.out),
            target=target.name,
            mode=options.mode,
            thinking=options.thinking,
            max_tokens=limit,
            layers=layers_of(options.drafter, target) if options.drafter else None,
            faults=[],
            columns_left_out={},
            degenerate={},
        )

    def run(self, out: IO[bytes], found: Iterator[Row], progress: Progressing) -> None:
        with contextlib.suppress(_Stop):
            for row in found:
                self.report.rows += 1
                progress.add(row.size)
                prepared = self._use(row)
                if prepared is not None:
                    out.write(prepared.line + b"\n")
                    self._count(row.number, prepared)
        self._finish()

    def _use(self, row: Row) -> Prepared | None:
        if row.value is None:
            self._leave_out(row.number, row.fault)
            return None
        try:
            prepared = self._prepared(row.number, row.value)
        except LineError as error:
            self._leave_out(row.number, str(error))
            self._judge_template(str(error))
            return None
        if prepared is not None:
            self._count_columns(left_out(row.value))
        return prepared

    def _count_columns(self, columns: Iterable[str]) -> None:
        """Of a row that is used: what another row had is left out with all of it."""
        counts = self.report.columns_left_out
        for column in columns:
            if len(counts) < FAULTS_KEPT:
                counts[column] = counts.get(column, 0) + 1

    def _prepared(self, number: int, value: dict[str, Any]) -> Prepared | None:
        table, cut = line_of(value), False
        if self._options.mode == "live":
            table, cut = without_response(table)
        self._chats += "messages" in table
        key = table.pop("id", None)
        digest = xxhash.xxh3_128_digest(encoded(table, order="sorted"))
        if (first := self._seen.get(digest)) is not None:
            self.report.duplicates += 1
            self._note(number, f"is a duplicate of row {first}")
            return None
        key = f"row-{number}" if key is None else key
        if renamed := key in self._ids:  # sets made of parts have them twice, and no row is lost
            key = f"{key}#{number}"
        line = encoded({"id": key, **table})
        tokens = self._reader.tokens(self._reader.parse(line))
        self._seen[digest] = number
        if (length := _length(tokens)) > self.report.max_tokens:
            self.report.over_long += 1
            self._note(number, f"{length} tokens, the limit is {self.report.max_tokens}")
            return None
        self._ids.add(key)
        self.report.renamed += renamed
        ended = table.get("finish_reason", "stop")
        return Prepared(line, tokens, "tools" in table, cut, ended)

    def _count(self, number: int, prepared: Prepared) -> None:
        report, tokens = self.report, prepared.tokens
        report.written += 1
        report.with_tools += prepared.with_tools
        report.responses_cut += prepared.cut
        self._prompts.append(len(tokens.prompt))
        if tokens.response is None:
            return
        self._masks.append(len(tokens.response))
        key = f"row {number}"
        ended = prepared.finish_reason
        response = self._responses.read(key, tokens.prompt, tokens.response, ended)
        for reason in own_reasons(response, self._options.quality):
            report.degenerate[reason] = report.degenerate.get(reason, 0) + 1
        if (alarm := self._gate.add(response)) is not None:
            report.errors.append(f"the quality gate closes at row {number}: {alarm}")

    def _judge_template(self, reason: str) -> None:
        if not reason.startswith(_TEMPLATE):
            return
        self._refused += 1
        if self._chats >= TEMPLATE_ROWS and 2 * self._refused > self._chats:
            raise _Stop

    def _finish(self) -> None:
        report = self.report
        if (alarm := self._gate.end()) is not None:
            report.errors.append(f"the quality gate closes at the end: {alarm}")
        report.prompt_tokens = distribution(self._prompts)
        report.loss_mask_sums = distribution(self._masks)
        if self._chats and self._target.tokenizer.chat_template:
            self._probe()
        if 2 * self._refused > self._chats > 0:
            report.errors.insert(
                0,
                f"the chat template refuses {self._refused} of {self._chats} chats; the first "
                "rows below say why",
            )
        if not report.written and not report.errors:
            report.errors.append(f"none of the {report.rows} rows can be used")

    def _probe(self) -> None:
        """An answer that the template spoils is an error where answers come from it: in live mode
        the target writes them itself, and only how the prompt ends matters."""
        vocab_size = int(self._target.text_config.vocab_size)
        for thinking in SWITCH:
            try:
                found = probe(self._target.tokenizer, thinking, vocab_size)
            except LineError as error:
                self.report.errors.append(f"thinking {thinking}: {error}")
                continue
            self.report.probes.append(found)
            chosen = thinking == self._options.thinking
            explicit = thinking != "template" and self._options.mode == "prefill"
            if chosen and found.fault and (explicit or (thinking == "on" and found.closes)):
                self.report.errors.append(f"thinking {thinking}: {found.fault}")

    def _leave_out(self, number: int, reason: str) -> None:
        self.report.broken += 1
        self._note(number, reason)

    def _note(self, number: int, reason: str) -> None:
        if len(self.report.faults) < FAULTS_KEPT:
            self.report.faults.append(Fault(number, reason))


def prepare(options: Options, target: Target, console: Console) -> Report:
    """Writes `out` when there is no error, all or nothing. Raises ConfigError for a source that
    cannot be read or an `out` that is there, OutputError, PromptError."""
    if options.out.exists():
        raise ConfigError(
            str(options.out),
            "is there already, and its content is part of every sample's id; "
            "choose another name or delete it",
        )
    preparation = Preparation(options, target)
    part = options.out.with_name(options.out.name + ".part")
    try:
        with _written(part) as out, progressing(options.source, console, "preparing") as progress:
            preparation.run(out, rows(options.source), progress)
        if preparation.report.passed:
            os.replace(part, options.out)
            _fsync(options.out.parent)
    except OSError as error:
        raise OutputError(options.out, error, "choose another name") from None
    finally:
        part.unlink(missing_ok=True)
    return preparation.report


@contextlib.contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    with path.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _length(tokens: Tokens) -> int:
    return len(tokens.prompt) + (0 if tokens.response is None else len(tokens.response))
