"""Takes the tapped blocks' rows out of every forward pass of a generating batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftfeed_producer.tap.reference import COUNTERS, gather_packed
from draftfeed_proto.sample import LayerCounters


class BlockTap:
    """Forward hooks on decoder blocks and the staging rows they fill.

    A row belongs to (sequence, position), slot `sequence * span + position`: a forward pass that
    repeats a position overwrites its row and never adds one. Padding and what a finished
    sequence is still fed get no slot. Staging is on the host and reused by the next batch.
    """

    def __init__(self, blocks: Sequence[nn.Module], hidden_size: int) -> None:
        self._blocks = tuple(blocks)
        self._hidden = hidden_size
        self._packed = torch.empty(0, len(blocks) * hidden_size, dtype=torch.bfloat16)
        self._rows = torch.empty(0, len(blocks), hidden_size, dtype=torch.float16)
        self._counters = torch.empty(0, len(blocks), COUNTERS, dtype=torch.int32)
        self._filled = torch.empty(0, dtype=torch.bool)
        self.captured = 0
        """Rows taken since this tap was made, of samples that are not finished too."""

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
        self._end = torch.tensor(rows)[:, None]
        self._span = max(rows)
        self._base = torch.arange(len(rows))[:, None] * self._span
        self._column = 0
        self._taken = 0
        self.finished = torch.zeros(len(rows), dtype=torch.bool)
        """bool[sequences], on the host: set by who samples; their passes leave no more rows."""
        self._reserve(len(rows) * self._span)
        self._filled.zero_()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The hooks are in place inside the block."""
        handles = [
            block.register_forward_hook(partial(self._take, layer))
            for layer, block in enumerate(self._blocks)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def missing(self, sequence: int, n: int) -> int:
        """How many of the first n positions have no row."""
        return n - int(self._filled[self._slots(sequence, n)].sum())

    def rows(self, sequence: int, n: int) -> np.ndarray:
        """float16[n, L, H], a copy."""
        return self._rows[self._slots(sequence, n)].numpy().copy()

    def counters(self, sequence: int, n: int) -> tuple[LayerCounters, ...]:
        totals = self._counters[self._slots(sequence, n)].sum(0).tolist()
        return tuple(LayerCounters(*layer) for layer in totals)

    def close(self) -> None:
        """Lets go of the model's blocks and of the staging."""
        self._blocks = ()
        for name in ("_packed", "_rows", "_counters", "_filled"):
            setattr(self, name, getattr(self, name)[:0].clone())

    def _slots(self, sequence: int, n: int) -> slice:
        first = sequence * self._span
        return slice(first, first + n)

    def _reserve(self, slots: int) -> None:
        if len(self._rows) < slots:
            # Pages that are never written cost nothing, so the longest responses may be planned.
            self._rows = self._rows.new_empty(slots, *self._rows.shape[1:])
            self._counters = self._counters.new_empty(slots, *self._counters.shape[1:])
            self._filled = self._filled.new_empty(slots)

    def _take(self, layer: int, block: nn.Module, args: Any, output: Any) -> None:
        """Hook. Copies at once: nobody promises that a later block leaves its input alone."""
        states = output[0] if isinstance(output, tuple) else output
        sequences, columns, hidden = states.shape
        assert (sequences, hidden) == (len(self._base), self._hidden), states.shape
        tokens = sequences * columns
        if layer == 0:
            self._taken = 0
            if len(self._packed) < tokens or self._packed.device != states.device:
                self._packed = self._packed.new_empty(
                    tokens, self._packed.shape[1], device=states.device
                )
        mine = self._packed[:tokens, layer * hidden : (layer + 1) * hidden]
        mine.copy_(states.reshape(tokens, hidden))
        self._taken += 1
        if layer == len(self._blocks) - 1:
            self._gather(columns)

    def _gather(self, columns: int) -> None:
        row_map = self._row_map(columns)
        self._column += columns
        if self._taken != len(self._blocks):
            return  # some block was passed over: these rows stay missing, and are found missing
        packed = self._packed[: len(row_map)].cpu()
        gather_packed(packed, row_map, self._rows, self._counters)
        slots = row_map[row_map >= 0].long()
        self._filled[slots] = True
        self.captured += len(slots)

    def _row_map(self, columns: int) -> Tensor:
        """int32 [sequences * columns]"""
        position = torch.arange(self._column, self._column + columns) + self._shift
        wanted = (position >= 0) & (position < self._end) & ~self.finished[:, None]
        return torch.where(wanted, self._base + position, -1).to(torch.int32).flatten()
