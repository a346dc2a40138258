"""Codec `packed`: each implementation against NumPy's, which every machine has, and all of them
against a reader that was written from PROTOCOL.md alone."""

import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from fuzz import emulation
from hypothesis import example, given
from hypothesis import strategies as st

from draftfeed_proto.codecs import packed_native
from draftfeed_proto.codecs.packed import NUMPY, Implementation, available
from draftfeed_proto.errors import MalformedChunk
from packed_by_hand import BLOCK, Refused, unpack


class Emulated:
    """The kernels for AVX-512 on a processor without it. Compiled when they are first called."""

    def encode(self, states: np.ndarray, out: memoryview) -> int:
        return self._native.encode(states, out)

    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        self._native.decode(payload, out)

    @cached_property
    def _native(self) -> packed_native.Native:
        with tempfile.TemporaryDirectory() as folder:  # once it is loaded, the file may go
            library = packed_native._load(emulation.build_library(Path(folder)))
        return packed_native.Native(library, "avx512")


IMPLEMENTATIONS = dict(available().implementations)
if emulation.is_due() and shutil.which("cc"):
    IMPLEMENTATIONS["avx512 emulated"] = Emulated()
REFERENCE = IMPLEMENTATIONS[NUMPY]
FP16, BF16 = np.dtype(np.float16), np.dtype(np.uint16)
Shape = tuple[int, int, int]

