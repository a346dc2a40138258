"""Sample ids, and sets of them as intervals."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from operator import sub
from typing import Annotated

import msgspec

from draftfeed_proto import ranges
from draftfeed_proto.errors import MalformedMessage
from draftfeed_proto.limits import MAX_EPOCHS, MAX_ORDINALS
from draftfeed_proto.wire import Count

Dataset = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Ordinal = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ORDINALS)]

Partition = tuple[str, int, int]
"""(dataset, epoch, shard): everything of an id but its ordinal."""

WireRanges = list[tuple[Dataset, Count, Count, Ordinal, list[Count]]]
"""One entry a partition: its first ordinal, and how many from there on are in the set, how many
then are not, how many then are again, ... Such lengths are small numbers, of one byte each, also
where ids are trained in random order and every second one is a range of its own."""


class SampleId(
    msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True
):
    """Identity of a sample for as long as its prompt file exists.

    A spool's sequence numbers are never identity: a producer rebuilt on an empty disk would
    hand them out again.
    """

    dataset: Dataset
    """First 16 hex digits of the SHA-256 of the prompt file."""
    epoch: Count
    shard: Count
    ordinal: Ordinal
    """0-based raw line index in the prompt file, counted before any line is skipped."""

    @property
    def partition(self) -> Partition:
        return (self.dataset, self.epoch, self.shard)

    def in_epoch(self, epoch: int) -> "SampleId":
        """The same line in another epoch."""
        return SampleId(self.dataset, epoch, self.shard, self.ordinal)

    def __str__(self) -> str:
        return f"{self.dataset}/{self.epoch}/{self.shard}/{self.ordinal}"

    @classmethod
    def parse(cls, text: str) -> "SampleId":
        """Inverse of `str()`. Raises ValueError when `text` is not an id."""
        dataset, *numbers = text.split("/")
        try:
            id = msgspec.convert([dataset, *map(int, numbers)], cls)
        except (ValueError, msgspec.ValidationError):
            id = None
        # int() also takes signs, blanks, underscores and other scripts' digits.
        if id is None or str(id) != text:
            raise ValueError(f"{text!r} is not a sample id (dataset/epoch/shard/ordinal)")
        return id


class Shards(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which parts of one prompt file a producer owns. A shard is a stretch of its lines."""

    dataset: Dataset
    epoch: Count
    """The first of its epochs."""
    ranges: tuple[Count, ...]
    """Half-open ranges of shard numbers, flattened: rising, not touching."""
    epochs: Annotated[int, msgspec.Meta(ge=1, le=MAX_EPOCHS)] = 1
    """How many it has: epoch, epoch + 1, ..."""

    def __contains__(self, partition: Partition) -> bool:
        dataset, epoch, shard = partition
        mine = dataset == self.dataset and epoch in self.each_epoch
        return mine and ranges.contains(self.ranges, shard)

    def __and__(self, other: "Shards") -> list[int]:
        """Numbers of the shards both have in some epoch, as flattened ranges."""
        together = range(
            max(self.epoch, other.epoch), min(self.each_epoch.stop, other.each_epoch.stop)
        )
        if self.dataset != other.dataset or not together:
            return []
        return ranges.intersection(self.ranges, other.ranges)

    def one_epoch(self, epoch: int) -> "Shards":
        return Shards(self.dataset, epoch, self.ranges)

    @property
    def each_epoch(self) -> range:
        return range(self.epoch, self.epoch + self.epochs)

    def check(self) -> None:
        """Raises MalformedMessage when the ranges do not rise."""
        if self.ranges and not _are_ranges(list(self.ranges)):
            raise MalformedMessage(f"shards {list(self.ranges)} are not rising pairs")


