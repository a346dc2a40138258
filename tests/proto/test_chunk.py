import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from draftfeed_proto import chunk, codecs
from draftfeed_proto.chunk import ChunkKind
from draftfeed_proto.errors import (
    ChecksumMismatch,
    ChunkError,
    LimitExceeded,
    MalformedChunk,
    ProtoError,
    UnknownCodec,
)
from draftfeed_proto.limits import MAX_CHUNK_BYTES
from frames import FIELDS, HEADER_BYTES, NAMES, forge

every_codec = pytest.mark.parametrize("codec", codecs.names())


def states(rows: int, layers: int, hidden: int, dtype: Any = np.float16) -> np.ndarray:
    """Few different values, so that zstd shrinks even small ones."""
    rng = np.random.default_rng(rows)
    words = rng.integers(0, 4, (rows, layers, hidden), np.uint16) + 0x3C00
    return words.astype(np.uint16).view(dtype)


def tokens(n: int = 5) -> bytes:
    return bytes(chunk.encode_tokens(np.arange(n, dtype=np.int32), np.ones(n, np.uint8)))


def encode(values: np.ndarray, first_row: int, codec: str) -> bytes:
    return bytes(chunk.encode_states(values, first_row, codecs.by_name(codec)))


RAW = encode(states(3, 2, 4), 1, "raw")
ZSTD = encode(states(16, 2, 8), 1, "zstd")
PACKED = encode(states(16, 2, 8), 1, "packed")
FRAMES = {"raw": RAW, "zstd": ZSTD, "packed": PACKED, "tokens": tokens()}
every_frame = pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())


def decode(frame: chunk.Frame) -> tuple[Any, ...]:
    """Through the door that a consumer uses for this kind."""
    header = chunk.read_header(frame)
    if header.kind is ChunkKind.TOKENS:
        return chunk.decode_tokens(frame)
    out = np.zeros((header.first_row + header.rows, header.layers, header.hidden), np.float16)
    chunk.decode_states(frame, out)
    return (out,)


@every_codec
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 1, 2), (7, 1, 3), (1, 64, 8), (5, 5, 64), (300, 3, 17)], ids=str
)
def test_states_come_back(codec: str, dtype: Any, shape: tuple[int, int, int]) -> None:
    values = states(*shape, dtype)
    out = np.zeros((shape[0] + 3, *shape[1:]), dtype)
    header = chunk.decode_states(encode(values, 2, codec), out)
    assert (header.first_row, header.rows, header.layers, header.hidden) == (2, *shape)
    assert np.array_equal(out[2:-1], values)
    assert not out[:2].any()
    assert not out[-1].any()


@every_codec
def test_every_16_bit_pattern_comes_back(codec: str) -> None:
    """NaN payloads, signalling NaNs, denormals and both zeros included."""
    values = np.arange(1 << 16, dtype=np.uint16).reshape(64, 2, 512)
    out = np.zeros(values.shape, np.float16)
    chunk.decode_states(encode(values.view(np.float16), 0, codec), out)
    assert np.array_equal(out.view(np.uint16), values)


@every_codec
@given(data=st.data())
def test_any_layout_comes_back(codec: str, data: st.DataObject) -> None:
    """Slices, steps, reversed and transposed arrays, as an engine may hand over."""
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9)))
    size = 2 * math.prod(shape)
    bits = data.draw(st.binary(min_size=size, max_size=size))
    base = np.frombuffer(bits, np.uint16).reshape(shape)
    step = st.sampled_from([1, 2, -1])
    values = base[tuple(slice(None, None, data.draw(step)) for _ in shape)]
    values = values.transpose(data.draw(st.permutations(range(3))))
    out = np.zeros(values.shape, np.uint16)
    chunk.decode_states(encode(values, 0, codec), out)
    assert np.array_equal(out, values)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), min_size=1, max_size=50))
def test_tokens_come_back_writable(pairs: list[tuple[int, int]]) -> None:
    ids, mask = np.array(pairs).T
    back = chunk.decode_tokens(chunk.encode_tokens(ids.astype(np.int32), mask.astype(np.uint8)))
    assert [array.dtype for array in back] == [np.int32, np.uint8]
    assert np.array_equal(back, [ids, mask])
    for array in back:
        array[0] = 0  # a trainer may mask more than we did


@every_frame
def test_frames_come_from_any_buffer(frame: bytes) -> None:
    whole = decode(frame)
    for view in (bytearray(frame), memoryview(frame), memoryview(b"x" + frame)[1:]):
        assert all(map(np.array_equal, decode(view), whole))


