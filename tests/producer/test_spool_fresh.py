"""Frames that were just written are sent from memory: once, not before they are stored, and never
in place of what the disk has to say."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from draftfeed_producer.spool import Spool
from draftfeed_producer.spool.fresh import FRESH_BYTES
from draftfeed_producer.spool.segments import frame_fault
from samples import sample
from spool_helpers import flip, open_spool, read_back, segment_files


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = open_spool(tmp_path, codec="packed")
    spool.keep_fresh(True)
    yield spool
    spool.close()


def test_a_damaged_record_is_found_damaged_though_its_frames_are_in_memory(
    spool: Spool, tmp_path: Path
) -> None:
    """Or a member that refuses what it got would be sent the same again, for ever."""
    record = spool.append(sample(0, rows=100))
    id = record.header.id
    flip(segment_files(tmp_path)[0], record.chunks[1][0] + 77)
    assert not spool.whole(id)
    assert frame_fault(bytes(spool.read_chunk(id, 1))) == ""
    assert "checksum" in frame_fault(bytes(spool.read_chunk(id, 1)))


def test_what_a_failed_write_leaves_in_memory_is_never_sent_for_the_next_sample(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next record lies where the failed one would have been."""
    from draftfeed_producer.spool import store

    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(store, "header_of", breaks)
        with pytest.raises(ZeroDivisionError):
            spool.append(sample(0, rows=100))
    spool.append(sample(1, rows=100))
    assert read_back(spool, 1) == sample(1, rows=100).digest()
    assert read_back(spool, 1) == sample(1, rows=100).digest()


def test_frames_in_memory_have_a_limit_and_the_rest_comes_from_the_disk(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, codec="packed", chunk_bytes=1 << 20)
    spool.keep_fresh(True)
    big = sample(0, rows=3 * FRESH_BYTES // sample(0, rows=1).hidden_states.nbytes // 2)
    assert big.hidden_states.nbytes > FRESH_BYTES
    record = spool.append(big)
    kept = spool._samples.fresh._bytes()
    assert FRESH_BYTES - (2 << 20) < kept <= FRESH_BYTES
    assert read_back(spool, 0) == big.digest()
    assert spool._samples.fresh._bytes() == 0
    assert record.header.chunks > 64
    spool.close()


def test_a_frame_is_not_overwritten_by_the_samples_that_come_while_it_is_sent(spool: Spool) -> None:
    first = spool.append(sample(0, rows=100))
    sending = spool.read_chunk(first.header.id, 1)
    assert isinstance(sending, memoryview)
    before = bytes(sending)
    for ordinal in range(1, 40):
        record = spool.append(sample(ordinal, rows=100))
        spool.read_chunk(record.header.id, 1)
    assert np.array_equal(np.frombuffer(sending, np.uint8), np.frombuffer(before, np.uint8))


def test_nothing_is_kept_for_nobody(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    spool.append(sample(0))
    assert spool._samples.fresh._bytes() == 0
    spool.keep_fresh(True)
    spool.append(sample(1))
    assert spool._samples.fresh._bytes() > 0
    spool.keep_fresh(False)
    spool.append(sample(2))
    assert spool._samples.fresh._bytes() == 0
    spool.close()
