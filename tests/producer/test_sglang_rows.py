"""Rows of requests in the making: the newest of each position, or how many are missing."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftfeed_producer.engines.sglang import memory, rows
from draftfeed_producer.engines.sglang.rows import Arrived, Collected, PositionRows, SlotRows
from draftfeed_producer.engines.sglang.slabs import SharedSlabs, SlabShape
from draftfeed_producer.errors import EngineError

LAYERS, HIDDEN = 2, 4
MOST_ROWS = 10
OPEN = (0, 1, 2)
HANDLES = (*OPEN, 3)
SLOTS = 12


class Row(NamedTuple):
    handle: int
    position: int
    token: int
    kv_slot: int = 0


def arrived(put: list[Row], version: int, *, by_slot: bool = False) -> Arrived:
    """Every value of them is the version, and so is every counter."""
    columns = np.array(put, np.int32).reshape(-1, 4).T.copy()
    n = len(put)
    return Arrived(
        columns[0],
        columns[1],
        columns[2],
        columns[3] if by_slot else np.empty(0, np.int32),
        np.full((n, LAYERS, HIDDEN), version, np.float16),
        np.full((n, LAYERS, 4), version, np.int32),
    )


def check(got: Collected | int, want: list[int | None]) -> None:
    """want: the version of each row, None where there is none."""
    if missing := want.count(None):
        assert got == missing
        return
    assert isinstance(got, Collected)
    assert got.hidden_states.shape == (len(want), LAYERS, HIDDEN)
    assert got.hidden_states[:, 0, 0].tolist() == want
    assert (got.hidden_states == got.hidden_states[:, :1, :1]).all()
    assert [list(layer) for layer in got.counters] == [[sum(filter(None, want))] * 4] * LAYERS


TOKENS = st.integers(0, 2)
STRETCHES = st.tuples(st.integers(0, 12), st.lists(TOKENS, min_size=1))
PARTS = st.dictionaries(st.sampled_from(HANDLES), STRETCHES, min_size=1)
"""A pass: of each request in it, where it starts, and the tokens."""


@given(passes=st.lists(PARTS, max_size=8), fed=st.lists(TOKENS, max_size=MOST_ROWS + 2))
def test_the_newest_row_of_each_position_is_the_one(passes, fed):
    """Retraction: rows come again. Positions that nobody asked for: a pass too much."""
    store = PositionRows(LAYERS, HIDDEN)
    newest: dict[tuple[int, int], tuple[int, int]] = {}
    for handle in OPEN:
        store.open(handle, MOST_ROWS)
    for version, parts in enumerate(passes, start=1):
        put = [
            Row(handle, start + i, token)
            for handle, (start, tokens) in parts.items()
            for i, token in enumerate(tokens)
        ]
        store.put(arrived(put, version))
        newest |= {(r.handle, r.position): (r.token, version) for r in put}
    for handle in OPEN:
        want: list[int | None] = []
        for position, token in enumerate(fed):
            there, version = newest.get((handle, position), (-1, 0))
            want.append(version if there == token and position < MOST_ROWS else None)
        if len(fed) > MOST_ROWS:
            assert store.collect(handle, np.array(fed, np.int32)) == len(fed) - MOST_ROWS
        else:
            check(store.collect(handle, np.array(fed, np.int32)), want)


PUT = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 5), TOKENS),
    unique_by=lambda row: row[0],
    min_size=1,
)
ENDS = st.tuples(st.sampled_from(OPEN), st.lists(st.integers(0, SLOTS - 1), max_size=6))


@given(
    told=st.lists(st.one_of(PUT, ENDS), max_size=12), fed=st.lists(TOKENS, min_size=1, max_size=6)
)
def test_a_slots_row_is_that_of_the_moment_in_which_its_request_ended(told, fed):
    """Slots are given to others the moment their request has ended."""
    store = SlotRows(LAYERS, HIDDEN)
    for handle in OPEN:
        store.open(handle, MOST_ROWS)
    store.attach(SLOTS)
    slots: dict[int, tuple[int, int, int]] = {}
    ended: dict[int, list[tuple[int, int, int]]] = {}
    for version, word in enumerate(told, start=1):
        if isinstance(word, list):
            store.put(arrived([Row(0, p, t, slot) for slot, p, t in word], version, by_slot=True))
            slots |= {slot: (position, token, version) for slot, position, token in word}
        elif word[1]:
            store.finish(word[0], np.array(word[1], np.int32))
            ended[word[0]] = [slots.get(slot, (-1, -1, 0)) for slot in word[1]]
        else:
            store.finish(word[0], np.empty(0, np.int32))
    for handle in OPEN:
        there = ended.get(handle, [])
        got = store.collect(handle, np.array(fed, np.int32))
        if len(there) < len(fed):
            assert got == len(fed) - len(there)
        else:
            pairs = enumerate(zip(there, fed, strict=False))
            check(got, [row[2] if row[:2] == (i, token) else None for i, (row, token) in pairs])


def test_a_request_that_was_dropped_before_its_end_leaves_nothing():
    """Requests that are given up, whose rows are copied when they end: memory that grows."""
    store = SlotRows(LAYERS, HIDDEN)
    store.attach(SLOTS)
    store.open(7, MOST_ROWS)
    store.drop(7)
    store.finish(7, np.arange(3, dtype=np.int32))
    assert store._finished == {}
    assert store._open == set()


def test_rows_of_another_life_are_gone():
    """The engine was started again, and its slots are numbered as before."""
    store = SlotRows(LAYERS, HIDDEN)
    for life in (1, 2):
        store.attach(SLOTS)
        store.open(life, MOST_ROWS)
        if life == 1:
            store.put(arrived([Row(life, 0, 5, 3)], 9, by_slot=True))
        store.finish(life, np.array([3], np.int32))
    fed = np.array([5], np.int32)
    assert isinstance(store.collect(1, fed), Collected)
    assert store.collect(2, fed) == 1


def test_slots_that_need_more_memory_than_there_is_are_refused(monkeypatch: pytest.MonkeyPatch):
    slot_bytes = 2 * LAYERS * HIDDEN + 16 * LAYERS + 8
    rows.check_memory(memory.available_bytes() // slot_bytes // 2, LAYERS, HIDDEN)
    with pytest.raises(EngineError, match=r"\[capture\] prefix_cache needs .* GiB are available"):
        rows.check_memory(1 << 50, LAYERS, HIDDEN)


def test_a_container_that_has_less_than_the_machine_is_what_counts(tmp_path: Path):
    """Whoever takes more than its control group leaves is killed, whatever the machine has."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\nactive_file 100\ninactive_file 250\n")
    assert list(memory._left(tmp_path)) == [450]
    (tmp_path / "memory.max").write_text("max\n")
    assert list(memory._left(tmp_path)) == []
    assert 0 < memory.available_bytes() < 1 << 50


def test_slabs_are_the_same_memory_for_both_and_none_is_in_another():
    shape = SlabShape(count=5, rows=7, layers=LAYERS, hidden=24)
    ours = SharedSlabs.create(shape)
    theirs = SharedSlabs.attach(shape, ours.path)
    for index in range(shape.count):
        slab = theirs.slab(index)
        slab.rows[...] = index + 1
        slab.counters[...] = -index
    for index in range(shape.count):
        slab = ours.slab(index)
        assert slab.rows.shape == (7, LAYERS, 24)
        assert slab.counters.shape == (7, LAYERS, 4)
        assert (slab.rows == index + 1).all()
        assert (slab.counters == -index).all()
        assert slab.rows.ctypes.data % 4096 == slab.counters.ctypes.data % 4096 == 0
    for slabs in (ours, theirs):
        slabs.close()


def test_closing_slabs_that_someone_still_looks_at_is_no_error():
    slabs = SharedSlabs.create(SlabShape(count=1, rows=1, layers=1, hidden=8))
    rows_there = slabs.slab(0).rows
    rows_there[...] = 3
    slabs.close()
    assert (rows_there == 3).all()
