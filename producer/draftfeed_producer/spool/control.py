"""What a control log says: commits, terms, tombstones, suspects, voids and shards."""

from collections.abc import Iterator

import msgspec

from draftfeed_proto.ids import IdSet, SampleId, Shards, WireRanges


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """A durable checkpoint holds the effect of exactly these samples (cumulative)."""

    number: int
    trained: WireRanges
    term: int = 0
    """In which the checkpoint was made."""
    rollback: bool = False
    """It takes samples away: no commit before it counts any more."""
    regenerated: WireRanges = []
    """What a rollback took away and the spool no longer had."""


class Tombstone(msgspec.Struct, frozen=True, tag="tombstone"):
    """A prompt that ended without being trained, and why."""

    id: SampleId
    state: str
    reason: str


class Term(msgspec.Struct, frozen=True, tag="term"):
    """The group that may take samples, under this fencing number."""

    term: int
    group: str
    incarnation: str
    members: int = 1


class Suspects(msgspec.Struct, frozen=True, tag="suspects"):
    """All samples that a lost member was at work on, and in how many terms in a row."""

    counts: list[tuple[SampleId, int]]


class Void(msgspec.Struct, frozen=True, tag="void"):
    """The record at this place is not to be used; one of the same id elsewhere may be."""

    id: SampleId
    segment: int
    offset: int
    reason: str


class Owned(msgspec.Struct, frozen=True, tag="shards"):
    """The shards that this spool owns."""

    shards: Shards
    lost: Shards
    """Those of them that came from a spool that is gone: only the trainer's ledger knows what was
    trained of them."""
    regenerated: WireRanges = []
    """What the ledger did not have of those that were lost until now."""


class Regenerated(msgspec.Struct, frozen=True, tag="regenerated"):
    """These too had to be made again because what was there first is damaged or lost."""

    ids: WireRanges


Record = Commit | Tombstone | Term | Suspects | Void | Owned | Regenerated


class Control:
    """The state that a sequence of records adds up to."""

    def __init__(self, keep_commits: int) -> None:
        self._keep_commits = keep_commits
        self.commits: list[Commit] = []
        """The last few, oldest first."""
        self.tombstones: dict[SampleId, Tombstone] = {}
        self.term: Term | None = None
        self.suspects: dict[SampleId, int] = {}
        self.voids: dict[tuple[int, int], Void] = {}
        """By segment and offset of the record."""
        self.owned: Owned | None = None
        self.regenerated = IdSet()

    @property
    def freeable(self) -> IdSet:
        """Samples in every checkpoint that may still be restored: the oldest kept commit."""
        if len(self.commits) < self._keep_commits:
            return IdSet()
        return IdSet.from_wire(self.commits[0].trained)

    @property
    def committed(self) -> IdSet:
        return IdSet.from_wire(self.commits[-1].trained) if self.commits else IdSet()

    def apply(self, record: Record) -> None:
        match record:
            case Commit():
                before = [] if record.rollback else self.commits
                if before and _key(before[-1]) == _key(record):
                    before = before[:-1]  # one that is stored twice is one checkpoint
                self.commits = [*before, record][-self._keep_commits :]
                self._regenerate(IdSet.from_wire(record.regenerated))
            case Tombstone():
                self.tombstones[record.id] = record
            case Term():
                self.term = record
            case Suspects():
                self.suspects = dict(record.counts)
            case Void():
                self.voids[record.segment, record.offset] = record
                self._regenerate(IdSet([record.id]))
            case Owned():
                self.owned = record
                self._regenerate(IdSet.from_wire(record.regenerated))
            case Regenerated():
                self._regenerate(IdSet.from_wire(record.ids))

    def records(self, segments: set[int]) -> Iterator[Record]:
        """The fewest records that add up to this state, in a spool that still has `segments`."""
        if self.owned is not None:
            yield Owned(self.owned.shards, self.owned.lost)
        if self.term is not None:
            yield self.term
        yield Regenerated(self.regenerated.to_wire())
        yield Suspects(list(self.suspects.items()))
        yield from (void for void in self.voids.values() if void.segment in segments)
        yield from self.tombstones.values()
        yield from self.commits

    def _regenerate(self, ids: IdSet) -> None:
        if ids:
            regenerated = self.regenerated.copy()  # others may be reading the one there is
            regenerated.update(ids)
            self.regenerated = regenerated


def _key(commit: Commit) -> tuple[int, int]:
    return commit.term, commit.number
