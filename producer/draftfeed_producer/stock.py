"""Samples that are in the spool and not yet terminal, and the queue of those that nobody has."""

import heapq
import itertools
from collections.abc import Iterable, Iterator

from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import SampleHeader


class Stock:
    """The queue keeps the order in which samples were stored: one given back goes to the head."""

    def __init__(self) -> None:
        self._headers: dict[SampleId, SampleHeader] = {}
        self._order: dict[SampleId, int] = {}
        self._next = itertools.count()
        self._heap: list[tuple[int, SampleId]] = []
        self._queued: set[SampleId] = set()
        """The heap may still name samples that have left it."""

    def __contains__(self, id: SampleId) -> bool:
        return id in self._headers

    def __iter__(self) -> Iterator[SampleId]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def __getitem__(self, id: SampleId) -> SampleHeader:
        return self._headers[id]

    @property
    def queued(self) -> frozenset[SampleId]:
        return frozenset(self._queued)

    @property
    def spooled(self) -> int:
        """How many nobody has."""
        return len(self._queued)

    @property
    def waiting(self) -> bool:
        return bool(self._queued)

    def add(self, header: SampleHeader) -> None:
        self._headers[header.id] = header
        self._order[header.id] = next(self._next)
        self.give_back([header.id])

    def give_back(self, ids: Iterable[SampleId]) -> None:
        """Into the queue, those that are not terminal by now."""
        for id in ids:
            if id in self._headers and id not in self._queued:
                self._queued.add(id)
                heapq.heappush(self._heap, (self._order[id], id))

    def claim(self, ids: Iterable[SampleId]) -> None:
        """Out of the queue: somebody has them."""
        self._queued.difference_update(ids)

    def take(self) -> SampleHeader | None:
        """The head of the queue."""
        while self._heap:
            _, id = heapq.heappop(self._heap)
            if id in self._queued:
                self._queued.discard(id)
                return self._headers[id]
        return None

    def remove(self, ids: Iterable[SampleId]) -> None:
        for id in ids:
            self._headers.pop(id, None)
            self._order.pop(id, None)
            self._queued.discard(id)
