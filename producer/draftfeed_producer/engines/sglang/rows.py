"""The rows of requests that are being generated, in the producer's memory.

Two ways to find them again: by (request, position), or, when the engine's prefix cache is on, by
the KV slot of each token, whose row lives as long as the slot does.
"""

import logging
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from draftfeed_producer.engines.sglang.memory import available_bytes
from draftfeed_producer.errors import EngineError
from draftfeed_proto.sample import LayerCounters

logger = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """m rows of one slab. Valid only during the call they are given to."""

    handles: np.ndarray
    """int32 [m]"""
    positions: np.ndarray
    """int32 [m]"""
    tokens: np.ndarray
    """int32 [m], fed there"""
    kv_slots: np.ndarray
    """int32 [m], or [0]"""
    rows: np.ndarray
    """float16 [m, L, H]"""
    counters: np.ndarray
    """int32 [m, L, 4]"""


class Collected(NamedTuple):
    hidden_states: np.ndarray
    """float16 [n, L, H]"""
    counters: tuple[LayerCounters, ...]


class RowStore(Protocol):
    """`put` and `finish` are called by the thread that hears the engine, in the order in which
    the engine told; the others by the one that makes samples."""

    def open(self, handle: int, most_rows: int) -> None:
        """A request is about to be submitted."""
        ...

    def put(self, arrived: Arrived) -> None:
        """Copies. Rows of requests that are not open are dropped."""
        ...

    def finish(self, handle: int, kv_slots: np.ndarray) -> None:
        """The request has all its rows; its KV slots, int32 [n], may be used by others now."""
        ...

    def collect(self, handle: int, fed: np.ndarray) -> Collected | int:
        """The rows of the tokens int32 [n] that were fed, or how many of them are missing."""
        ...

    def drop(self, handle: int) -> None: ...


class PositionRows:
    """One array for each request, reserved before it is submitted. Untouched pages cost nothing."""

    def __init__(self, layers: int, hidden: int) -> None:
        self._shape = (layers, hidden)
        self._open: dict[int, _Request] = {}

    def open(self, handle: int, most_rows: int) -> None:
        self._open[handle] = _Request(most_rows, *self._shape)

    def put(self, arrived: Arrived) -> None:
        for handle, run in _runs(arrived.handles):
            if (request := self._open.get(handle)) is not None:
                request.put(run, arrived)

    def finish(self, handle: int, kv_slots: np.ndarray) -> None:
        pass

    def collect(self, handle: int, fed: np.ndarray) -> Collected | int:
        request = self._open[handle]
        n = len(fed)
        if n > len(request.tokens):
            return n - len(request.tokens)
        if missing := int((request.tokens[:n] != fed).sum()):
            return missing
        return Collected(request.rows[:n], _totals(request.counters[:n]))

    def drop(self, handle: int) -> None:
        self._open.pop(handle, None)


class _Request:
    def __init__(self, most_rows: int, layers: int, hidden: int) -> None:
        self.rows = np.empty((most_rows, layers, hidden), np.float16)
        self.counters = np.empty((most_rows, layers, 4), np.int32)
        self.tokens = np.full(most_rows, -1, np.int32)
        """-1: no row yet."""

    def put(self, run: slice, arrived: Arrived) -> None:
        at = arrived.positions[run]
        # The engine runs one pass more than it needs when it looks for the end a pass later.
        if at[-1] >= len(self.rows):
            run = slice(run.start, run.start + int((at < len(self.rows)).sum()))
            at = arrived.positions[run]
        self.rows[at] = arrived.rows[run]
        self.counters[at] = arrived.counters[run]
        self.tokens[at] = arrived.tokens[run]


