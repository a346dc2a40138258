"""Samples are encoded by threads while they are written: what is on the disk is the same."""

from pathlib import Path

import pytest

from draftfeed_proto import codecs
from draftfeed_proto.chunk import read_header
from samples import sample
from spool_helpers import open_spool, ordinals, read_back, segment_files, spool_child

CHUNK_BYTES = 2000
"""Five rows: a sample has many chunks."""


@pytest.mark.parametrize("codec", codecs.names())
def test_segments_are_the_same_with_any_number_of_threads(tmp_path: Path, codec: str) -> None:
    contents = []
    for threads in (1, 2, 4):
        directory = tmp_path / str(threads)
        spool = open_spool(
            directory, codec=codec, encode_threads=threads, chunk_bytes=CHUNK_BYTES, audit=True
        )
        for ordinal in range(6):
            spool.append(sample(ordinal))
            assert read_back(spool, ordinal) == sample(ordinal).digest()
        spool.close()
        contents.append([path.read_bytes() for path in segment_files(directory)])
    assert contents[0] == contents[1] == contents[2]


def test_hidden_states_are_packed_unless_something_else_is_configured(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    record = spool.append(sample(0, rows=400))
    tokens, states = (
        read_header(spool.read_chunk(record.header.id, index)).codec for index in (0, 1)
    )
    assert (tokens, states) == (codecs.RAW.number, codecs.PACKED.number)
    spool.close()


def test_a_disk_that_is_full_in_mid_sample_takes_it_whole_later(tmp_path: Path) -> None:
    """Threads are ahead of the chunk that did not fit, and the sample is encoded again at once."""
    done = spool_child("fill_the_disk", tmp_path, CHUNK_BYTES, 3)
    assert done.returncode == 0, done.stderr
    spool = open_spool(tmp_path)
    assert ordinals(spool) == [0, 1, 2]
    assert [read_back(spool, k) for k in range(3)] == [sample(k).digest() for k in range(3)]
    spool.close()
