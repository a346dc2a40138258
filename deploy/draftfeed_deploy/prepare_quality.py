"""The quality gate over responses that exist: would the producer have stopped at them?"""

from collections.abc import Iterator
from pathlib import Path

import xxhash
from msgspec import Struct
from rich.console import Console

from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.prepare_chats import encoded, line_of
from draftfeed_deploy.prepare_report import (
    FAULTS_KEPT,
    FAULTS_SHOWN,
    Distribution,
    Fault,
    distribution,
)
from draftfeed_deploy.prepare_rows import Row, progressing, rows
from draftfeed_deploy.prepare_template import SWITCH, Thinking
from draftfeed_deploy.spool_contents import Progressing
from draftfeed_producer.errors import LineError
from draftfeed_producer.prompt_lines import LineReader
from draftfeed_producer.quality import (
    QualityConfig,
    QualityGate,
    Response,
    own_reasons,
    shown,
)
from draftfeed_producer.responses import ResponseReader
from draftfeed_producer.target import Target

COMMON_SHOWN = 5


class Common(Struct, frozen=True):
    """A response that several prompts have."""

    text: str
    times: int


class Findings(Struct, kw_only=True):
    source: str
    responses: int = 0
    broken: int = 0
    faults: list[Fault] = []
    """The first of the broken rows."""
    degenerate: dict[str, int] = {}
    """Responses of the whole file, by what is wrong with each alone."""
    common: list[Common] = []
    loss_mask_sums: Distribution | None = None
    closes_after: int | None = None
    """Responses after which the gate closes; None: it stays open."""
    alarm: str = ""


class _Repeated:
    """How often each response was there. A text is kept from its second time on."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._texts: dict[int, str] = {}

    def add(self, response: Response) -> None:
        digest = xxhash.xxh3_64_intdigest(response.identity)
        times = self._times[digest] = self._times.get(digest, 0) + 1
        if times == 2:
            self._texts[digest] = response.text

    def most(self) -> list[Common]:
        ranked = sorted(self._texts, key=lambda digest: -self._times[digest])
        return [Common(self._texts[one], self._times[one]) for one in ranked[:COMMON_SHOWN]]


def examine(
    path: Path, target: Target, thinking: Thinking, config: QualityConfig, console: Console
) -> Findings:
    """Raises ConfigError when the file cannot be read or has no response."""
    with progressing(path, console, "reading") as progress:
        return _examine(path, target, thinking, config, progress)


def _examine(
    path: Path,
    target: Target,
    thinking: Thinking,
    config: QualityConfig,
    progress: Progressing,
) -> Findings:
    vocab_size = int(target.text_config.vocab_size)
    switch, longest = SWITCH[thinking], target.max_positions
    reader = LineReader(target.tokenizer, switch, "prefill", vocab_size, longest)
    responses = ResponseReader(target.tokenizer)
    gate, repeated, sums = QualityGate(config), _Repeated(), []
    found = Findings(source=str(path), faults=[], degenerate={})
    for row in rows(path):
        progress.add(row.size)
        try:
            response = _response(row, reader, responses)
        except LineError as error:
            found.broken += 1
            if len(found.faults) < FAULTS_KEPT:
                found.faults.append(Fault(row.number, str(error)))
            continue
        found.responses += 1
        sums.append(response.tokens)
        repeated.add(response)
        for reason in own_reasons(response, config):
            found.degenerate[reason] = found.degenerate.get(reason, 0) + 1
        gate.add(response)
    gate.end()
    if gate.alarm is not None:
        found.closes_after, found.alarm = gate.alarm.finished, str(gate.alarm)
    if not found.responses:
        first = f", row {found.faults[0].row}: {found.faults[0].reason}" if found.faults else ""
        raise ConfigError(str(path), f"has no responses that can be used{first}")
    found.common, found.loss_mask_sums = repeated.most(), distribution(sums)
    return found


def lines_of(found: Findings) -> Iterator[str]:
    if found.closes_after is None:
        yield f"PASSED: {found.responses:,} responses in {found.source}"
    else:
        yield f"FAILED: the gate closes after {found.closes_after:,} responses: {found.alarm}"
    sums = found.loss_mask_sums
    if sums is not None:
        yield (
            f"  loss mask  {sums.total:,} tokens in {found.responses:,} responses; "
            f"{sums.least:,} to {sums.most:,}, mean {sums.mean:,.0f}, median {sums.median:,.0f}"
        )
    for reason, count in found.degenerate.items():
        yield f"  responses  {count:,} {reason} ({count / found.responses:.1%})"
    for common in found.common:
        yield f"  repeated   {common.times:,} times {shown(common.text)}"
    if found.broken:
        yield f"  left out   {found.broken:,} broken rows"
    for fault in found.faults[:FAULTS_SHOWN]:
        yield f"    row {fault.row}: {fault.reason}"


def _response(row: Row, reader: LineReader, responses: ResponseReader) -> Response:
    if row.value is None:
        raise LineError(row.fault)
    table = line_of(row.value)
    tokens = reader.tokens(reader.parse(encoded(table)))
    assert tokens.response is not None
    key = table.get("id", f"row {row.number}")
    return responses.read(key, tokens.prompt, tokens.response, table.get("finish_reason", "stop"))
