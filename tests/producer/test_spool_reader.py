"""Looking into a spool while its producer writes."""

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from draftfeed_producer.errors import SpoolError, SpoolMismatch
from draftfeed_producer.spool.reader import Reader
from draftfeed_producer.spool.segments import Damage, Record, Segment
from draftfeed_proto import codecs
from draftfeed_proto.sample import SampleHeader, encode_chunks, header_of
from samples import DESCRIPTOR, sample
from spool_helpers import flip, ids, open_spool, segment_files


def found(reader: Reader) -> list[Record | Damage]:
    return [item for segment in reader.segments() for item in reader.scan(segment)]


def frames(ordinal: int) -> Iterator[bytes]:
    return encode_chunks(sample(ordinal), codecs.by_name("zstd"))


def header(ordinal: int, chunks: int, encoded_bytes: int) -> SampleHeader:
    made = sample(ordinal)
    return header_of(made, chunks=chunks, encoded_bytes=encoded_bytes, audit=True)


def test_reader_sees_a_half_written_sample_at_no_step_of_writing_it(tmp_path: Path) -> None:
    """Elsewhere a reader that lists the directory gets files that are still being written."""
    spool = open_spool(tmp_path)
    spool.append(sample(0))
    reader = Reader(tmp_path)
    spool.close()
    segment, _, _ = Segment.open(segment_files(tmp_path)[0], 1, last=True)
    looks = 0

    def watched() -> Iterator[bytes]:
        nonlocal looks
        for frame in frames(1):
            yield frame
            looks += 1  # this frame is in the file now, the one that closes the record is not
            assert [record.header.id.ordinal for record in reader.records()] == [0]
            assert not [item for item in found(reader) if isinstance(item, Damage)]

    segment.append(watched(), lambda chunks, size: header(1, chunks, size))
    assert looks == 2
    assert [record.header.id.ordinal for record in reader.records()] == [0, 1]
    segment.close()


def test_reader_of_a_spool_that_is_written_to_only_ever_sees_whole_samples(tmp_path: Path) -> None:
    """Samples come, fail halfway, and are freed, while somebody reads all there is."""
    spool = open_spool(tmp_path, segment_bytes=60_000, keep_checkpoints=1, codec="raw")
    stop = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        while not stop.is_set():
            spool.append(sample(written, rows=30 + written % 7))
            written += 1
            broken = msgspec.structs.replace(sample(written), counters=())
            with pytest.raises(ValueError, match="counters"):
                spool.append(broken)  # refused when all its chunks are in the file
            if written % 20 == 0:
                spool.commit(written, ids(*range(written - 10)), term=1)

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    try:
        while seen < 200:
            reader = Reader(tmp_path)
            for item in found(reader):
                assert isinstance(item, Record), item
                read = reader.sample(item)
                ordinal = item.header.id.ordinal
                if read is not None:  # else it is freed by now
                    assert read.digest() == sample(ordinal, rows=30 + ordinal % 7).digest()
                    seen += 1
    finally:
        stop.set()
        writer.join()
    spool.close()
    assert written > 1


def test_reader_passes_over_void_records_and_names_the_place_of_damage(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    records = [spool.append(sample(k)) for k in range(4)]
    spool.void(sample(1).id, "checksum")
    flip(segment_files(tmp_path)[0], records[2].chunks[0][0] - 20)  # an entry's header
    reader = Reader(tmp_path)
    assert [record.header.id.ordinal for record in reader.records()] == [0, 3]
    (damage,) = (item for item in found(reader) if isinstance(item, Damage))
    assert (damage.id, damage.place) == (sample(2).id, records[2].place)
    spool.close()


def test_sample_cut_short_in_an_older_segment_is_damage(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, segment_bytes=1)
    for k in range(2):
        spool.append(sample(k))
    spool.close()
    path = segment_files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-10])
    (damage, record) = found(Reader(tmp_path))
    assert isinstance(damage, Damage)
    assert damage.reason == "a sample is cut short"
    assert isinstance(record, Record)
    spool = open_spool(tmp_path, segment_bytes=1)
    assert not spool.finished(sample(0).id)
    spool.close()


def test_spool_of_another_format_is_refused_with_both_printed(tmp_path: Path) -> None:
    open_spool(tmp_path).close()
    path = tmp_path / "spool.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 4'))
    for look in (lambda: Reader(tmp_path), lambda: open_spool(tmp_path)):
        with pytest.raises(SpoolMismatch, match=r"format 4.* 3"):
            look()


def test_file_that_is_no_spool_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match=r"is not a spool: spool\.json: No such file"):
        Reader(tmp_path)
    (tmp_path / "spool.json").write_bytes(b"\xff{")
    with pytest.raises(SpoolError, match="cannot be read"):
        Reader(tmp_path)


def test_reader_decodes_what_the_producer_captured(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, audit=True)
    spool.append(sample(0))
    reader = Reader(tmp_path)
    assert reader.owner.descriptor == DESCRIPTOR
    (record,) = reader.records()
    read = reader.sample(record)
    assert read is not None
    assert read.digest() == sample(0).digest()
    spool.close()
