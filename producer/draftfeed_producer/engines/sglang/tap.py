"""In the scheduler's process: packed states in, rows in shared memory and word of them out.

    take_pass    the forward pass was launched: gather its rows, on its own stream
    copy_pass    the engine reads its results back: so do we, behind the tokens
    hand_over    the results are being processed: announce the rows, wait for them if need be

Nothing here knows SGLang; `plugin.py` does.
"""

import os
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import zmq
from torch import Tensor

from draftfeed_producer.engines.sglang import messages
from draftfeed_producer.engines.sglang.messages import Copied, Finished, Settings
from draftfeed_producer.engines.sglang.slabs import SharedSlabs, SlabShape
from draftfeed_producer.errors import TapLayoutError
from draftfeed_producer.tap.gather import gather_packed, gather_with_final
from draftfeed_producer.tap.ring import Piece, Reservation, Slab, StagingRing
from draftfeed_producer.tap.streams import CudaStreams, Event, HostStreams, Streams, to_device

POLL_SECONDS = 0.5


@dataclass(eq=False)
class Pass:
    """One forward pass whose rows are on their way."""

    handles: np.ndarray
    """int32 [m], of the rows that are wanted"""
    positions: np.ndarray
    """int32 [m]"""
    reservation: Reservation
    tokens: Tensor
    """int64 [m]: on the device, then on the host"""
    kv_slots: Tensor | None
    """int64 [m], likewise, where rows go by KV slot"""
    read_back: Event | None = None
    """Done when `tokens` and `kv_slots` are on the host. None: not asked for yet."""
    announced: bool = False
    """All of it."""


class HostGone(RuntimeError):
    """The process that started this one has ended: nobody gives slabs back any more."""


