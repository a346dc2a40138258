"""Every sample of a spool, read and decoded: to verify it, and to write it elsewhere."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from draftfeed_deploy.errors import OutputError
from draftfeed_producer.errors import UnknownSample
from draftfeed_producer.spool.reader import Reader
from draftfeed_producer.spool.segments import Damage, Record
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0


class Bad(NamedTuple):
    """Bytes that are not what was written."""

    segment: int
    offset: int
    name: str
    """Id and key of the sample, where they can be read."""
    reason: str


class Verdict(msgspec.Struct):
    samples: int = 0
    """That decode."""
    digests: int = 0
    """Of those, how many had a digest to compare."""
    void: int = 0
    """Known to be damaged, and made again under their id."""
    bytes: int = 0
    bad: list[Bad] = []


class Progressing:
    """How far a long reading is: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, console: Console, total_bytes: int, what: str) -> None:
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(what, total=max(1, total_bytes))
        self._what, self._total, self._done = what, total_bytes, 0
        self._is_terminal = console.is_terminal
        self._due = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> "Progressing":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, size: int) -> None:
        self._done += size
        self._bar.update(self._task, advance=size)
        if not self._is_terminal and time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_SECONDS
            logger.info("%s: %.0f%%", self._what, 100 * self._done / max(1, self._total))


def verify(reader: Reader, console: Console) -> Verdict:
    """Reads every byte of every segment and decodes every chunk.

    Raises SpoolError when the spool is of a newer version.
    """
    verdict = Verdict()
    segments = reader.segments()
    with Progressing(console, sum(segment.bytes for segment in segments), "verifying") as progress:
        for segment in segments:
            for found in reader.scan(segment):
                _judge(reader, found, verdict)
                progress.add(found.header.encoded_bytes if isinstance(found, Record) else 0)
            verdict.bytes += segment.bytes
    reader.refresh()  # what the producer has noticed meanwhile is no news
    known = [bad for bad in verdict.bad if (bad.segment, bad.offset) in reader.control.voids]
    verdict.void += len(known)
    verdict.bad = [bad for bad in verdict.bad if bad not in known]
    return verdict


def verify_lines(verdict: Verdict) -> Iterator[str]:
    for bad in verdict.bad:
        yield f"bad      {bad.name}: segment {bad.segment}, offset {bad.offset}: {bad.reason}"
    known = f"; {verdict.void} known to be damaged are generated again" if verdict.void else ""
    yield (
        f"{'DAMAGED' if verdict.bad else 'ok'}: {verdict.samples} samples decode, "
        f"{verdict.digests} of them to the digest taken before encoding; "
        f"{len(verdict.bad)} damaged{known}"
    )


def export(reader: Reader, out: Path, names: list[str], console: Console) -> tuple[int, list[Bad]]:
    """Write samples as files that any program reads: one .npz each, and samples.jsonl.

    names: ids or keys; empty: all. Returns how many were written, and those that are damaged.
    Raises UnknownSample for a name that the spool does not have, OutputError when `out` is not
    empty or cannot be written.
    """
    chosen = _chosen(reader, names)
    bad: list[Bad] = []
    written = 0
    try:
        _make_empty(out)
        total = sum(record.header.encoded_bytes for record in chosen)
        with (
            (out / "samples.jsonl").open("wb") as lines,
            Progressing(console, total, "exporting") as progress,
        ):
            for record in chosen:
                sample = decoded(reader, record, bad)
                if sample is not None:
                    lines.write(_write_sample(reader, record, sample, out))
                    written += 1
                progress.add(record.header.encoded_bytes)
    except OSError as error:
        raise OutputError(out, error, "choose another OUT") from error
    return written, bad


def _judge(reader: Reader, found: Record | Damage, verdict: Verdict) -> None:
    if reader.is_void(found):
        verdict.void += 1
    elif isinstance(found, Damage):
        verdict.bad.append(of_damage(found))
    elif decoded(reader, found, verdict.bad) is not None:
        verdict.samples += 1
        verdict.digests += bool(found.header.digest)


def of_damage(damage: Damage) -> Bad:
    """A record whose form is not what was written, so that its header may be lost."""
    name = f"{damage.id}, key {damage.key!r}" if damage.id else "a sample without a name"
    return Bad(*damage.place, name, damage.reason)


def decoded(reader: Reader, record: Record, bad: list[Bad]) -> Sample | None:
    """None when it is damaged, which is noted, or was deleted by its producer meanwhile."""
    try:
        record.header.check_stream(reader.owner.descriptor)
        return reader.sample(record)
    except ProtoError as error:
        name = f"{record.header.id}, key {record.header.key!r}"
        bad.append(Bad(*record.place, name, str(error)))
        return None


def _chosen(reader: Reader, names: list[str]) -> list[Record]:
    records = {record.header.id: record for record in reader.records()}
    if not names:
        return list(records.values())
    by_name = {str(id): record for id, record in records.items()}
    by_name |= {record.header.key: record for record in records.values()} | by_name
    for name in names:
        if name not in by_name:
            raise UnknownSample(reader.directory, repr(name), "no stored sample has this id or key")
    return [by_name[name] for name in dict.fromkeys(names)]


def _make_empty(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(0, "it is not empty")


def _write_sample(reader: Reader, record: Record, sample: Sample, out: Path) -> bytes:
    """Writes the tensors; returns the line that describes them."""
    header = record.header
    file = f"{header.id.epoch}-{header.id.shard}-{header.id.ordinal:08d}.npz"
    np.savez(
        out / file,
        input_ids=sample.input_ids,
        loss_mask=sample.loss_mask,
        hidden_states=sample.hidden_states,
    )
    values: dict[str, Any] = msgspec.to_builtins(header)
    stream = reader.owner.descriptor
    values |= {"id": str(header.id), "file": file, "dtype": stream.dtype}
    values["layer_names"] = stream.layer_names
    values["counters"] = [counters._asdict() for counters in header.counters]
    return msgspec.json.encode(values) + b"\n"