each = pytest.mark.parametrize("codec", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
both = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


def encoded(codec: Implementation, states: np.ndarray, capacity: int | None = None) -> bytes | None:
    """None when it is not packed. Nothing may be written beyond `capacity`, twice the size of the
    states unless given."""
    capacity = 2 * states.nbytes + 100 if capacity is None else capacity
    memory = bytearray(capacity) + b"guard"
    size = codec.encode(states, memoryview(memory)[:capacity])
    assert memory[capacity:] == b"guard"
    return bytes(memory[:size]) if size else None


def decoded(codec: Implementation, payload: bytes, shape: Shape, dtype: np.dtype) -> np.ndarray:
    out = np.zeros(shape, dtype)
    codec.decode(memoryview(payload), out)
    return out.view(np.uint16)


def outcome(
    codec: Implementation, payload: bytes, shape: Shape, dtype: np.dtype
) -> list[int] | None:
    """The words, layer after layer; None when the payload is refused."""
    try:
        return decoded(codec, payload, shape, dtype).swapaxes(0, 1).ravel().tolist()
    except MalformedChunk:
        return None


def by_hand(payload: bytes, shape: Shape, dtype: np.dtype) -> list[int] | None:
    try:
        return unpack(payload, *shape, bf16=dtype == BF16)
    except Refused:
        return None


# states

SPECIAL = {
    FP16: [0, 0x8000, 1, 0x83FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF],
    BF16: [0, 0x8000, 1, 0x807F, 0x0080, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF],
}
"""Zeros, subnormals and their edge, the largest, infinities, and NaNs with payloads."""


def from_bf16(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 -> as a model in bf16 makes them: fp16 then has low bits of zero."""
    words = values.view(np.uint32) >> 16
    if dtype == BF16:
        return words.astype(BF16)
    return np.clip((words << 16).view(np.float32), -60_000, 60_000).astype(FP16)


def exact(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == BF16:
        return from_bf16(values, dtype)
    return np.clip(values, -60_000, 60_000).astype(FP16)


def normal(shape: Shape, dtype: np.dtype, seed: int = 0) -> np.ndarray:
    return from_bf16(floats(np.random.default_rng(seed), shape), dtype)


def floats(source: np.random.Generator, shape: Shape, scale: float = 1) -> np.ndarray:
    """Normal, but some channels are much louder than the others."""
    loudness = np.exp(source.standard_normal(shape[2]) * source.uniform(0, 2)) * scale
    return (source.standard_normal(shape) * loudness).astype(np.float32)


KINDS: dict[str, Callable[[np.random.Generator, Shape, np.dtype], np.ndarray]] = {
    "from bf16": lambda source, shape, dtype: from_bf16(floats(source, shape), dtype),
    "exact": lambda source, shape, dtype: exact(floats(source, shape), dtype),
    "tiny": lambda source, shape, dtype: from_bf16(floats(source, shape, 1e-6), dtype),
    "constant": lambda source, shape, dtype: exact(np.full(shape, 0.75, np.float32), dtype),
    "zeros": lambda source, shape, dtype: np.zeros(shape, dtype),
    "noise": lambda source, shape, dtype: source.integers(0, 1 << 16, shape, BF16).view(dtype),
}


def part_of_more(states: np.ndarray) -> np.ndarray:
    rows, layers, hidden = states.shape
    more = np.zeros((2 * rows + 1, layers + 2, hidden + 3), states.dtype)
    part = more[1::2, 1:-1, 2:-1]
    part[:] = states
    return part


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows first": np.ascontiguousarray,
    "layers first": lambda states: np.ascontiguousarray(states.swapaxes(0, 1)).swapaxes(0, 1),
    "part of more": part_of_more,
    "backwards": lambda states: np.ascontiguousarray(states[::-1, ::-1])[::-1, ::-1],
}


@st.composite
def any_states(draw: st.DrawFn) -> np.ndarray:
    shape = (
        draw(st.integers(1, 40), "rows"),
        draw(st.integers(1, 6), "layers"),
        draw(st.sampled_from([1, 2, 3, 7, 31, 63, 64, 65, 100, 257, 600]), "hidden"),
    )
    dtype = draw(st.sampled_from([FP16, BF16]))
    source = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    states = KINDS[draw(st.sampled_from(sorted(KINDS)))](source, shape, dtype)
    odd = source.random(shape) < draw(st.sampled_from([0, 0.001, 0.05]))
    states.view(BF16)[odd] = source.choice(SPECIAL[dtype], np.count_nonzero(odd))
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](states)


@each
@given(states=any_states())
def test_any_states_come_back(codec: Implementation, states: np.ndarray) -> None:
    payload = encoded(codec, states)
    assert payload == encoded(REFERENCE, states)
    if payload is None:
        return
    out = np.zeros_like(states)
    codec.decode(memoryview(payload), out)
    assert np.array_equal(out.view(BF16), states.view(BF16))


@each
@both
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 2, BLOCK + d) for d in (-1, 0, 1)),
        *((BLOCK + d, 2, 1) for d in (-1, 0, 1)),
        (2, 2, BLOCK),
        (1, 1, 2 * BLOCK),
        (57, 2, 577),
        (300, 1, 257),
    ],
    ids=str,
)
def test_blocks_end_within_rows_and_layers(
    codec: Implementation, dtype: np.dtype, shape: Shape
) -> None:
    states = normal(shape, dtype)
    payload = encoded(codec, states)
    assert payload is not None
    assert payload == encoded(REFERENCE, states)
    assert np.array_equal(decoded(codec, payload, shape, dtype), states.view(BF16))


@each
@both
def test_all_bit_patterns_come_back(codec: Implementation, dtype: np.dtype) -> None:
    """A table has 25 exponents, and patterns without one are exceptions: a layer gets 16."""
    mantissa_bits = 10 if dtype == FP16 else 7
    patterns = np.arange(1 << 16, dtype=BF16)
    by_exponent = np.argsort(patterns >> mantissa_bits & (0x7FFF >> mantissa_bits), kind="stable")
    states = patterns[by_exponent].reshape(1, -1, 32 << mantissa_bits)
    np.random.default_rng(0).permuted(states, axis=2, out=states)
    payload = encoded(codec, states.view(dtype))
    assert payload is not None
    assert payload == encoded(REFERENCE, states.view(dtype))
    assert np.array_equal(decoded(codec, payload, states.shape, dtype), states)


@each
@both
def test_states_that_a_model_made_in_bf16_get_smaller_by_a_third(
    codec: Implementation, dtype: np.dtype
) -> None:
    states = normal((128, 5, 576), dtype)
    assert encoded(codec, states, int(states.nbytes / 1.4)) is not None


@each
def test_low_bits_of_fp16_are_stored_where_there_are_any(codec: Implementation) -> None:
    values = floats(np.random.default_rng(0), (64, 1, 64))
    for states, flags in ((from_bf16(values, FP16), 2), (exact(values, FP16), 3)):
        payload = encoded(codec, states)
        assert payload is not None
        assert payload[1] == flags


@each
@pytest.mark.parametrize(("with_low", "flags"), [(2, 0), (3, 1)])
def test_low_bits_are_exceptions_in_up_to_a_tenth_of_the_values(
    codec: Implementation, with_low: int, flags: int
) -> None:
    states = np.full((1, 1, 20), 0x3C00, BF16)
    states[..., :with_low] |= 4
    payload = encoded(codec, states.view(FP16))
    assert payload is not None
    assert payload[1] == flags


@each
@pytest.mark.parametrize(("rows", "flags"), [(23, 0), (24, 2)])
def test_a_few_rows_do_not_pay_for_bases(codec: Implementation, rows: int, flags: int) -> None:
    payload = encoded(codec, normal((rows, 1, 64), BF16))
    assert payload is not None
    assert payload[1] == flags


@each
def test_a_payload_that_just_fits(codec: Implementation) -> None:
    states = normal((30, 2, 100), FP16)
    payload = encoded(codec, states)
    assert payload is not None
    assert encoded(codec, states, len(payload)) == payload
    for capacity in (0, 1, 2, 27, 77, len(payload) // 2, len(payload) - 1):
        assert encoded(codec, states, capacity) is None


@each
@pytest.mark.parametrize(("count", "packed"), [(2048, True), (2049, False)])
def test_a_block_has_at_most_2048_exceptions(
    codec: Implementation, count: int, packed: bool
) -> None:
    states = np.full((1, 1, BLOCK), 0x3C00, BF16)
    states[0, 0, 1 : 2 * count : 2] |= 1  # beside the channels that are sampled
    payload = encoded(codec, states.view(FP16))
    assert (payload is not None) is packed
    if payload is not None:
        assert np.array_equal(decoded(codec, payload, states.shape, FP16), states)


@each
@both
def test_noise_is_not_packed(codec: Implementation, dtype: np.dtype) -> None:
    states = np.random.default_rng(0).integers(0, 1 << 16, (64, 2, 600), BF16).view(dtype)
    assert encoded(codec, states, states.nbytes) is None


# hostile payloads

SHAPE = (2, 1, 5)


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


GOOD = {
    "dtype": b"\x00",
    "flags": b"\x03",
    "table": bytes(range(10, 35)),
    "bases": b"\x21\x43\x05",
    "counts": numbers(3, 2, 1, 2),
    "heads": bytes(range(100, 110)),
    "lower": b"\xe4\x1b\x05",
    "upper": b"\x55\x03",
    "first": b"\x9c\x0f\x00",  # 0 3 1 2 3 3 0 0 0 0
    "second": b"\x0f",  # 3 3 0
    "third": b"\x07",  # 3 1
    "nibbles": b"\x07",
    "positions": numbers(4, 9),
    "exceptions": numbers(0x7E01, 0x8001),
}
"""A chunk of 10 values."""


def forged(**fields: bytes) -> bytes:
    return b"".join((GOOD | fields).values())


HOSTILE = {
    "nothing": b"",
    "bf16": forged(dtype=b"\x01"),
    "neither fp16 nor bf16": forged(dtype=b"\x02"),
    "unknown flag": forged(flags=b"\x07"),
    "more second digits than values": forged(counts=numbers(11, 2, 1, 2), second=b"\x0f\0\0"),
    "more third digits than second": forged(counts=numbers(3, 4, 1, 2)),
    "more nibbles than third digits": forged(counts=numbers(3, 2, 3, 2), nibbles=b"\0\0"),
    "more exceptions than values": forged(
        counts=numbers(3, 2, 1, 11), positions=numbers(*range(11)), exceptions=numbers(*range(11))
    ),
    "most of all": forged(counts=numbers(*[0xFFFF] * 4)),
    "a 3 too many in the first plane": forged(first=b"\xdc\x0f\x00"),
    "a 3 too few in the first plane": forged(first=b"\x98\x0f\x00"),
    "a 3 too many in the second plane": forged(second=b"\x3f"),
    "a 3 too few in the second plane": forged(second=b"\x0d"),
    "a 3 too many in the third plane": forged(third=b"\x0f"),
    "a 3 too few in the third plane": forged(third=b"\x06"),
    "a position twice": forged(positions=numbers(4, 4)),
    "positions that fall": forged(positions=numbers(9, 4)),
    "a position beyond the block": forged(positions=numbers(4, 10)),
    "positions that fall from beyond the block": forged(positions=numbers(0xFFFF, 4)),
    "a byte left over": forged() + b"\0",
}


def test_the_payload_that_the_others_are_made_from_is_good() -> None:
    words = by_hand(forged(), SHAPE, FP16)
    assert words is not None
    assert (words[4], words[9]) == (0x7E01, 0x8001)


@each
@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_hostile_payloads_are_malformed(codec: Implementation, payload: bytes) -> None:
    assert by_hand(payload, SHAPE, FP16) is None
    with pytest.raises(MalformedChunk) as caught:
        decoded(codec, payload, SHAPE, FP16)
    assert "\n" not in str(caught.value)


@each
def test_low_bits_of_bf16_are_malformed(codec: Implementation) -> None:
    payload = forged(dtype=b"\x01")
    assert by_hand(payload, SHAPE, BF16) is None
    with pytest.raises(MalformedChunk):
        decoded(codec, payload, SHAPE, BF16)


@each
def test_a_payload_cut_short_anywhere_is_malformed(codec: Implementation) -> None:
    payload = forged()
    for size in range(len(payload)):
        with pytest.raises(MalformedChunk):
            decoded(codec, payload[:size], SHAPE, FP16)


@each
def test_a_flipped_bit_gives_what_the_format_says_or_an_error(codec: Implementation) -> None:
    payload = forged()
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        assert outcome(codec, bytes(flipped), SHAPE, FP16) == by_hand(bytes(flipped), SHAPE, FP16)


@each
@both
@given(table=st.binary(min_size=25, max_size=25), bases=st.binary(min_size=3, max_size=3))
@example(table=bytes(25), bases=bytes(3))
@example(table=b"\xff" * 25, bases=b"\xff" * 3)
def test_any_table_can_be_read(
    codec: Implementation, dtype: np.dtype, table: bytes, bases: bytes
) -> None:
    """Another encoder chooses as it likes: ranks twice, exponents beyond those of the dtype."""
    payload = forged(table=table, bases=bases)
    if dtype == BF16:
        payload = forged(
            dtype=b"\x01", flags=b"\x02", table=table, bases=bases, lower=b"", upper=b""
        )
    words = by_hand(payload, SHAPE, dtype)
    assert words is not None
    assert outcome(codec, payload, SHAPE, dtype) == words


@each
@given(changed=st.dictionaries(st.sampled_from(sorted(GOOD)), st.binary(max_size=12), max_size=3))
def test_any_fields_are_read_as_the_format_says_or_refused(
    codec: Implementation, changed: dict[str, bytes]
) -> None:
    payload = forged(**changed)
    assert outcome(codec, payload, SHAPE, FP16) == by_hand(payload, SHAPE, FP16)


@each
@both
@given(data=st.data())
def test_damage_in_a_chunk_of_several_blocks(
    codec: Implementation, dtype: np.dtype, data: st.DataObject
) -> None:
    shape = (70, 2, 500)
    payload = bytearray(encoded(REFERENCE, normal(shape, dtype)) or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(payload) - 1))
        payload[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(payload)), st.integers(0, len(payload))))
    damaged = bytes(payload[:end])
    assert outcome(codec, damaged, shape, dtype) == outcome(REFERENCE, damaged, shape, dtype)