class RequestTap:
    """Owns the staging ring, the shared slabs and the sockets of one scheduler."""

    def __init__(self, settings: Settings, device: torch.device, longest_pass: int) -> None:
        """longest_pass: rows. The ring holds two: one is gathered while one is copied."""
        shape = SlabShape(settings.slabs, settings.slab_rows, settings.layers, settings.hidden)
        self._shared = SharedSlabs.attach(shape, settings.memory)
        self._streams: Streams = HostStreams()
        if device.type == "cuda":
            _pin(self._shared)
            self._streams = CudaStreams(device)
        slabs = [_as_slab(self._shared, index) for index in range(settings.slabs)]
        self._slab_index = {slab.rows.data_ptr(): index for index, slab in enumerate(slabs)}
        self._ring = StagingRing(
            self._streams, 2 * longest_pass, settings.layers, settings.hidden, slabs=slabs
        )
        self._device = device
        self._lent: dict[int, Piece] = {}
        """Pieces that the producer reads, by slab."""
        self._host = os.getppid()
        context: zmq.Context[Any] = zmq.Context.instance()
        self._told, self._freed = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket in (self._told, self._freed):
            # Both are bounded by the slabs and the requests there are.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
        self._told.connect(settings.told)
        self._freed.connect(settings.freed)

    def take_pass(
        self,
        packed: Tensor,
        wanted: np.ndarray,
        handles: np.ndarray,
        positions: np.ndarray,
        tokens: Tensor,
        kv_slots: Tensor | None,
        final: Tensor | None = None,
    ) -> Pass:
        """Gathers the wanted rows of one pass.

        packed    [T, L*H], a view of memory that the next pass overwrites
        final     [T, H], likewise: the last of the L layers, which `packed` then lacks
        wanted    int64 [m], indices of rows of ours, rising
        tokens    int64 [T], on the device
        kv_slots  int64 [T], on the device
        Raises HostGone; RingTooSmall when a pass is longer than the engine said; TapLayoutError.
        """
        packed = _rounded("packed", packed)
        reservation = self._reserve(len(wanted))
        everything = len(wanted) == len(packed)
        row_map = reservation.slots
        if not everything:
            row_map = torch.full((len(packed),), -1, dtype=torch.int32)
            row_map[torch.from_numpy(wanted)] = reservation.slots
            at = to_device(torch.from_numpy(wanted), self._device)
            tokens = tokens[at]
            kv_slots = None if kv_slots is None else kv_slots[at]
        row_map = to_device(row_map, self._device)
        staged = self._ring.rows, self._ring.counters
        if final is None:
            gather_packed(packed, row_map, *staged)
        else:
            gather_with_final(packed, _rounded("final", final), row_map, *staged)
        # Copies: the engine writes its own tensors again before these are read back.
        kv_slots = None if kv_slots is None else kv_slots.clone()
        return Pass(handles, positions, reservation, tokens.clone(), kv_slots)

    def copy_pass(self, taken: Pass, read_back: Any) -> None:
        """`read_back(tensor)` queues a copy to the host on the current stream."""
        taken.tokens = read_back(taken.tokens)
        if taken.kv_slots is not None:
            taken.kv_slots = read_back(taken.kv_slots)
        # The current stream waits for the pass, and is where the engine's tokens travel: rows
        # are queued behind them.
        taken.read_back = self._streams.written()
        self._ring.submit(taken.reservation, taken)

    def hand_over(self, taken: Pass) -> None:
        """Returns when all its rows are announced. Raises HostGone."""
        while not taken.announced:
            self._progress()

    def finished(self, handle: int, kv_slots: np.ndarray | None) -> None:
        """All rows of the request were handed over."""
        slots = b"" if kv_slots is None else kv_slots.astype("<i4").tobytes()
        self._tell(Finished(handle=handle, kv_slots=slots))

    def attached(self, kv_slots: int) -> None:
        self._tell(messages.Attached(kv_slots=kv_slots, device=str(self._device)))

    def _reserve(self, n: int) -> Reservation:
        """Waits on the host, before anything is launched, when copies are behind."""
        while (reservation := self._ring.reserve(n)) is None:
            self._progress()
        return reservation

    def _progress(self) -> None:
        """One step towards more room: announce what is copied, or wait for what must come."""
        self._take_back()
        if (piece := self._ring.take()) is not None:
            self._announce(piece)
        elif self._ring.statistics().in_flight:
            self._ring.wait()
        else:
            assert self._lent, "rows are waited for that nobody has asked to be copied"
            self._await_free_slab()

    def _announce(self, piece: Piece) -> None:
        taken = piece.tag
        assert isinstance(taken, Pass)
        assert taken.read_back is not None
        taken.read_back.wait()
        rows = slice(piece.start, piece.start + len(piece.rows))
        slab = self._slab_index[piece.rows.data_ptr()]
        self._lent[slab] = piece
        kv_slots = b"" if taken.kv_slots is None else _int32(taken.kv_slots[rows])
        self._tell(
            Copied(
                slab=slab,
                handles=taken.handles[rows].tobytes(),
                positions=taken.positions[rows].tobytes(),
                tokens=_int32(taken.tokens[rows]),
                kv_slots=kv_slots,
            )
        )
        taken.announced = piece.last

    def _take_back(self) -> None:
        while True:
            try:
                raw = self._freed.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._ring.release(self._lent.pop(messages.decode_freed(raw).slab))

    def _await_free_slab(self) -> None:
        if not self._freed.poll(int(1000 * POLL_SECONDS)) and os.getppid() != self._host:
            raise HostGone("the host of this engine has ended")

    def _tell(self, message: messages.Told) -> None:
        self._told.send(messages.encode(message))


def _rounded(name: str, states: Tensor) -> Tensor:
    """As the wire would, where the target computes in fp32; else nothing happens. Raises
    TapLayoutError."""
    if states.dtype not in (torch.bfloat16, torch.float32):
        raise TapLayoutError(name, str(states.dtype), "torch.bfloat16 or torch.float32")
    return states.to(torch.bfloat16)


def _as_slab(shared: SharedSlabs, index: int) -> Slab:
    rows, counters = shared.slab(index)
    return Slab(torch.from_numpy(rows), torch.from_numpy(counters))


def _pin(shared: SharedSlabs) -> None:
    """Lets the GPU write the shared memory directly."""
    runtime = cast(Any, torch.cuda).cudart()
    error = runtime.cudaHostRegister(shared.address, shared.shape.total_bytes, 0)
    if int(error) != 0:
        raise RuntimeError(f"shared memory cannot be pinned: CUDA error {int(error)}")


def _int32(values: Tensor) -> bytes:
    return values.to(torch.int32).numpy().tobytes()
