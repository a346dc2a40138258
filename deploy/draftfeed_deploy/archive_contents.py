"""Every byte of an archive, read and compared; and what it holds, in words and as JSON."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.filesize import decimal as bytes_text

from draftfeed_deploy.spool_contents import Bad, Progressing, decoded
from draftfeed_producer.archive.reader import ArchiveReader, Fault
from draftfeed_producer.archive.sealed import digest_of
from draftfeed_producer.errors import ArchiveError
from draftfeed_producer.spool.ranges import format_ranges
from draftfeed_producer.spool.reader import SegmentFile
from draftfeed_producer.spool.segments import Record
from draftfeed_proto.ids import IdSet

RANGES_SHOWN = 12
NAMES_SHOWN = 20


class RootFacts(msgspec.Struct):
    dir: str
    segments: int
    bytes: int


class FaultFacts(msgspec.Struct):
    file: str
    reason: str
    gone: list[str]
    """Keys of samples that were in it and are served from nowhere else."""


class ArchiveFacts(msgspec.Struct, kw_only=True):
    stream_id: str
    model: str
    layer_ids: tuple[int, ...]
    final: str
    hidden_size: int
    dtype: str
    dataset: str
    roots: list[RootFacts]
    segments: int
    bytes: int
    samples: int
    """Lines of the prompt file that can be served."""
    copies: int
    """Samples of lines that have another one."""
    encoded_bytes: int
    decoded_bytes: int
    prompts: int | None
    """Lines of the prompt file that are prompts; null: not known."""
    missing: list[int]
    """Of those, half-open ranges of lines, from 0, flattened: in no segment."""
    faults: list[FaultFacts]


class ArchiveVerdict(msgspec.Struct):
    segments: int = 0
    """Whose digest is what it was."""
    samples: int = 0
    """That decode, copies too."""
    digests: int = 0
    """Of those, how many had a digest to compare."""
    lines: list[str] = []
    """What is wrong, for people."""
    gone: int = 0
    """Samples known to have been there that cannot be served."""
    damaged: bool = False


def facts_of(reader: ArchiveReader) -> ArchiveFacts:
    stream, prompts = reader.contents.descriptor, reader.prompt_lines
    segments = reader.segments()
    roots = []
    for root in reader.roots:
        mine = [one.bytes for one in segments if one.path.parent == root]
        roots.append(RootFacts(str(root), len(mine), sum(mine)))
    return ArchiveFacts(
        stream_id=stream.stream_id(),
        model=stream.model,
        layer_ids=stream.layer_ids,
        final=stream.final,
        hidden_size=stream.hidden_size,
        dtype=stream.dtype,
        dataset=reader.contents.prompts.dataset,
        roots=roots,
        segments=len(segments),
        bytes=sum(one.bytes for one in segments),
        samples=len(reader.lines),
        copies=reader.copies,
        encoded_bytes=reader.encoded_bytes,
        decoded_bytes=reader.decoded_bytes,
        prompts=len(prompts) or None,
        missing=_ordinals(prompts - reader.lines),
        faults=[
            FaultFacts(str(one.path), one.reason, [key for _, key in one.gone])
            for one in reader.faults
        ],
    )


def facts_lines(facts: ArchiveFacts) -> Iterator[str]:
    """For people."""
    layers = ",".join(map(str, facts.layer_ids))
    final = "" if facts.final == "none" else f" and final state {facts.final}"
    yield (
        f"stream       {facts.stream_id}: {facts.model}, layers {layers}{final}, "
        f"hidden {facts.hidden_size}, {facts.dtype}"
    )
    of = "" if facts.prompts is None else f" of {facts.prompts} prompts"
    copies = f", {facts.copies} copies of them" if facts.copies else ""
    yield f"samples      {facts.samples}{of} (data set {facts.dataset}){copies}"
    yield (
        f"size         {bytes_text(facts.bytes)} in {facts.segments} segments; "
        f"{bytes_text(facts.decoded_bytes)} of tensors as {bytes_text(facts.encoded_bytes)}"
    )
    for root in facts.roots:
        yield f"root         {root.dir}: {bytes_text(root.bytes)} in {root.segments} segments"
    yield _missing_line(facts)
    for fault in facts.faults:
        yield from _fault_lines(fault.file, fault.reason, fault.gone)


def verify(reader: ArchiveReader, console: Console) -> ArchiveVerdict:
    """Reads every sealed segment twice: against its digest, and sample by sample.

    Raises SpoolError when a file is of a newer version.
    """
    verdict = ArchiveVerdict()
    for fault in reader.faults:
        _note(verdict, fault)
    segments = reader.segments()
    with Progressing(console, sum(one.bytes for one in segments), "verifying") as progress:
        for segment in segments:
            _verify_segment(reader, segment, verdict)
            progress.add(segment.bytes)
    return verdict


def verdict_lines(verdict: ArchiveVerdict, missing: str) -> Iterator[str]:
    yield from verdict.lines
    yield missing
    gone = f"; {verdict.gone} samples cannot be served" if verdict.gone else ""
    yield (
        f"{'DAMAGED' if verdict.damaged else 'ok'}: {verdict.segments} segments have their digest, "
        f"{verdict.samples} samples decode, {verdict.digests} of them to the digest taken before "
        f"encoding{gone}"
    )


def _note(verdict: ArchiveVerdict, fault: Fault) -> None:
    verdict.lines += _fault_lines(str(fault.path), fault.reason, [key for _, key in fault.gone])
    verdict.gone += len(fault.gone)
    verdict.damaged |= bool(fault.gone) or fault.path.suffix in (".seg", ".idx")


def _verify_segment(reader: ArchiveReader, segment: SegmentFile, verdict: ArchiveVerdict) -> None:
    bad: list[Bad] = []
    try:
        records = reader.every_record(segment)
        digest = digest_of(segment.path)
        for record in records:
            _judge(reader, record, verdict, bad)
    except (OSError, ArchiveError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", "")
        _condemn(reader, segment, verdict, str(reason))
        return
    if digest == segment.path.stem:
        verdict.segments += 1
        return
    verdict.damaged = True
    rest = "" if bad else "; every sample in it decodes all the same"
    verdict.lines.append(f"bad      {segment.path}: its digest is {digest} now{rest}")
    verdict.lines += [f"bad      {one.name}: offset {one.offset}: {one.reason}" for one in bad]


def _judge(reader: ArchiveReader, record: Record, verdict: ArchiveVerdict, bad: list[Bad]) -> None:
    known = len(bad)
    if decoded(reader, record, bad) is not None:
        verdict.samples += 1
        verdict.digests += bool(record.header.digest)
    elif len(bad) == known:
        raise ArchiveError(reader.segments()[record.segment].path, "is missing by now")
    else:
        verdict.gone += reader.serves(record)


def _condemn(
    reader: ArchiveReader, segment: SegmentFile, verdict: ArchiveVerdict, reason: str
) -> None:
    """A segment that cannot be read at all, though its index was."""
    verdict.damaged = True
    try:
        keys = [one.header.key for one in reader.every_record(segment) if reader.serves(one)]
    except ArchiveError:
        keys = []
    verdict.gone += len(keys)
    verdict.lines += _fault_lines(str(segment.path), reason, keys)


def _fault_lines(file: str, reason: str, keys: list[str]) -> list[str]:
    lines = [f"fault    {file}: {reason}"]
    if keys:
        lines.append(f"         gone: {_named(keys)}")
    return lines


def _named(keys: list[str]) -> str:
    more = f" and {len(keys) - NAMES_SHOWN} more (--json)" if len(keys) > NAMES_SHOWN else ""
    return ", ".join(map(repr, keys[:NAMES_SHOWN])) + more


def missing_line(reader: ArchiveReader) -> str:
    return _missing_line(facts_of(reader))


def _missing_line(facts: ArchiveFacts) -> str:
    if facts.prompts is None:
        return "missing      not known: the archive does not say which prompts there are"
    if not facts.missing:
        return "missing      none: every prompt has its sample"
    count = facts.prompts - facts.samples
    shown = format_ranges(tuple(facts.missing[: 2 * RANGES_SHOWN]))
    more = len(facts.missing) // 2 - RANGES_SHOWN
    rest = f" and {more} more ranges (--json)" if more > 0 else ""
    return f"missing      {count} prompts have no sample: lines {shown}{rest}, from 0"


def _ordinals(ids: IdSet) -> list[int]:
    """Half-open ranges, flattened, where those of neighbouring shards are one."""
    found: list[int] = []
    for _, edges in ids.by_partition():
        if found and found[-1] == edges[0]:
            found[-1:] = edges[1:]
        else:
            found += edges
    return found


def unique(roots: list[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(root.resolve() for root in roots))
