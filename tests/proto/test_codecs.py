import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from draftfeed_proto import codecs
from draftfeed_proto.codecs.zstd import ZstdPlanes
from draftfeed_proto.errors import MalformedChunk, UnknownCodec
from draftfeed_proto.limits import MAX_CHUNK_BYTES

every_codec = pytest.mark.parametrize("name", codecs.names())


def round_trip(name: str, values: bytes) -> bytes:
    codec = codecs.by_name(name)
    payload = memoryview(codec.encode(memoryview(values)))
    codec.check(payload, len(values))
    out = bytearray(len(values))
    codec.decode(payload, memoryview(out))
    return bytes(out)


def test_numbers_on_disk_never_change() -> None:
    assert {name: codecs.by_name(name).number for name in codecs.names()} == {"raw": 0, "zstd": 1}
    assert [codecs.by_number(n).name for n in (0, 1)] == ["raw", "zstd"]


@pytest.mark.parametrize("lookup", [lambda: codecs.by_name("gzip"), lambda: codecs.by_number(200)])
def test_unknown_codec_is_named_with_the_known_ones(lookup: object) -> None:
    with pytest.raises(UnknownCodec, match="raw, zstd"):
        lookup()  # type: ignore[operator]


@every_codec
@given(values=st.binary(min_size=2, max_size=400).map(lambda data: data[: len(data) // 2 * 2]))
def test_any_bytes_come_back(name: str, values: bytes) -> None:
    assert round_trip(name, values) == values


@every_codec
def test_all_bit_patterns_come_back(name: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).tobytes()
    assert round_trip(name, values) == values


@every_codec
def test_threads_share_a_codec(name: str) -> None:
    failed = []

    def work(seed: int) -> None:
        values = np.random.default_rng(seed).integers(0, 50, 1 << 16, np.uint16).tobytes()
        failed.extend(seed for _ in range(20) if round_trip(name, values) != values)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed


def compressed(data: bytes, *, sized: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=sized).compress(data)


NOISE = np.random.default_rng(0).bytes(64)
GOOD = compressed(NOISE)
HOSTILE_ZSTD = {
    "nothing": b"",
    "no frame": b"\x00" * 40,
    "truncated": GOOD[:-1],
    "trailing byte": GOOD + b"\x00",
    "two frames": GOOD + GOOD,
    "trailing empty frame": GOOD + compressed(b""),
    "skippable frame": b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + GOOD,
    "no content size": compressed(NOISE, sized=False),
    "claims less": compressed(NOISE[:-2]),
    "claims more": compressed(NOISE + b"ab"),
    # Frame header: magic, descriptor 0x20 (single segment, 1-byte size), size.
    "lies, holds less": GOOD[:4] + b"\x20\x40" + compressed(NOISE[:32])[6:],
    "lies, holds more": GOOD[:4] + b"\x20\x40" + compressed(NOISE + NOISE)[6:],
}


@pytest.mark.parametrize("payload", HOSTILE_ZSTD.values(), ids=HOSTILE_ZSTD.keys())
def test_hostile_zstd_is_malformed(payload: bytes) -> None:
    codec = codecs.by_name("zstd")
    assert GOOD[4:6] == b"\x20\x40", "the forged headers below rest on this layout"
    with pytest.raises(MalformedChunk):
        decode(codec, payload, len(NOISE))


def decode(codec: codecs.Codec, payload: bytes, decoded_bytes: int) -> bytes:
    codec.check(memoryview(payload), decoded_bytes)
    out = bytearray(decoded_bytes)
    codec.decode(memoryview(payload), memoryview(out))
    return bytes(out)


def test_a_window_larger_than_a_chunk_is_not_allocated() -> None:
    """A frame may ask its reader for a window of 64 MiB, whatever it holds; libzstd allocates it
    when the frame is not there whole."""
    window_log = 26
    header = b"\x28\xb5\x2f\xfd\x80" + bytes([(window_log - 10) << 3]) + (64).to_bytes(4, "little")
    payload = header + (64 << 3 | 1).to_bytes(3, "little") + NOISE
    assert decode(ZstdPlanes(), payload, 64)
    with pytest.raises(MalformedChunk, match="too much memory"):
        decode(ZstdPlanes(), payload[:-1], 64)


@pytest.mark.parametrize("claimed", [1 << 20, MAX_CHUNK_BYTES, 1 << 40])
def test_nothing_is_allocated_for_a_claim_that_cannot_be_true(claimed: int) -> None:
    size = claimed.to_bytes(8, "little")
    payload = b"\x28\xb5\x2f\xfd\xe0" + size + b"\x01\x00\x00"
    assert zstandard.frame_content_size(payload) == claimed
    tracemalloc.start()
    with pytest.raises(MalformedChunk):
        decode(ZstdPlanes(), payload, claimed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_constant_chunks_are_not_taken_for_lies() -> None:
    values = bytes(MAX_CHUNK_BYTES)
    assert round_trip("zstd", values) == values