class NoRows:
    """Where nothing is captured: rows of no layers."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden

    def open(self, handle: int, most_rows: int) -> None:
        pass

    def put(self, arrived: Arrived) -> None:
        pass

    def finish(self, handle: int, kv_slots: np.ndarray) -> None:
        pass

    def collect(self, handle: int, fed: np.ndarray) -> Collected | int:
        return Collected(np.empty((len(fed), 0, self._hidden), np.float16), ())

    def drop(self, handle: int) -> None:
        pass


class _Taken(NamedTuple):
    rows: np.ndarray
    counters: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray


class SlotRows:
    """One row for each KV slot. A prefix found in the cache has its rows here already."""

    def __init__(self, layers: int, hidden: int) -> None:
        self._shape = (layers, hidden)
        self._all = self._reserve(0)
        self._open: set[int] = set()
        self._finished: dict[int, _Taken] = {}

    def attach(self, kv_slots: int) -> None:
        """The engine has so many; none has a row. Before the first `put`, by the same thread."""
        self._all = self._reserve(kv_slots)

    def open(self, handle: int, most_rows: int) -> None:
        self._open.add(handle)

    def put(self, arrived: Arrived) -> None:
        at = arrived.kv_slots
        self._all.rows[at] = arrived.rows
        self._all.counters[at] = arrived.counters
        self._all.tokens[at] = arrived.tokens
        self._all.positions[at] = arrived.positions

    def finish(self, handle: int, kv_slots: np.ndarray) -> None:
        # A request seen once more, after its end, has no slots to tell.
        if handle not in self._open or not len(kv_slots):
            return
        # Copies: what the engine tells next may be rows of others in the same slots.
        self._finished[handle] = _Taken(*(array[kv_slots] for array in self._all))
        if handle not in self._open:  # dropped meanwhile, by the other thread
            self._finished.pop(handle, None)

    def collect(self, handle: int, fed: np.ndarray) -> Collected | int:
        n = len(fed)
        if handle not in self._finished:
            return n
        taken = _Taken(*(array[:n] for array in self._finished[handle]))
        if len(taken.tokens) < n:
            return n - len(taken.tokens)
        # A slot that was passed over still has the row of whoever had it before.
        wrong = (taken.tokens != fed) | (taken.positions != np.arange(n))
        if missing := int(wrong.sum()):
            return missing
        return Collected(taken.rows, _totals(taken.counters))

    def drop(self, handle: int) -> None:
        self._open.discard(handle)
        self._finished.pop(handle, None)

    def _reserve(self, kv_slots: int) -> _Taken:
        """Untouched pages cost nothing."""
        return _Taken(
            np.empty((kv_slots, *self._shape), np.float16),
            np.empty((kv_slots, *self._shape[:1], 4), np.int32),
            np.full(kv_slots, -1, np.int32),
            np.full(kv_slots, -1, np.int32),
        )


def check_memory(kv_slots: int, layers: int, hidden: int) -> None:
    """Says what `SlotRows` will take. Raises EngineError when the machine has not that much."""
    slot_bytes = 2 * layers * hidden + 16 * layers + 8
    needed, available = kv_slots * slot_bytes, available_bytes()
    text = f"{needed / 2**30:.1f} GiB for the rows of {kv_slots} KV slots, {slot_bytes} bytes each"
    logger.info("prefix cache: %s; %.1f GiB are available", text, available / 2**30)
    if needed > available:
        raise EngineError(
            f"[capture] prefix_cache needs {text}, and {available / 2**30:.1f} GiB are available: "
            "lower memory_fraction or args.max_total_tokens, or do without prefix_cache"
        )


def _runs(handles: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Stretches of one request: a prompt's chunk, or one token."""
    ends = np.append(np.flatnonzero(np.diff(handles)) + 1, len(handles))
    start = 0
    for end in ends.tolist():
        yield int(handles[start]), slice(start, end)
        start = end


def _totals(counters: np.ndarray) -> tuple[LayerCounters, ...]:
    return tuple(LayerCounters(*layer) for layer in counters.sum(0, dtype=np.int64).tolist())
