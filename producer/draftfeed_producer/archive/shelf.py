"""The samples of an epoch that exist already, in the order in which they are served."""

import threading
from collections import deque
from collections.abc import Iterator

import numpy as np

from draftfeed_producer.archive.config import Order
from draftfeed_producer.archive.store import ArchivedSpool, BeingSealed
from draftfeed_proto import ranges
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import SampleHeader

MAX_LATER = 128


class Shelf:
    """Filled by one thread, an epoch at a time; emptied by another."""

    def __init__(self, spool: ArchivedSpool) -> None:
        self._spool = spool
        self._lock = threading.Lock()
        self._order = np.zeros(0, np.int64)
        self._next = 0
        self._later: deque[SampleId] = deque()
        """That could not be had yet, and those given back."""
        self._lines = _Lines(IdSet(), 0)
        self.served = 0
        """Samples taken from it since the process began."""

    def lines(self) -> IdSet:
        """See `ArchivedSpool.lines`."""
        return self._spool.lines()

    def begin(self, epoch: int, ids: IdSet) -> None:
        """ids: of the epoch, those to be served. The epoch before must be over."""
        lines = _Lines(ids, epoch)
        config = self._spool.archive.config
        places = self._spool.archive.place(lines.ordinals)
        segments = self._spool.archive.segment_of(places)
        order = shuffled(places, segments, config.order, config.seed, epoch)
        with self._lock:
            self._lines, self._order, self._next = lines, order, 0

    def take(self) -> tuple[SampleId, SampleHeader | None] | None:
        """The next one that is not finished by now, and its header: without one it cannot be read,
        and is to be generated. None when there is none at the moment; see `exhausted`."""
        with self._lock:
            for id in self._candidates():
                if self._spool.finished(id):
                    continue
                try:
                    header = self._spool.shelve(id)
                except BeingSealed:
                    self._later.append(id)
                    continue
                self.served += header is not None
                return id, header
        return None

    def give_back(self, id: SampleId) -> bool:
        """What was served of it is damaged. Whether there is another copy, which comes next."""
        if self._spool.archive.header(id) is None:
            return False
        with self._lock:
            self._later.append(id)
        return True

    def _candidates(self) -> Iterator[SampleId]:
        """First those that have waited, each once, then those that come next."""
        for _ in range(len(self._later)):
            yield self._later.popleft()
        while self._next < len(self._order) and len(self._later) < MAX_LATER:
            self._next += 1
            yield self._lines.id(int(self._order[self._next - 1]))

    @property
    def exhausted(self) -> bool:
        with self._lock:  # one that was looked at in vain is in `_later` again afterwards
            return self._next >= len(self._order) and not self._later


class _Lines:
    """Ids of one epoch by position, in as few bytes as they need."""

    def __init__(self, ids: IdSet, epoch: int) -> None:
        self._epoch = epoch
        parts = [
            (dataset, shard, np.arange(start, stop, dtype=np.int64))
            for (dataset, _, shard), edges in ids.by_partition()
            for start, stop in ranges.pairs(edges)
        ]
        self._dataset = parts[0][0] if parts else ""
        none = np.zeros(0, np.int64)
        self.ordinals = np.concatenate([none, *(part[2] for part in parts)])
        shards = [np.full(len(ordinals), shard, np.int64) for _, shard, ordinals in parts]
        self._shards = np.concatenate([none, *shards])

    def id(self, at: int) -> SampleId:
        return SampleId(self._dataset, self._epoch, int(self._shards[at]), int(self.ordinals[at]))


def shuffled(
    places: np.ndarray, segments: np.ndarray, order: Order, seed: int, epoch: int
) -> np.ndarray:
    """int64[n]: positions in the order of an epoch. The same for the same seed, epoch and archive.

    places, segments: int64[n], see `Archive`; what lies in no sealed segment is as one of its own.
    """
    rng = np.random.Generator(np.random.PCG64([seed, epoch]))
    if order == "samples":
        return rng.permutation(len(places))
    if order == "stored":
        return np.argsort(places, kind="stable")
    among = rng.permutation(len(places))
    _, number = np.unique(segments, return_inverse=True)
    rank = rng.permutation(int(number.max(initial=-1)) + 1)
    return among[np.argsort(rank[number][among], kind="stable")]
