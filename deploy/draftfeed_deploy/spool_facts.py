"""What a spool holds, and what happened to one sample of it, in words and as JSON."""

from collections import Counter
from collections.abc import Iterator

import msgspec
from rich.filesize import decimal as bytes_text

from draftfeed_producer.archive.reader import ArchiveReader
from draftfeed_producer.errors import UnknownSample
from draftfeed_producer.spool.control import Commit
from draftfeed_producer.spool.ranges import format_ranges
from draftfeed_producer.spool.reader import Reader
from draftfeed_producer.spool.segments import Damage, Record
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import SampleHeader

_FREED = {
    None: "freed: its key and its tensors are gone, unless they were archived (--archive ROOT)",
    False: "freed: its key and its tensors are gone, this is all that is known",
    True: "freed here, and archived",
}
SEGMENTS_SHOWN = 12
COMMITS_SHOWN = 3


class SegmentFacts(msgspec.Struct):
    number: int
    bytes: int
    samples: int = 0
    """That count: neither void nor damaged."""


class CommitFacts(msgspec.Struct):
    number: int
    term: int
    samples: int
    rollback: bool


class SpoolFacts(msgspec.Struct, kw_only=True):
    dir: str
    format: int
    stream_id: str
    model: str
    revision: str
    layer_ids: tuple[int, ...]
    final: str
    hidden_size: int
    dtype: str
    dataset: str
    epoch: int
    prompt_file_shards: str
    shards: str
    lost_shards: str
    segments: list[SegmentFacts] = []
    bytes: int = 0
    samples: int = 0
    """Stored ones; the next three add up to them."""
    deliverable: int = 0
    committed_and_kept: int = 0
    ended_and_kept: int = 0
    """With a tombstone."""
    encoded_bytes: int = 0
    decoded_bytes: int = 0
    void: int = 0
    """Records that are known to be damaged."""
    damaged: int = 0
    """Places that the producer has not seen yet; chunks are not read for it."""
    term: int
    group: str
    members: int
    commits: list[CommitFacts]
    committed: int
    tombstones: dict[str, int]
    """By state."""
    suspects: int
    regenerated: int


def inspect(reader: Reader) -> SpoolFacts:
    """Reads the headers of every record, not the chunks."""
    facts = _facts(reader)
    seen: set[SampleId] = set()
    committed = reader.control.committed
    for segment in reader.segments():
        row = SegmentFacts(segment.number, segment.bytes)
        facts.segments.append(row)
        for found in reader.scan(segment):
            if reader.is_void(found):
                facts.void += 1
            elif isinstance(found, Damage):
                facts.damaged += 1
            elif found.header.id not in seen:
                seen.add(found.header.id)
                row.samples += 1
                _count(facts, reader, found, committed)
    facts.bytes = sum(row.bytes for row in facts.segments)
    return facts


def inspect_lines(facts: SpoolFacts) -> Iterator[str]:
    """For people."""
    layers = ",".join(map(str, facts.layer_ids))
    final = "" if facts.final == "none" else f" and final state {facts.final}"
    yield f"spool        {facts.dir} (format {facts.format})"
    yield (
        f"stream       {facts.stream_id}: {facts.model}, layers {layers}{final}, "
        f"hidden {facts.hidden_size}, {facts.dtype}"
    )
    lost = f", of them lost elsewhere: {facts.lost_shards}" if facts.lost_shards != "none" else ""
    yield f"prompts      data set {facts.dataset}, epoch {facts.epoch}"
    yield f"shards       {facts.shards} of {facts.prompt_file_shards}{lost}"
    yield (
        f"samples      {facts.samples} stored: {facts.deliverable} deliverable, "
        f"{facts.committed_and_kept} committed, {facts.ended_and_kept} with a tombstone"
    )
    yield (
        f"size         {bytes_text(facts.bytes)} on disk; {bytes_text(facts.decoded_bytes)} of "
        f"tensors as {bytes_text(facts.encoded_bytes)}"
    )
    yield f"damage       {facts.damaged} found now, {facts.void} known; verify reads every byte"
    yield f"committed    {facts.committed} samples"
    ended = ", ".join(f"{count} {state}" for state, count in sorted(facts.tombstones.items()))
    yield f"tombstones   {ended or 'none'}"
    yield f"regenerated  {facts.regenerated}; suspects {facts.suspects}"
    group = f"{facts.term} of group {facts.group!r}, {facts.members} members"
    yield f"term         {group if facts.term else 'none yet'}"
    if (more := len(facts.commits) - COMMITS_SHOWN) > 0:
        yield f"commits      {more} older ones, and these"
    for commit in facts.commits[-COMMITS_SHOWN:]:
        how = "rollback to" if commit.rollback else "commit     "
        yield f"{how}  {commit.number} of term {commit.term}: {commit.samples} samples"
    for row in facts.segments[:SEGMENTS_SHOWN]:
        yield f"segment      {row.number}: {bytes_text(row.bytes)}, {row.samples} samples"
    if (more := len(facts.segments) - SEGMENTS_SHOWN) > 0:
        yield f"             and {more} more up to {facts.segments[-1].number}; see --json"


