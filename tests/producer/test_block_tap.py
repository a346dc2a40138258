"""Rows of a batch through a staging ring that is much smaller than the batch."""

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from draftfeed_producer.engines.capture import BlockTap
from draftfeed_producer.tap.reference import to_wire
from draftfeed_producer.tap.ring import RingSizes, make_ring
from draftfeed_producer.tap.streams import HostStreams, Streams
from draftfeed_proto.sample import LayerCounters
from simulated_streams import SimulatedStreams

LAYERS, HIDDEN = 3, 8
ROW_BYTES = LAYERS * HIDDEN * 2


class Block(nn.Module):
    """Works in place, as blocks may, so what it is given is gone when the next one has run."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.mul_(1.5).add_(1.0),)


class Batch:
    """A model's passes over a batch, and what each of its rows must be."""

    def __init__(self, tap: BlockTap, blocks: list[Block], lengths: list[int], new: int) -> None:
        self.tap, self.blocks, self.lengths = tap, blocks, lengths
        self.width = max(lengths)
        self.column = 0
        self.want: dict[tuple[int, int], Tensor] = {}
        """(sequence, position) -> [L, H]"""
        tap.begin(lengths, new)

    def feed(self, columns: int) -> None:
        generator = torch.Generator().manual_seed(self.column)
        x = torch.randn(len(self.lengths), columns, HIDDEN, generator=generator)
        x[0, 0] = 60000.0
        outputs = []
        for block in self.blocks:
            (x,) = block(x)
            outputs.append(x.clone())
        stacked = torch.stack(outputs, dim=2)
        for sequence, length in enumerate(self.lengths):
            if not self.tap.finished[sequence]:
                for i in range(columns):
                    position = self.column + i - (self.width - length)
                    self.want[sequence, position] = stacked[sequence, i]
        self.column += columns

    def check(self) -> None:
        for sequence in range(len(self.lengths)):
            n = 1 + max(position for s, position in self.want if s == sequence)
            rows, counters = to_wire(torch.stack([self.want[sequence, i] for i in range(n)]))
            assert self.tap.missing(sequence, n) == 0
            assert self.tap.missing(sequence, n + 1) == 1
            np.testing.assert_array_equal(self.tap.rows(sequence, n), rows.numpy())
            totals = [LayerCounters(*layer) for layer in counters.sum(0).tolist()]
            assert list(self.tap.counters(sequence, n)) == totals


def make_tap(
    streams: Streams, piece_rows: int, pieces: int = 2, slabs: int = 2
) -> tuple[BlockTap, list[Block]]:
    blocks = [Block() for _ in range(LAYERS)]
    sizes = RingSizes(piece_rows * ROW_BYTES, pieces, slabs)
    return BlockTap(blocks, make_ring(streams, sizes, LAYERS, HIDDEN)), blocks


def run(tap: BlockTap, blocks: list[Block], lengths: list[int]) -> Batch:
    """A prompt, seven tokens alone and two together; a sequence is finished on the way."""
    batch = Batch(tap, blocks, lengths, new=12)
    with tap.attached():
        batch.feed(batch.width)
        for step in range(7):
            tap.finished[1] = step >= 3
            batch.feed(1)
        batch.feed(2)
    return batch


def fail(batch: Batch) -> None:
    with batch.tap.attached():
        batch.feed(batch.width)
        _ = 1 / 0


class LateCopies(SimulatedStreams):
    """Copies run when somebody waits for them, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.may_block = True


class CopiesNowAndThen(LateCopies):
    """Some operations run whenever a mark is made."""

    def __init__(self) -> None:
        super().__init__()
        self._marks = count()

    def written(self):
        for _ in range(next(self._marks) % 5):
            self.forward.step()
            self.copies.step()
        return super().written()


@pytest.fixture(params=[HostStreams, LateCopies, CopiesNowAndThen])
def streams(request: pytest.FixtureRequest) -> Iterator[Streams]:
    return request.param()


@pytest.mark.parametrize("piece_rows", [1, 3, 64])
def test_rows_of_a_batch_many_times_the_ring_equal_the_reference(streams: Streams, piece_rows: int):
    """Fewer rows than tokens, silently; here because a ring went round."""
    tap, blocks = make_tap(streams, piece_rows)
    for lengths in [[40, 3, 17], [5, 6], [90, 1, 2, 55]]:
        batch = run(tap, blocks, lengths)
        assert batch.want.keys() & {(0, 0), (1, 0)}
        batch.check()


def test_what_is_captured_counts_every_row_once(streams: Streams):
    tap, blocks = make_tap(streams, piece_rows=3)
    run(tap, blocks, [12, 4])
    assert tap.captured == (12 + 9) + (4 + 3)


def test_a_pass_repeated_overwrites_its_rows_though_both_were_in_the_ring_at_once():
    """The older of two copies of one row lands last."""
    tap, blocks = make_tap(LateCopies(), piece_rows=8, pieces=4, slabs=4)
    batch = Batch(tap, blocks, [6, 6], new=4)
    with tap.attached():
        batch.feed(4)
        tap._column = batch.column = 2
        batch.feed(4)
    batch.check()


def test_memory_of_the_ring_does_not_grow_with_the_batch():
    streams = LateCopies()
    tap, blocks = make_tap(streams, piece_rows=4, pieces=3, slabs=2)
    allocated = streams.allocated_bytes
    assert allocated == (3 + 2) * 4 * (ROW_BYTES + LAYERS * 4 * 4)
    run(tap, blocks, [300, 200]).check()
    assert streams.allocated_bytes == allocated


def test_a_batch_that_failed_leaves_nothing_to_the_next():
    """Rows of an aborted batch in the samples of the next one."""
    tap, blocks = make_tap(LateCopies(), piece_rows=3)
    with pytest.raises(ZeroDivisionError):
        fail(Batch(tap, blocks, [9, 2], new=4))
    next_batch = Batch(tap, blocks, [2, 8], new=4)
    with tap.attached():
        next_batch.feed(8)
    next_batch.check()
    assert tap.missing(0, 9) == 7


def test_a_closed_tap_has_let_go_of_all_rows():
    tap, blocks = make_tap(LateCopies(), piece_rows=3)
    run(tap, blocks, [9, 2])
    tap.close()
    assert not any(len(getattr(tap, name)) for name in ("_packed", "_rows", "_filled"))
    assert len(tap._ring.rows) == 0
    tap.close()