class IdSet:
    """A set of sample ids held as sorted, disjoint ranges of ordinals per partition.

    Ledgers of a million samples trained nearly in order stay a few ranges long. A set that came
    over the wire may hold any number of ids: work on it with `-`, `update` and `in`, which take
    time by ranges; iterating takes time by ids.
    """

    def __init__(self, ids: Iterable[SampleId] = ()) -> None:
        self._ranges: dict[Partition, list[int]] = {}
        for id in ids:
            self.add(id)

    @classmethod
    def union(cls, sets: "Iterable[IdSet]") -> "IdSet":
        united = cls()
        for ids in sets:
            united.update(ids)
        return united

    def add(self, id: SampleId) -> None:
        self._add_range(id.partition, id.ordinal, id.ordinal + 1)

    def discard(self, id: SampleId) -> None:
        if id not in self:
            return
        edges = self._ranges[id.partition]
        at = bisect_right(edges, id.ordinal) - 1
        start, stop = edges[at], edges[at + 1]
        left = [start, id.ordinal] if start < id.ordinal else []
        right = [id.ordinal + 1, stop] if id.ordinal + 1 < stop else []
        edges[at : at + 2] = left + right
        if not edges:
            del self._ranges[id.partition]

    def update(self, other: "IdSet | Iterable[SampleId]") -> None:
        if not isinstance(other, IdSet):
            other = IdSet(other)
        for partition, edges in other._ranges.items():
            for start, stop in ranges.pairs(edges):
                self._add_range(partition, start, stop)

    def __sub__(self, other: "IdSet") -> "IdSet":
        rest = IdSet()
        for partition, edges in self._ranges.items():
            if left := ranges.difference(edges, other._ranges.get(partition, [])):
                rest._ranges[partition] = left
        return rest

    def within(self, shards: Shards) -> "IdSet":
        """Those that lie in these shards."""
        part = IdSet()
        part._ranges = {p: list(edges) for p, edges in self._ranges.items() if p in shards}
        return part

    def in_epoch(self, epoch: int) -> "IdSet":
        """The same lines in another epoch; those of all epochs here together."""
        moved = IdSet()
        for (dataset, _, shard), edges in self._ranges.items():
            for start, stop in ranges.pairs(edges):
                moved._add_range((dataset, epoch, shard), start, stop)
        return moved

    def copy(self) -> "IdSet":
        twin = IdSet()
        twin._ranges = {partition: list(edges) for partition, edges in self._ranges.items()}
        return twin

    def __contains__(self, id: SampleId) -> bool:
        return ranges.contains(self._ranges.get(id.partition, ()), id.ordinal)

    def __iter__(self) -> Iterator[SampleId]:
        for partition in sorted(self._ranges):
            for start, stop in ranges.pairs(self._ranges[partition]):
                for ordinal in range(start, stop):
                    yield SampleId(*partition, ordinal)

    def __len__(self) -> int:
        return sum(
            stop - start for edges in self._ranges.values() for start, stop in ranges.pairs(edges)
        )

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdSet) and self._ranges == other._ranges

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"IdSet({len(self)} ids in {len(self._ranges)} partitions)"

    def __and__(self, other: "IdSet") -> "IdSet":
        return self - (self - other)

    def by_partition(self) -> Iterator[tuple[Partition, list[int]]]:
        """Half-open ranges of ordinals, flattened: [start, stop, start, stop, ...]."""
        for partition in sorted(self._ranges):
            yield partition, list(self._ranges[partition])

    def to_wire(self) -> WireRanges:
        return [
            (*partition, edges[0], list(map(sub, edges[1:], edges)))
            for partition, edges in self.by_partition()
        ]

    @classmethod
    def from_wire(cls, wire: WireRanges) -> "IdSet":
        """Raises MalformedMessage when a partition comes twice, or when its lengths are not an odd
        number of positive ones that end within 0..MAX_ORDINALS."""
        ids = cls()
        for dataset, epoch, shard, first, lengths in wire:
            partition = (dataset, epoch, shard)
            if partition in ids._ranges:
                raise MalformedMessage(f"ranges of {dataset}/{epoch}/{shard} come twice")
            edges = list(accumulate(lengths, initial=first))
            if len(edges) % 2 or min(lengths) < 1 or not 0 <= first < edges[-1] <= MAX_ORDINALS:
                raise MalformedMessage(f"ranges of {dataset}/{epoch}/{shard} are not ranges")
            ids._ranges[partition] = edges
        return ids

    def _add_range(self, partition: Partition, start: int, stop: int) -> None:
        ranges.add(self._ranges.setdefault(partition, []), start, stop)


def _are_ranges(edges: list[int]) -> bool:
    if not edges or len(edges) % 2:
        return False
    rising = all(a < b for a, b in pairwise(edges))
    return rising and edges[0] >= 0 and edges[-1] <= MAX_ORDINALS
