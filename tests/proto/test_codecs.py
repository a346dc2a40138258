import sys
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

CODECS = [codecs.by_number(number) for number in range(4)]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=[codec.name for codec in CODECS])


def payload_of(codec: codecs.Codec, states: np.ndarray) -> bytes | None:
    """None when it does not get smaller."""
    out = memoryview(bytearray(states.nbytes))
    size = codec.encode(states, out)
    return bytes(out[:size]) if size else None


def decoded(codec: codecs.Codec, payload: bytes, like: np.ndarray) -> np.ndarray:
    out = np.zeros_like(like)
    codec.decode(memoryview(payload), out)
    return out


def bits(values: np.ndarray) -> bytes:
    return values.tobytes()


def normal(rows: int, layers: int, hidden: int, seed: int = 0) -> np.ndarray:
    """fp16 that came from bf16, as hidden states do."""
    values = np.random.default_rng(seed).standard_normal((rows, layers, hidden), np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float16)


def test_numbers_on_disk_never_change() -> None:
    numbers = {"raw": 0, "zstd": 1, "packed": 2, "rows": 3}
    assert {codec.name: codec.number for codec in CODECS} == numbers
    assert codecs.names() == ["raw", "zstd", "packed"]


@pytest.mark.parametrize("lookup", [lambda: codecs.by_name("gzip"), lambda: codecs.by_number(200)])
def test_unknown_codec_is_named_with_the_known_ones(lookup: object) -> None:
    with pytest.raises(UnknownCodec, match="raw, zstd, packed"):
        lookup()  # type: ignore[operator]


@every_codec
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
@given(data=st.data())
def test_any_values_come_back(codec: codecs.Codec, dtype: type, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 20)))
    words = data.draw(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=20))
    states = np.resize(np.array(words, np.uint16), shape).view(dtype)
    if payload := payload_of(codec, states):
        assert bits(decoded(codec, payload, states)) == bits(states)


@every_codec
def test_hidden_states_get_smaller_unless_they_are_raw(codec: codecs.Codec) -> None:
    states = normal(64, 3, 96)
    payload = payload_of(codec, states)
    assert payload is not None
    assert bits(decoded(codec, payload, states)) == bits(states)
    assert (len(payload) < states.nbytes) is (codec.name not in ("raw", "rows"))


@every_codec
def test_rows_and_layers_may_lie_anywhere(codec: codecs.Codec) -> None:
    """Engines hand over slices of what they hold, consumers a part of a sample."""
    states = normal(64, 3, 96)
    base = np.zeros((130, 7, 100), np.float16)
    strided = base[129:1:-2, 1::2, 4:]
    strided[:] = states
    payload = payload_of(codec, states)
    assert payload is not None
    assert payload_of(codec, strided) == payload
    strided[:] = 0
    codec.decode(memoryview(payload), strided)
    assert np.array_equal(strided, states)
    strided[:] = 0
    assert not base.any(), "nothing else is written"


@every_codec
def test_threads_share_a_codec(codec: codecs.Codec) -> None:
    """Chunks large enough that threads are in C at the same time."""
    failed = []

    def work(seed: int) -> None:
        states = normal(400 + seed, 2, 640, seed)
        for _ in range(4):
            payload = payload_of(codec, states)
            if not payload or bits(decoded(codec, payload, states)) != bits(states):
                failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed


@every_codec
def test_other_threads_run_while_a_codec_does(codec: codecs.Codec) -> None:
    """The engine and the sockets are other threads of the process. Nobody is made to give up the
    interpreter here: the main thread goes on before the other is done only if that lets go."""
    if codec.name == "raw":
        pytest.skip("NumPy copies too few bytes at a time to be seen")
    states = normal(400, 2, 640)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        assert any(_goes_on_meanwhile(codec, states) for _ in range(20))
    finally:
        sys.setswitchinterval(before)


def _goes_on_meanwhile(codec: codecs.Codec, states: np.ndarray) -> bool:
    begun, done = threading.Event(), threading.Event()
    out = memoryview(bytearray(states.nbytes))

    def work() -> None:
        begun.set()
        codec.encode(states, out)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    meanwhile = not done.is_set()
    thread.join()
    return meanwhile