def trace(reader: Reader, name: str, archive: ArchiveReader | None = None) -> Iterator[str]:
    """What happened to a sample, in order. `name`: its id as text, or its key. archive: what the
    spool's segments go into; there a key means the first epoch that the spool serves.

    Raises UnknownSample when neither knows anything of it.
    """
    id, records, damages = _find(reader, name, archive)
    archived = _archived(archive, id) if archive is not None else []
    control = reader.control
    voids = {place: void for place, void in control.voids.items() if void.id == id}
    known_as = [*archived, *records]
    yield f"sample     {id}" + (f", key {known_as[-1].header.key!r}" if known_as else "")
    known = {*(record.place for record in records), *(damage.place for damage in damages)}
    for record in records:
        yield from _record_lines(record)
        if void := voids.get(record.place):
            yield f"void       that record is damaged: {void.reason}"
    for damage in damages:
        yield f"damaged    segment {damage.segment}, offset {damage.start}: {damage.reason}"
    for place, void in voids.items():
        if place not in known:
            yield f"void       segment {place[0]}, offset {place[1]} was damaged: {void.reason}"
    if id in control.regenerated:
        yield "again      generated again under its id: the first record is damaged or lost"
    if id in control.suspects:
        yield f"suspect    {control.suspects[id]} terms in a row ended while it was at work"
    yield from _commit_lines(id, control.commits)
    if stone := control.tombstones.get(id):
        yield f"tombstone  {stone.state}: {stone.reason}"
    if archive is not None:
        for record in archived:
            yield from _archived_lines(archive, record)
    yield f"now        {_state(reader, id, records, bool(archived) if archive else None)}"


def _facts(reader: Reader) -> SpoolFacts:
    owner, control = reader.owner, reader.control
    term = control.term
    return SpoolFacts(
        dir=str(reader.directory),
        format=owner.format,
        stream_id=owner.descriptor.stream_id(),
        model=owner.descriptor.model,
        revision=owner.descriptor.revision,
        layer_ids=owner.descriptor.layer_ids,
        final=owner.descriptor.final,
        hidden_size=owner.descriptor.hidden_size,
        dtype=owner.descriptor.dtype,
        dataset=owner.prompts.dataset,
        epoch=owner.prompts.epoch,
        prompt_file_shards=format_ranges(owner.prompts.ranges),
        shards=format_ranges(reader.shards.ranges),
        lost_shards=format_ranges(control.owned.lost.ranges if control.owned else ()),
        term=term.term if term else 0,
        group=term.group if term else "",
        members=term.members if term else 0,
        commits=[
            CommitFacts(c.number, c.term, len(IdSet.from_wire(c.trained)), c.rollback)
            for c in control.commits
        ],
        committed=len(control.committed),
        tombstones=dict(Counter(stone.state for stone in control.tombstones.values())),
        suspects=len(control.suspects),
        regenerated=len(control.regenerated),
    )


def _count(facts: SpoolFacts, reader: Reader, record: Record, committed: IdSet) -> None:
    id = record.header.id
    facts.samples += 1
    facts.encoded_bytes += record.header.encoded_bytes
    facts.decoded_bytes += record.header.decoded_bytes
    if id in committed:
        facts.committed_and_kept += 1
    elif id in reader.control.tombstones:
        facts.ended_and_kept += 1
    else:
        facts.deliverable += 1


def _archived(archive: ArchiveReader, id: SampleId) -> list[Record]:
    """Of its line, every copy: epochs do not count in an archive."""
    line = id.in_epoch(0)
    if line not in archive.lines:
        return []
    every = (one for segment in archive.segments() for one in archive.every_record(segment))
    return [record for record in every if record.header.id.in_epoch(0) == line]


