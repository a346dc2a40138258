"""Staging ring: what the gather writes on the device, copied to the host while it computes on.

    reserve -> gather is launched -> submit -> copy -> take -> release

Slots are handed out in ring order. A reservation is copied in pieces, each of at most one slab
and one contiguous range of slots. Addresses never change, so a CUDA graph may hold them.

Who waits for whom, and why it ends:

* A gather waits for nothing of ours: its slots were free before it was launched, which the
  thread had seen and the device need not check.
* A copy waits, on the device, for its gather, or for what its owner chose to be behind it (in
  SGLang, its own read-back). That is queued already, on a stream that never waits for copies, so
  a copy that was issued ends.
* A slot waits for its copy, a copy that is not issued waits for a slab, and a slab waits for
  the caller to release what it took. No wait leads back, so who releases what it takes gets on.
* The thread waits in `wait` and `close` only, and only for what is queued on a stream; with
  every slab in the caller's hands `wait` returns at once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftfeed_producer.errors import RingTooSmall
from draftfeed_producer.tap.reference import COUNTERS
from draftfeed_producer.tap.streams import CudaStreams, Event, HostStreams, Streams


class Slab(NamedTuple):
    """Host memory for one piece."""

    rows: Tensor
    """fp16 or bf16 [n, L, H]"""
    counters: Tensor
    """int32 [n, L, 4]"""


@dataclass(eq=False)
class Reservation:
    slots: Tensor
    """int32 [n], on the host: the slot of each of the n rows."""
    _first: int
    """Its first slot, counted on through all laps of the ring."""
    _freed: int = 0
    """How many of its slots, from the first on, may be handed out again."""


@dataclass(eq=False, frozen=True)
class Piece:
    """Rows of one reservation, on the host until they are released."""

    tag: object
    start: int
    """Index of the first row within the reservation."""
    last: bool
    """The reservation has no more."""
    rows: Tensor
    """[m, L, H]"""
    counters: Tensor
    """int32 [m, L, 4]"""
    _slab: Slab


class RingStatistics(NamedTuple):
    slots: int
    free_slots: int
    queued: int
    """Pieces submitted for which there was no slab yet."""
    in_flight: int
    """Pieces being copied, or copied and not looked at."""
    ready: int
    """Pieces that `take` would give at once."""
    held: int
    """Pieces taken and not released."""
    refused: int
    """How often there was no room, since the ring was made."""


class RingSizes(NamedTuple):
    piece_bytes: int
    pieces: int
    """The ring's own memory, in pieces."""
    slabs: int
    """Each holds one piece."""


DEVICE_SIZES = RingSizes(piece_bytes=8 << 20, pieces=8, slabs=4)
"""Copies of 8 MiB run at the link's full rate, and hold up others on it for a fraction of a
millisecond. Gathers may be 64 MiB ahead of them."""

HOST_SIZES = RingSizes(piece_bytes=1 << 20, pieces=2, slabs=2)
"""On the CPU nothing overlaps: small enough to stay in the cache."""


@dataclass(eq=False, frozen=True)
class _Copy:
    """One piece that is yet to come."""

    reservation: Reservation
    tag: object
    written: Event
    start: int
    """Index of its first row within the reservation."""
    n: int
    slot: int
    """Of its first row."""

    @property
    def last(self) -> bool:
        return self.start + self.n == len(self.reservation.slots)


class _Flight(NamedTuple):
    copy: _Copy
    slab: Slab
    copied: Event