@every_frame
def test_every_flipped_byte_is_noticed(frame: bytes) -> None:
    for at in range(len(frame)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(frame)
            bad[at] ^= flip
            with pytest.raises((ChunkError, LimitExceeded)):
                decode(bad)


@every_frame
def test_every_truncation_is_noticed(frame: bytes) -> None:
    for length in range(len(frame)):
        with pytest.raises(MalformedChunk):
            decode(frame[:length])


@every_frame
def test_trailing_bytes_are_noticed(frame: bytes) -> None:
    with pytest.raises(MalformedChunk, match="its header says"):
        decode(frame + b"\0")


def test_bytes_changed_in_flight_are_told_from_a_bad_encoder() -> None:
    with pytest.raises(ChecksumMismatch) as caught:
        decode(RAW[:-1] + bytes([RAW[-1] ^ 1]))
    assert caught.value.expected != caught.value.actual


HALF = bytes(24)
LIES: dict[str, tuple[bytes, type[ProtoError]]] = {
    "magic": (forge(RAW, magic=b"DFC2"), MalformedChunk),
    "kind": (forge(RAW, kind=2), MalformedChunk),
    "tokens kind": (forge(RAW, kind=0), MalformedChunk),
    "states kind": (forge(tokens(), kind=1), MalformedChunk),
    "codec": (forge(RAW, codec=4), UnknownCodec),
    "tokens in zstd": (forge(tokens(), codec=1), MalformedChunk),
    "tokens that are shorter": (forge(tokens(), payload=bytes(24)), MalformedChunk),
    "raw called zstd": (forge(RAW, codec=1), MalformedChunk),
    "zstd called raw": (forge(ZSTD, codec=0), MalformedChunk),
    "packed called zstd": (forge(PACKED, codec=1), MalformedChunk),
    "zstd called packed": (forge(ZSTD, codec=2), MalformedChunk),
    "flags": (forge(RAW, flags=1), MalformedChunk),
    "reserved": (forge(RAW, reserved=1), MalformedChunk),
    "no rows": (forge(RAW, rows=0, decoded_bytes=0, encoded_bytes=0), MalformedChunk),
    "no layers": (forge(RAW, layers=0), MalformedChunk),
    "no hidden": (forge(RAW, hidden=0), MalformedChunk),
    "too many layers": (forge(RAW, layers=65), LimitExceeded),
    "too much hidden": (forge(RAW, hidden=(1 << 16) + 1), LimitExceeded),
    "too many rows": (forge(RAW, rows=1 << 21), LimitExceeded),
    "rows past the end of a sample": (forge(RAW, first_row=1 << 20), LimitExceeded),
    "first row wraps at 32 bits": (forge(RAW, first_row=(1 << 32) - 1), LimitExceeded),
    "product wraps at 32 bits": (
        forge(RAW, rows=1 << 16, layers=2, hidden=1 << 14, decoded_bytes=0),
        MalformedChunk,
    ),
    "decoded too large": (forge(RAW, decoded_bytes=MAX_CHUNK_BYTES + 1), LimitExceeded),
    "encoded too large": (forge(RAW, encoded_bytes=MAX_CHUNK_BYTES + 1), LimitExceeded),
    "decoded is not the product": (forge(RAW, decoded_bytes=46), MalformedChunk),
    "encoded above decoded": (
        forge(RAW, codec=1, payload=zstandard.ZstdCompressor().compress(bytes(range(48)))),
        MalformedChunk,
    ),
    "payload too short": (forge(RAW, payload=HALF), MalformedChunk),
    "empty payload": (forge(ZSTD, payload=b""), MalformedChunk),
    "8 MiB in 48 raw bytes": (
        forge(RAW, rows=1 << 10, layers=2, hidden=1 << 11, decoded_bytes=8 << 20),
        MalformedChunk,
    ),
    "8 MiB in 100 zstd bytes": (
        forge(
            ZSTD,
            payload=ZSTD[HEADER_BYTES:][:100],
            rows=1 << 10,
            layers=2,
            hidden=1 << 11,
            decoded_bytes=8 << 20,
        ),
        MalformedChunk,
    ),
    "tokens with a first row": (forge(tokens(), first_row=1), MalformedChunk),
    "tokens with layers": (forge(tokens(), layers=1), MalformedChunk),
    "tokens with hidden": (forge(tokens(), hidden=1), MalformedChunk),
    "negative token id": (forge(tokens(), payload=b"\xff" * 4 + bytes(21)), MalformedChunk),
    "mask of 2": (forge(tokens(), payload=bytes(24) + b"\x02"), MalformedChunk),
}


@pytest.mark.parametrize(("frame", "error"), LIES.values(), ids=LIES.keys())
def test_lies_under_a_good_checksum_are_refused_before_memory_is_taken(
    frame: bytes, error: type[ProtoError]
) -> None:
    fields = dict(zip(NAMES, FIELDS.unpack_from(frame), strict=True))
    room = np.empty((1100, fields["layers"], fields["hidden"]), np.float16)
    tracemalloc.start()
    with pytest.raises(error):
        chunk.decode_tokens(frame) if frame[4] == 0 else chunk.decode_states(frame, room)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_forged_frames_without_a_lie_are_good() -> None:
    for frame in FRAMES.values():
        assert forge(frame) == frame


@pytest.mark.parametrize("shape", [(3, 2, 4), (4, 1, 4), (4, 2, 5), (4, 4, 2)], ids=str)
def test_states_of_another_shape_are_not_written(shape: tuple[int, int, int]) -> None:
    out = np.zeros(shape, np.float16)
    with pytest.raises(MalformedChunk):
        chunk.decode_states(RAW, out)  # rows 1..4 of [2, 4]
    assert not out.any()


@pytest.mark.parametrize(
    ("decoder", "frame"),
    [
        (lambda frame: chunk.decode_states(frame, np.zeros((9, 2, 4), np.float16)), tokens()),
        (chunk.decode_tokens, RAW),
    ],
)
def test_one_kind_is_not_taken_for_the_other(decoder: Any, frame: bytes) -> None:
    with pytest.raises(MalformedChunk):
        decoder(frame)


@given(st.binary(max_size=200))
def test_noise_is_never_a_chunk(noise: bytes) -> None:
    with pytest.raises(ProtoError):
        decode(noise)


@given(st.data())
def test_hostile_headers_are_refused_or_decoded_right(data: st.DataObject) -> None:
    """Any header under a good checksum: an error of ours, or exactly what the header says."""
    small = st.integers(0, 9)
    number = st.one_of(small, st.integers(0, 2**32 - 1))
    lies = {
        "kind": data.draw(st.integers(0, 2)),
        "codec": data.draw(st.integers(0, 4)),
        "layers": data.draw(st.one_of(small, st.integers(0, 2**16 - 1))),
        **{name: data.draw(number) for name in ("first_row", "rows", "hidden", "decoded_bytes")},
    }
    frame = forge(RAW, payload=data.draw(st.binary(max_size=80)), **lies)
    try:
        header, values = chunk.decode_chunk(frame)
    except ProtoError:
        return
    assert values.nbytes == header.decoded_bytes == lies["decoded_bytes"]


@pytest.mark.parametrize("missing", ["layers", "hidden", "rows"])
def test_states_of_no_size_are_refused(missing: str) -> None:
    """They would decode to no bytes, as said, and codecs do not know such a shape."""
    frame = forge(RAW, payload=b"", decoded_bytes=0, **{missing: 0})
    with pytest.raises(MalformedChunk, match="cannot decode to 0 bytes"):
        chunk.read_header(frame)


@pytest.mark.parametrize("codec", codecs.names())
def test_a_frame_lies_in_the_callers_buffer_and_nothing_behind_it_changes(codec: str) -> None:
    """Buffers are used again: what is behind a frame may be of another one."""
    values = states(16, 2, 8)
    size = chunk.frame_bytes(values.nbytes)
    buffer = memoryview(bytearray(b"\xaa" * (size + 9)))
    frame = chunk.encode_states(values, 0, codecs.by_name(codec), buffer)
    assert frame.obj is buffer.obj
    assert bytes(frame) == encode(values, 0, codec)
    assert bytes(buffer[size:]) == b"\xaa" * 9


def test_the_widest_row_fits_one_chunk() -> None:
    values = np.zeros((1, 64, 1 << 16), np.float16)
    frame = encode(values, 0, "raw")
    assert chunk.read_header(frame).decoded_bytes == MAX_CHUNK_BYTES
    chunk.decode_states(frame, values)


class InMemory:
    """A frame that is read like one in a file."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._frame[offset : offset + len(into)]


def test_after_a_damaged_chunk_in_a_file_a_larger_one_is_decoded() -> None:
    """While the damaged one's error was still held, the client ended with a BufferError."""
    small, large = states(4, 2, 64), states(4000, 2, 64)
    frames = [encode(one, 0, "raw") for one in (small, large)]
    damaged = bytearray(frames[0])
    damaged[-1] ^= 1
    with pytest.raises(ChunkError) as held:
        chunk.decode_placed(
            chunk.read_head(damaged), InMemory(bytes(damaged)), np.empty_like(small)
        )
    out = np.empty_like(large)
    chunk.decode_placed(chunk.read_head(frames[1]), InMemory(frames[1]), out)
    assert (out == large).all()
    assert held.value.__traceback__ is not None