# which codec a chunk gets


def chosen(name: str, states: np.ndarray) -> tuple[str, int]:
    out = memoryview(bytearray(states.nbytes))
    number, size = codecs.by_name(name).encode(states, out)
    assert bits(decoded(codecs.by_number(number), bytes(out[:size]), states)) == bits(states)
    return codecs.by_number(number).name, size


def noise(rows: int, layers: int, hidden: int) -> np.ndarray:
    data = np.random.default_rng(0).bytes(2 * rows * layers * hidden)
    return np.frombuffer(data, np.float16).reshape(rows, layers, hidden)


@pytest.mark.parametrize("name", codecs.names())
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 7), (3, 2, 5), (100, 5, 64)], ids=str)
def test_what_cannot_be_compressed_does_not_grow(name: str, shape: tuple[int, int, int]) -> None:
    states = noise(*shape)
    assert chosen(name, states) == ("raw", states.nbytes)


@pytest.mark.parametrize("name", codecs.names())
def test_what_can_be_packed_gets_the_codec_that_was_named(name: str) -> None:
    assert chosen(name, normal(64, 3, 96))[0] == name


def test_repetition_that_packed_cannot_see_is_left_to_zstd() -> None:
    states = np.tile(noise(1, 2, 64), (20, 1, 16))
    assert payload_of(codecs.PACKED, states) is None
    assert chosen("packed", states)[0] == "zstd"


def test_packed_is_not_taken_for_a_saving_below_three_percent() -> None:
    """Ten exponents that are equally frequent cost 4.6 bits; with all else that is 15.6."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 16, (200, 2, 256), np.uint16) & 0x83FF
    states = (words | rng.integers(8, 18, words.shape, np.uint16) << 10).view(np.float16)
    packed = payload_of(codecs.PACKED, states)
    assert packed is not None
    assert 0.97 < len(packed) / states.nbytes < 1
    name, size = chosen("packed", states)
    assert name == "zstd"
    assert size < len(packed)


# zstd


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
    assert GOOD[4:6] == b"\x20\x40", "the forged headers below rest on this layout"
    with pytest.raises(MalformedChunk):
        decode(payload, len(NOISE))


def decode(payload: bytes, decoded_bytes: int) -> bytes:
    return bits(decoded(ZstdPlanes(), payload, np.empty((1, 1, decoded_bytes // 2), np.float16)))


def test_a_window_larger_than_a_chunk_is_not_allocated() -> None:
    """A frame may ask its reader for a window of 64 MiB, whatever it holds; libzstd allocates it
    when the frame is not there whole."""
    window_log = 26
    header = b"\x28\xb5\x2f\xfd\x80" + bytes([(window_log - 10) << 3]) + (64).to_bytes(4, "little")
    payload = header + (64 << 3 | 1).to_bytes(3, "little") + NOISE
    assert decode(payload, 64)
    with pytest.raises(MalformedChunk, match="too much memory"):
        decode(payload[:-1], 64)


@pytest.mark.parametrize("claimed", [1 << 20, MAX_CHUNK_BYTES])
def test_nothing_is_allocated_for_a_claim_that_cannot_be_true(claimed: int) -> None:
    size = claimed.to_bytes(8, "little")
    payload = b"\x28\xb5\x2f\xfd\xe0" + size + b"\x01\x00\x00"
    assert zstandard.frame_content_size(payload) == claimed
    room = np.empty((1, 1, claimed // 2), np.float16)
    tracemalloc.start()
    with pytest.raises(MalformedChunk):
        ZstdPlanes().decode(memoryview(payload), room)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@every_codec
def test_constant_chunks_are_not_taken_for_lies(codec: codecs.Codec) -> None:
    states = np.zeros((64, 1, MAX_CHUNK_BYTES // 128), np.float16)
    payload = payload_of(codec, states)
    assert payload is not None
    assert bits(decoded(codec, payload, states)) == bits(states)