def _archived_id(reader: Reader, archive: ArchiveReader, key: str) -> SampleId | None:
    """What the spool calls the archived sample that has this key."""
    epoch = reader.owner.prompts.epoch
    found = (one.header for one in archive.records() if one.header.key == key)
    return next((header.id.in_epoch(epoch) for header in found), None)


def _find(
    reader: Reader, name: str, archive: ArchiveReader | None
) -> tuple[SampleId, list[Record], list[Damage]]:
    """The sample's id, its records and its damaged ones, oldest first."""
    try:
        id = SampleId.parse(name)
    except ValueError:
        id = None
    found = [
        item
        for segment in reader.segments()
        for item in reader.scan(segment)
        if (_id(item) == id if id is not None else _key(item) == name)
    ]
    if id is None and found:
        id = _id(found[-1])
    if id is None and archive is not None:
        id = _archived_id(reader, archive, name)
    if id is None:
        raise UnknownSample(reader.directory, repr(name), _no_key(reader, archive))
    if id.partition not in reader.owner.prompts:
        file = f"data set {reader.owner.prompts.dataset}, epoch {reader.owner.prompts.epoch}"
        raise UnknownSample(reader.directory, str(id), f"is not of this spool's prompts ({file})")
    records = [item for item in found if isinstance(item, Record)]
    return id, records, [item for item in found if isinstance(item, Damage)]


def _no_key(reader: Reader, archive: ArchiveReader | None) -> str:
    example = SampleId(reader.owner.prompts.dataset, reader.owner.prompts.epoch, 0, 0)
    return (
        f"no {'stored' if archive is None else 'stored or archived'} sample has this key. The key "
        "of a sample that was freed, or is not generated yet, is not in the spool: give its id, "
        f"such as {example} (shard, then line from 0)"
        + (", or its archive with --archive" if archive is None else "")
    )


def _id(item: Record | Damage) -> SampleId | None:
    return item.header.id if isinstance(item, Record) else item.id


def _key(item: Record | Damage) -> str:
    return item.header.key if isinstance(item, Record) else item.key


def _record_lines(record: Record) -> Iterator[str]:
    segment, offset = record.place
    yield f"stored     segment {segment}, offset {offset}"
    yield from _size_lines(record.header)


def _archived_lines(archive: ArchiveReader, record: Record) -> Iterator[str]:
    path, copy = archive.path(record), "" if archive.serves(record) else ", a copy not served"
    yield f"archived   {path}, offset {record.place[1]}, as {record.header.id}{copy}"
    yield from _size_lines(record.header)


def _size_lines(header: SampleHeader) -> Iterator[str]:
    yield (
        f"           {header.rows} rows of [{header.layers}, {header.hidden}], "
        f"{header.response_tokens} response tokens, finish reason {header.finish_reason!r}"
    )
    digest = header.digest or "none"
    yield f"           {header.encoded_bytes} bytes in {header.chunks} chunks, digest {digest}"


def _commit_lines(id: SampleId, commits: list[Commit]) -> Iterator[str]:
    kept = f"{commits[0].number} to {commits[-1].number}" if commits else ""
    for commit in commits:
        if id in IdSet.from_wire(commit.trained):
            first = f"commit {commit.number} of term {commit.term}"
            earlier = " or in an older one" if commit is commits[0] and commit.number > 1 else ""
            yield f"committed  first in {first}{earlier}; the log still has {kept}"
            return
    if commits:
        yield f"           in none of the commits the log still has ({kept})"


def _state(reader: Reader, id: SampleId, records: list[Record], archived: bool | None) -> str:
    """archived: whether its line is; None: not asked for."""
    here = any(not reader.is_void(record) for record in records)
    committed = id in reader.control.committed
    if committed or id in reader.control.tombstones:
        word = "committed" if committed else reader.control.tombstones[id].state
        return f"{word}, {'its record is kept' if here else _FREED[archived]}"
    if here:
        return "deliverable, or with a member"
    if archived:
        return "in the archive: to be served from there, or with a member"
    line = id.in_epoch(0)
    if archived is not None and any(line == one.header.id.in_epoch(0) for one in reader.records()):
        return "in the spool under another epoch's id: to be served from there, or with a member"
    owned = id.partition in reader.shards
    return "not generated yet" if owned else "in a shard that this spool does not own"
