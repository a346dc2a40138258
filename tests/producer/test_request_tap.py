"""The tap of the SGLang scheduler, over its own sockets and shared memory, on the CPU."""

import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from draftfeed_producer.engines.sglang import messages
from draftfeed_producer.engines.sglang.messages import Attached, Copied, Finished, Freed, Settings
from draftfeed_producer.engines.sglang.slabs import SharedSlabs, SlabShape
from draftfeed_producer.engines.sglang.tap import RequestTap
from draftfeed_producer.errors import RingTooSmall

LAYERS, HIDDEN, SLABS, SLAB_ROWS, LONGEST = 2, 8, 3, 4, 20
CHILD = Path(__file__).parent / "request_tap_child.py"


class Producer:
    """The other end: its sockets, its memory, and the rows that came."""

    def __init__(self, *, by_slot: bool = False) -> None:
        self._directory = tempfile.TemporaryDirectory()
        shape = SlabShape(SLABS, SLAB_ROWS, LAYERS, HIDDEN)
        self._slabs = SharedSlabs.create(shape)
        self._context: zmq.Context[Any] = zmq.Context()
        self.told = self._context.socket(zmq.PULL)
        self._freed = self._context.socket(zmq.PUSH)
        told, freed = (f"ipc://{self._directory.name}/{name}" for name in ("told", "freed"))
        self.told.bind(told)
        self._freed.bind(freed)
        self.settings = Settings(
            told=told,
            freed=freed,
            memory=self._slabs.path,
            slabs=SLABS,
            slab_rows=SLAB_ROWS,
            layers=LAYERS,
            hidden=HIDDEN,
            by_slot=by_slot,
            final=False,
        )
        self.rows: list[tuple[int, ...]] = []
        """handle, position, token, KV slot, value of the row, counters of the first layer"""
        self.order: list[object] = []

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._slabs.close()
        self._directory.cleanup()

    def hear(self) -> Any:
        assert self.told.poll(20_000), "nothing was told"
        return messages.decode_told(self.told.recv())

    def read(self, copied: Copied) -> None:
        fields = (copied.handles, copied.positions, copied.tokens, copied.kv_slots)
        columns = [np.frombuffer(raw, "<i4").tolist() for raw in fields]
        columns[3] = columns[3] or [-1] * len(columns[0])
        slab = self._slabs.slab(copied.slab)
        n = len(columns[0])
        assert (slab.rows[:n] == slab.rows[:n, :1, :1]).all()
        values = slab.rows[:n, 0, 0].tolist()
        self.rows += zip(*columns, values, slab.counters[:n, 0, 0].tolist(), strict=True)

    def give_back(self, copied: Copied) -> None:
        self._freed.send(messages.encode(Freed(copied.slab)))

    def serve(self, until: int) -> None:
        """Until a request of that handle is finished. Slabs go back one later than they come."""
        held: deque[Copied] = deque()
        while True:
            word = self.hear()
            if isinstance(word, Copied):
                self.read(word)
                held.append(word)
                if len(held) == SLABS:
                    self.give_back(held.popleft())
            elif isinstance(word, Finished):
                self.order.append((word.handle, np.frombuffer(word.kv_slots, "<i4").tolist()))
                if word.handle == until:
                    break
        for copied in held:
            self.give_back(copied)


@pytest.fixture
def producer() -> Iterator[Producer]:
    one = Producer()
    yield one
    one.close()


def take(
    tap: RequestTap,
    n: int,
    first: int = 0,
    every: int = 1,
    slots: bool = False,
    final: bool = False,
) -> Any:
    """A pass of n rows, of which every k-th is wanted, whose values are row numbers.

    final: the last layer comes by itself."""
    numbers = torch.arange(first, first + n)
    layers = numbers.to(torch.bfloat16)[:, None].repeat(1, LAYERS * HIDDEN)
    packed, last = layers, None
    if final:
        packed, last = layers[:, :-HIDDEN], layers[:, -HIDDEN:].contiguous()
    wanted = np.arange(0, n, every)
    handles = np.full(len(wanted), 5, np.int32)
    tokens, kv_slots = numbers + 100, numbers + 200 if slots else None
    rows = (first + wanted).astype(np.int32)
    taken = tap.take_pass(packed, wanted, handles, rows, tokens, kv_slots, last)
    # The engine's own tensors, which the next pass writes.
    packed.fill_(float("nan"))
    if last is not None:
        last.fill_(float("nan"))
    tokens.fill_(-9)
    if kv_slots is not None:
        kv_slots.fill_(-9)
    return taken


