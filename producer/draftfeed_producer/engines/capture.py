"""Takes the tapped blocks' rows out of every forward pass of a generating batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftfeed_producer.tap.gather import gather_packed
from draftfeed_producer.tap.ring import Reservation, StagingRing
from draftfeed_producer.tap.streams import to_device
from draftfeed_proto.sample import LayerCounters


class BlockTap:
    """Forward hooks on decoder blocks, or on the norm behind them, and the rows of a batch that
    they fill.

    A row belongs to (sequence, position), place `sequence * span + position`: a forward pass that
    repeats a position overwrites its row and never adds one. Padding and what a finished
    sequence is still fed get no row. The rows of a batch are on the host, and their memory is
    reused by the next batch; they come there through a staging ring, while the model goes on.
    """

    def __init__(self, blocks: Sequence[nn.Module], ring: StagingRing) -> None:
        """blocks: in the order in which they are called. The ring is this tap's own from now on.
        Its device is where rows are packed."""
        self._blocks = tuple(blocks)
        self._ring = ring
        _, layers, self._hidden = ring.rows.shape
        assert layers == len(blocks), layers
        self._packed = ring.rows.new_empty(0, layers * self._hidden, dtype=torch.bfloat16)
        self._rows = torch.empty(0, *ring.rows.shape[1:], dtype=ring.rows.dtype)
        self._counters = torch.empty(0, *ring.counters.shape[1:], dtype=torch.int32)
        self._filled = torch.empty(0, dtype=torch.bool)
        self.captured = 0
        """Rows on the host since this tap was made, of samples that are not finished too."""

    def begin(self, lengths: Sequence[int], max_new_tokens: int) -> None:
        """Starts a batch of left-padded prompts of these lengths, in tokens."""
        width = max(lengths)
        self._shift = torch.tensor([length - width for length in lengths])[:, None]
        self._begin([width + max_new_tokens - 1] * len(lengths))

    def begin_given(self, lengths: Sequence[int]) -> None:
        """Starts a batch of right-padded prompts with their responses, so many tokens each."""
        self._shift = torch.zeros(len(lengths), 1, dtype=torch.int64)
        self._begin(lengths)

    def _begin(self, rows: Sequence[int]) -> None:
        """rows: that each sequence can have."""
        self._drain()  # of a batch that failed
        self._end = torch.tensor(rows)[:, None]
        self._span = max(rows)
        self._base = torch.arange(len(rows))[:, None] * self._span
        self._column = 0
        self._taken = 0
        self.finished = torch.zeros(len(rows), dtype=torch.bool)
        """bool[sequences], on the host: set by who samples; their passes leave no more rows."""
        self._make_room(len(rows) * self._span)
        self._filled.zero_()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The hooks are in place inside the block; behind it all rows are on the host."""
        handles = [
            block.register_forward_hook(partial(self._take, layer))
            for layer, block in enumerate(self._blocks)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._drain()

    def missing(self, sequence: int, n: int) -> int:
        """How many of the first n positions have no row."""
        return n - int(self._filled[self._places(sequence, n)].sum())

    def rows(self, sequence: int, n: int) -> np.ndarray:
        """float16[n, L, H], a copy."""
        return self._rows[self._places(sequence, n)].numpy().copy()

    def counters(self, sequence: int, n: int) -> tuple[LayerCounters, ...]:
        totals = self._counters[self._places(sequence, n)].sum(0).tolist()
        return tuple(LayerCounters(*layer) for layer in totals)

    def forget(self) -> None:
        """Lets go of all rows, and of the memory that the next batch would have reused."""
        for name in ("_packed", "_rows", "_counters", "_filled"):
            setattr(self, name, getattr(self, name)[:0].clone())

    def close(self) -> None:
        """Lets go of the model's blocks, too."""
        self._blocks = ()
        self._ring.close()
        self.forget()

    def _places(self, sequence: int, n: int) -> slice:
        first = sequence * self._span
        return slice(first, first + n)

    def _make_room(self, places: int) -> None:
        if len(self._rows) < places:
            # Pages that are never written cost nothing, so the longest responses may be planned.
            self._rows = self._rows.new_empty(places, *self._rows.shape[1:])
            self._counters = self._counters.new_empty(places, *self._counters.shape[1:])
            self._filled = self._filled.new_empty(places)

    def _take(self, layer: int, block: nn.Module, args: Any, output: Any) -> None:
        """Hook. Copies at once: nobody promises that a later block leaves its input alone."""
        states = output[0] if isinstance(output, tuple) else output
        sequences, columns, hidden = states.shape
        assert (sequences, hidden) == (len(self._base), self._hidden), states.shape
        tokens = sequences * columns
        if layer == 0:
            self._taken = 0
            if len(self._packed) < tokens:
                self._packed = self._packed.new_empty(tokens, self._packed.shape[1])
        mine = self._packed[:tokens, layer * hidden : (layer + 1) * hidden]
        mine.copy_(states.reshape(tokens, hidden))
        self._taken += 1
        if layer == len(self._blocks) - 1:
            self._gather(columns)

    def _gather(self, columns: int) -> None:
        place = self._place_of_each_token(columns)
        self._column += columns
        if self._taken != len(self._blocks):
            return  # some block was passed over: these rows stay missing, and are found missing
        tokens = (place >= 0).nonzero().flatten()
        # In pieces, so that the first is copied while the next is gathered, and any pass fits.
        for first in range(0, len(tokens), self._ring.piece_rows):
            self._stage(tokens[first : first + self._ring.piece_rows], place)

    def _stage(self, tokens: Tensor, place: Tensor) -> None:
        """tokens: rising, and as many as a piece of the ring has rows at most."""
        reservation = self._reserve(len(tokens))
        first, end = int(tokens[0]), int(tokens[-1]) + 1
        row_map = torch.full((end - first,), -1, dtype=torch.int32)
        row_map[tokens - first] = reservation.slots
        row_map = to_device(row_map, self._ring.rows.device)
        gather_packed(self._packed[first:end], row_map, self._ring.rows, self._ring.counters)
        self._ring.submit(reservation, place[tokens])
        self._collect()

    def _reserve(self, n: int) -> Reservation:
        while (reservation := self._ring.reserve(n)) is None:
            self._ring.wait()
            self._collect()
        return reservation

    def _collect(self) -> None:
        """What has been copied goes to its places; the rest has time until the batch ends."""
        while piece := self._ring.take():
            assert isinstance(piece.tag, Tensor)
            places = piece.tag[piece.start : piece.start + len(piece.rows)]
            self._rows.index_copy_(0, places, piece.rows)
            self._counters.index_copy_(0, places, piece.counters)
            self._filled[places] = True
            self.captured += len(places)
            self._ring.release(piece)

    def _drain(self) -> None:
        while self._ring.pending:
            self._ring.wait()
            self._collect()

    def _place_of_each_token(self, columns: int) -> Tensor:
        """int64 [sequences * columns], -1 = none"""
        position = torch.arange(self._column, self._column + columns) + self._shift
        wanted = (position >= 0) & (position < self._end) & ~self.finished[:, None]
        return torch.where(wanted, self._base + position, -1).flatten()


class NoTap:
    """In the place of a `BlockTap` where nothing is captured: no hooks, and rows of no layers."""

    captured = 0

    def __init__(self, device: torch.device, hidden: int) -> None:
        self._device, self._hidden = device, hidden

    def begin(self, lengths: Sequence[int], max_new_tokens: int) -> None:
        self.finished = torch.zeros(len(lengths), dtype=torch.bool)

    def begin_given(self, lengths: Sequence[int]) -> None:
        self.begin(lengths, 0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Behind the block what was launched in it is done, as it is where rows are waited for."""
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def missing(self, sequence: int, n: int) -> int:
        return 0

    def rows(self, sequence: int, n: int) -> np.ndarray:
        """float16 [n, 0, H]"""
        return np.empty((n, 0, self._hidden), np.float16)

    def counters(self, sequence: int, n: int) -> tuple[LayerCounters, ...]:
        return ()

    def forget(self) -> None:
        pass

    def close(self) -> None:
        pass
