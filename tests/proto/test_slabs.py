"""Memory of samples is used again, and never while anybody can still see what was in it."""

import gc
import mmap
import os
import random
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from draftfeed_proto.slabs import Slabs

PAGE = mmap.PAGESIZE


def address(array: np.ndarray) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def pages(slabs: Slabs, count: int, value: int = 1) -> np.ndarray:
    states = slabs.empty((count, 2, PAGE // 4), np.uint16)
    states.fill(value)
    return states


def test_memory_is_not_mapped_and_cleared_anew_for_each_sample() -> None:
    slabs = Slabs(4096 * PAGE)
    first = pages(slabs, 4096)
    where = address(first)
    del first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for value in range(10):
        again = pages(slabs, 4096, value)
        assert address(again) == where
        del again
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 4096


@pytest.mark.parametrize(
    "view",
    [
        lambda states: states[3:5, 1],
        lambda states: states.view(np.float16)[1:],
        lambda states: memoryview(states),
        lambda states: torch.from_numpy(states).view(torch.float16)[:, :1].view(torch.uint16),
    ],
    ids=["slice", "view", "memoryview", "tensor"],
)
def test_a_sample_that_is_released_and_still_looked_at_is_not_overwritten(view: object) -> None:
    assert callable(view)
    slabs = Slabs(16 * PAGE)
    states = pages(slabs, 8, 7)
    seen = view(states)
    kept = np.asarray(seen).copy()
    del states
    gc.collect()
    others = [pages(slabs, 4, 9) for _ in range(6)]
    assert np.array_equal(np.asarray(seen), kept)
    del seen, others
    assert pages(slabs, 16).shape[0] == 16


def test_samples_beyond_the_room_get_memory_of_their_own_and_what_is_free_goes_back() -> None:
    """The buffer's bytes would be taken twice: once here, once beside it."""
    slabs = Slabs(8 * PAGE)
    small = pages(slabs, 10, 5)
    where = address(small)
    del small
    huge = pages(slabs, 11, 6)
    assert not where <= address(huge) < where + 10 * PAGE
    again = slabs.empty((10, 2, PAGE // 4), np.uint16)
    assert address(again) == where
    assert not again.any(), "the pages were kept"


def test_a_sample_that_finds_no_gap_takes_no_more_from_the_gaps_than_its_own_size() -> None:
    """A full buffer lost all of its warm pages with each of them, and each sample took new ones."""
    slabs = Slabs(8 * PAGE)
    first, _middle, last = (pages(slabs, count, 7) for count in (4, 2, 4))
    where = address(first)
    del first, last
    beside = pages(slabs, 5)
    assert not where <= address(beside) < where + 10 * PAGE
    again = slabs.empty((4, 2, PAGE // 4), np.uint16)
    assert address(again) == where
    assert again[:3].all()
    assert not again[3:].any(), "the page was kept"


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2",
    reason="no mapping is larger than the memory there",
)
def test_a_buffer_larger_than_the_machines_memory_has_its_memory_used_again() -> None:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * PAGE
    slabs = Slabs(8 * memory_bytes)
    where = address(pages(slabs, 3))
    assert address(pages(slabs, 3)) == where
    assert slabs._memory is not None


def test_without_address_space_samples_are_still_received() -> None:
    slabs = Slabs(1 << 62)
    assert pages(slabs, 3, 4).sum() == 4 * 3 * PAGE // 2


@pytest.mark.parametrize("seed", range(3))
def test_samples_in_any_order_never_share_memory_and_all_of_it_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    slabs = Slabs(64 * PAGE)
    held: list[tuple[int, np.ndarray]] = []
    states = np.empty(0)
    for number in range(2000):
        if held and draw.random() < 0.5:
            value, states = held.pop(draw.randrange(len(held)))
            assert (states == value).all()
        else:
            held.append((number, pages(slabs, draw.randint(1, 12), number)))
        states = np.empty(0)
    assert all((states == value).all() for value, states in held)
    del states, held
    assert pages(slabs, 80).shape[0] == 80
    assert slabs._gaps == []


def test_samples_dropped_by_other_threads_come_back() -> None:
    slabs = Slabs(8 * PAGE)
    taken: list[list[np.ndarray]] = [[pages(slabs, 2)] for _ in range(4)]
    where = {address(one[0]) for one in taken}
    threads = [threading.Thread(target=one.clear) for one in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {address(one) for one in [pages(slabs, 2) for _ in range(4)]} == where