def copy(tap: RequestTap, taken: Any) -> Any:
    tap.copy_pass(taken, torch.Tensor.clone)
    return taken


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=8),
    every=st.integers(1, 3),
    overlap=st.booleans(),
    slots=st.booleans(),
    final=st.booleans(),
)
def test_rows_come_once_in_order_however_long_the_passes(
    lengths: list[int], every: int, overlap: bool, slots: bool, final: bool
):
    """Passes longer than all slabs together, rows that nobody wants, two passes on their way."""
    with closing(Producer(by_slot=slots)) as producer:
        tap = RequestTap(producer.settings, torch.device("cpu"), LONGEST)
        thread = threading.Thread(target=producer.serve, args=[1])
        thread.start()
        want = list(hand_over(tap, lengths, every, overlap, slots, final))
        tap.finished(1, np.array([4, 2]) if slots else None)
        thread.join(20)
        assert not thread.is_alive()
        assert producer.rows == want
        assert producer.order == [(1, [4, 2] if slots else [])]


def hand_over(
    tap: RequestTap, lengths: list[int], every: int, overlap: bool, slots: bool, final: bool
) -> Iterator[tuple[int, ...]]:
    """Passes of these lengths; the rows that they must bring."""
    first, pending = 0, None
    for n in lengths:
        taken = copy(tap, take(tap, n, first, every, slots, final))
        for i in range(first, first + n, every):
            yield 5, i, i + 100, i + 200 if slots else -1, i, 0
        if pending is not None:
            tap.hand_over(pending)
        pending, first = taken, (first + n) % 128
        if not overlap:
            tap.hand_over(pending)
            pending = None
    if pending is not None:
        tap.hand_over(pending)


def test_values_too_large_are_counted_with_their_row(producer: Producer):
    tap = RequestTap(producer.settings, torch.device("cpu"), LONGEST)
    packed = torch.full((2, LAYERS * HIDDEN), 2.0**17)
    packed[1] = 1.0
    index = np.arange(2, dtype=np.int32)
    taken = tap.take_pass(packed, np.arange(2), index, index, torch.arange(2), None)
    tap.hand_over(copy(tap, taken))
    producer.read(producer.hear())
    assert producer.rows == [(0, 0, 0, -1, 65504.0, HIDDEN), (1, 1, 1, -1, 1.0, 0)]


def test_what_the_engine_has_is_told_first(producer: Producer):
    tap = RequestTap(producer.settings, torch.device("cpu"), LONGEST)
    tap.attached(4096)
    assert producer.hear() == Attached(kv_slots=4096, device="cpu")


def test_a_pass_longer_than_was_said_is_an_error(producer: Producer):
    """It would wait for room that can never be."""
    tap = RequestTap(producer.settings, torch.device("cpu"), LONGEST)
    with pytest.raises(RingTooSmall, match="41 rows were asked for at once"):
        take(tap, 2 * LONGEST + 1)


def test_rows_that_nobody_asked_to_be_copied_are_not_waited_for(producer: Producer):
    """The scheduler spins for ever, and looks busy."""
    tap = RequestTap(producer.settings, torch.device("cpu"), LONGEST)
    taken = take(tap, 3)
    with pytest.raises(AssertionError, match="nobody has asked to be copied"):
        tap.hand_over(taken)
    take(tap, 2 * LONGEST - 3)
    with pytest.raises(AssertionError, match="nobody has asked to be copied"):
        take(tap, 1)


def test_the_scheduler_waits_while_all_slabs_are_lent_and_no_longer(producer: Producer):
    tap = RequestTap(producer.settings, torch.device("cpu"), LONGEST)
    taken = copy(tap, take(tap, SLABS * SLAB_ROWS + 1))
    while len(tap._lent) < SLABS:
        tap._progress()
    lent = [producer.hear() for _ in range(SLABS)]
    # One that writes over slabs that are lent would now.
    tap._progress()
    assert len(tap._lent) == SLABS
    assert not taken.announced
    thread = threading.Thread(target=tap.hand_over, args=[taken])
    thread.start()
    for copied in lent:
        producer.read(copied)
    producer.give_back(lent[1])
    last = producer.hear()
    thread.join(20)
    assert not thread.is_alive()
    producer.read(last)
    assert last.slab == lent[1].slab
    assert [row[4] for row in producer.rows] == list(range(SLABS * SLAB_ROWS + 1))


def test_a_scheduler_whose_host_has_ended_does_not_wait_for_slabs(producer: Producer):
    """It holds the GPU for ever."""
    command = [sys.executable, str(CHILD), msgspec.json.encode(producer.settings).decode()]
    host = subprocess.Popen(
        ["sh", "-c", '"$@" & read line', "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ},
        text=True,
    )
    for _ in range(SLABS):
        assert isinstance(producer.hear(), Copied)
    host.kill()
    out, _ = host.communicate()
    assert out == "the host of this engine has ended\n"