class StagingRing:
    """One thread owns it. Nothing blocks but `wait` and `close`.

    rows      fp16 or bf16 [slots, L, H], on the device
    counters  int32 [slots, L, 4], on the device
    """

    def __init__(
        self,
        streams: Streams,
        slots: int,
        layers: int,
        hidden: int,
        *,
        dtype: torch.dtype = torch.float16,
        slabs: Sequence[Slab],
    ) -> None:
        """All slabs are of one length, which bounds that of a piece."""
        assert slots > 0
        n = len(slabs[0].rows)
        for slab in slabs:
            assert slab.rows.shape == (n, layers, hidden), slab.rows.shape
            assert slab.counters.shape == (n, layers, COUNTERS), slab.counters.shape
            assert (slab.rows.dtype, slab.counters.dtype) == (dtype, torch.int32)
        self._piece_rows = min(n, slots)
        self._streams = streams
        self.rows = streams.staging((slots, layers, hidden), dtype)
        self.counters = streams.staging((slots, layers, COUNTERS), torch.int32)
        self._head = 0
        """Slots handed out since the ring was made; the next one is this, modulo the ring."""
        self._in_order: deque[Reservation] = deque()
        """Those with slots that are not free, oldest first."""
        self._open: set[Reservation] = set()
        """Those neither submitted nor cancelled."""
        self._queued: deque[_Copy] = deque()
        self._flying: deque[_Flight] = deque()
        self._ready: deque[Piece] = deque()
        self._held: set[Piece] = set()
        self._free_slabs = deque(slabs)
        self._pending = self._refused = 0

    @property
    def piece_rows(self) -> int:
        """Rows of the longest piece."""
        return self._piece_rows

    @property
    def pending(self) -> int:
        """Rows submitted and not yet taken."""
        return self._pending

    def reserve(self, n: int) -> Reservation | None:
        """Slots for n rows, or None when there is no room for them now.

        Raises RingTooSmall when there never could be.
        """
        assert n > 0, n
        if n > len(self.rows):
            raise RingTooSmall(n, len(self.rows))
        self._settle()
        if n > self._free_slots:
            self._refused += 1
            return None
        slots = torch.arange(self._head, self._head + n).remainder_(len(self.rows))
        reservation = Reservation(slots.to(torch.int32), self._head)
        self._head += n
        self._in_order.append(reservation)
        self._open.add(reservation)
        return reservation

    def submit(self, reservation: Reservation, tag: object) -> None:
        """Its gather was launched, on the stream that the caller computes on."""
        assert reservation in self._open, "submitted or cancelled before, or of another ring"
        self._open.remove(reservation)
        self._queued.extend(self._cut(reservation, tag, self._streams.written()))
        self._pending += len(reservation.slots)
        self._advance()

    def cancel(self, reservation: Reservation) -> None:
        """Nothing was launched for it. Its slots come back in their turn."""
        assert reservation in self._open, "submitted or cancelled before, or of another ring"
        self._open.remove(reservation)
        reservation._freed = len(reservation.slots)

    def take(self) -> Piece | None:
        """The next piece, in order of submission, if its copy is done."""
        self._advance()
        if not self._ready:
            return None
        piece = self._ready.popleft()
        self._held.add(piece)
        self._pending -= len(piece.rows)
        return piece

    def release(self, piece: Piece) -> None:
        """Its rows may be overwritten. In any order."""
        assert piece in self._held, "released before, or of another ring"
        self._held.remove(piece)
        self._free_slabs.append(piece._slab)

    def wait(self) -> None:
        """Blocks until the oldest copy in flight is done; returns at once when there is none."""
        self._issue()
        if self._flying:
            self._flying[0].copied.wait()
        self._advance()

    def statistics(self) -> RingStatistics:
        return RingStatistics(
            slots=len(self.rows),
            free_slots=self._free_slots,
            queued=len(self._queued),
            in_flight=len(self._flying),
            ready=len(self._ready),
            held=len(self._held),
            refused=self._refused,
        )

    def close(self) -> None:
        """Lets go of all memory once no gather and no copy uses it; blocks until then.

        What was not taken is lost. Pieces in the caller's hands stay what they are.
        """
        self._streams.written().wait()
        for flight in self._flying:
            flight.copied.wait()
        for queue in (self._queued, self._flying, self._ready, self._in_order, self._free_slabs):
            queue.clear()
        self._open.clear()
        self._pending = 0
        self.rows, self.counters = self.rows[:0].clone(), self.counters[:0].clone()

    @property
    def _free_slots(self) -> int:
        while self._in_order and self._in_order[0]._freed == len(self._in_order[0].slots):
            self._in_order.popleft()
        if not self._in_order:
            return len(self.rows)
        oldest = self._in_order[0]
        return len(self.rows) - (self._head - oldest._first - oldest._freed)

    def _cut(self, reservation: Reservation, tag: object, written: Event) -> Iterator[_Copy]:
        start, n = 0, len(reservation.slots)
        while start < n:
            slot = (reservation._first + start) % len(self.rows)
            m = min(n - start, self._piece_rows, len(self.rows) - slot)
            yield _Copy(reservation, tag, written, start, m, slot)
            start += m

    def _advance(self) -> None:
        self._settle()
        self._issue()

    def _settle(self) -> None:
        """Copies on one stream end in the order in which they were issued."""
        while self._flying and self._flying[0].copied.done():
            copy, slab, _ = self._flying.popleft()
            copy.reservation._freed += copy.n
            rows, counters = slab.rows[: copy.n], slab.counters[: copy.n]
            self._ready.append(Piece(copy.tag, copy.start, copy.last, rows, counters, slab))

    def _issue(self) -> None:
        while self._queued and self._free_slabs:
            copy, slab = self._queued.popleft(), self._free_slabs.popleft()
            staged = slice(copy.slot, copy.slot + copy.n)
            self._streams.copy(slab.rows[: copy.n], self.rows[staged], copy.written)
            self._streams.copy(slab.counters[: copy.n], self.counters[staged], copy.written)
            self._flying.append(_Flight(copy, slab, self._streams.copied()))


def for_device(device: torch.device) -> tuple[Streams, RingSizes]:
    """The first arguments of `make_ring`."""
    if device.type == "cuda":
        return CudaStreams(device), DEVICE_SIZES
    return HostStreams(), HOST_SIZES


def make_ring(
    streams: Streams,
    sizes: RingSizes,
    layers: int,
    hidden: int,
    *,
    dtype: torch.dtype = torch.float16,
    slabs: Sequence[Slab] | None = None,
) -> StagingRing:
    """The ring of one engine; `slabs` are given when others read them, too."""
    if slabs is None:
        slabs = make_slabs(streams, sizes.slabs, sizes.piece_bytes, layers, hidden, dtype)
    slots = sizes.pieces * len(slabs[0].rows)
    return StagingRing(streams, slots, layers, hidden, dtype=dtype, slabs=slabs)


def make_slabs(
    streams: Streams,
    count: int,
    piece_bytes: int,
    layers: int,
    hidden: int,
    dtype: torch.dtype = torch.float16,
) -> list[Slab]:
    """`piece_bytes` bounds the rows of one, which are at least one row; counters come on top."""
    # A power of two stays one: torch rounds pinned memory up to the next.
    n = max(1, piece_bytes // (layers * hidden * dtype.itemsize))
    return [
        Slab(
            streams.slab((n, layers, hidden), dtype),
            streams.slab((n, layers, COUNTERS), torch.int32),
        )
        for _ in range(count)
    ]
