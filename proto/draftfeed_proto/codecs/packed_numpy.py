"""Codec 2, `packed`, in NumPy. PROTOCOL.md ("Codecs") gives the format byte by byte, and its words.

Blocks are small enough for the temporaries of one to stay in the cache. A boolean mask is turned
into positions before it is an index: several times as fast where the processor cannot foresee it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftfeed_proto.codecs.packed_plan import RANKS, Bytes, Words, exponents_of, plan_of
from draftfeed_proto.errors import MalformedChunk

BLOCK = 1 << 15
"""Values of a block."""
LOW, BASES = 1, 2
"""The flags of a layer."""
MAX_EXCEPTIONS = 2048
"""Of a block that we write."""

_TWO_BITS: Bytes = (np.arange(256)[:, None] >> (0, 2, 4, 6) & 3).astype(np.uint8)
_NIBBLES: Bytes = (np.arange(256)[:, None] >> (0, 4) & 15).astype(np.uint8)
"""The fields of a byte, [256, fields]."""
_AS_THEY_ARE = _TWO_BITS.view(np.uint32).ravel()


def encode(states: np.ndarray, out: memoryview) -> int:
    """states [rows, layers, hidden], float16 or, for bf16, uint16; hidden is contiguous.

    Returns how many bytes it wrote into `out`; 0 when the payload does not fit, or the states have
    too many exceptions.
    """
    spare = _spare(states)
    writer = _Writer(out)
    try:
        writer.room(1)[0] = spare == 0
        for layer in states.view(np.uint16).swapaxes(0, 1):
            _encode_layer(layer, spare, writer)
    except _NotPacked:
        return 0
    return writer.written


def decode(payload: memoryview, out: np.ndarray) -> None:
    """Fill out [rows, layers, hidden], float16 or, for bf16, uint16; hidden is contiguous.

    Raises MalformedChunk; `out` may then hold anything.
    """
    spare = _spare(out)
    reader = _Reader(payload)
    if reader.take(1)[0] != (spare == 0):
        raise MalformedChunk(f"packed values are not {'fp16' if spare else 'bf16'}, which was due")
    for layer in out.view(np.uint16).swapaxes(0, 1):
        _decode_layer(reader, spare, layer)
    if reader.left:
        raise MalformedChunk(f"{reader.left} bytes after a packed payload")


def _spare(states: np.ndarray) -> int:
    """Mantissa bits that do not fit into a head: the low bits of fp16, none of bf16. With them go
    the 8 - spare bits of an exponent."""
    assert states.dtype in (np.float16, np.uint16)
    return 3 if states.dtype == np.float16 else 0


# values and their parts


def _heads(words: Words, spare: int, out: Bytes) -> None:
    np.copyto(out, words >> spare, casting="unsafe")
    out += out  # an exponent's last bit gives way to the sign
    out += (words.view(np.int16) < 0).view(np.uint8)


def _join(exponents: Bytes, heads: Bytes, spare: int, words: Words) -> None:
    """Values whose low bits are 0."""
    if spare:
        np.multiply(heads, 0x8004, out=words, dtype=np.uint16)
        words &= 0x83F8
    else:
        np.multiply(heads, 0x8000, out=words, dtype=np.uint16)
        words |= heads >> 1
    words |= np.multiply(exponents, 1 << (7 + spare), dtype=np.uint16)


def _tiled(bases: Bytes) -> Bytes:
    """Bases of a block's values, from whatever channel it begins with."""
    return np.tile(bases, 2 + BLOCK // len(bases))


# reading


class _Reader:
    def __init__(self, payload: memoryview) -> None:
        self._bytes = np.frombuffer(payload, np.uint8)
        self.left = len(self._bytes)

    def take(self, size: int) -> Bytes:
        if size > self.left:
            raise MalformedChunk(f"packed payload ends {size - self.left} bytes early")
        start = len(self._bytes) - self.left
        self.left -= size
        return self._bytes[start : start + size]

    def numbers(self, count: int) -> Words:
        return self.take(2 * count).view("<u2")

    def plane(self, count: int, fields: NDArray[np.unsignedinteger]) -> Bytes:
        """fields [256]: for each byte what its fields mean, a byte each, as one number."""
        size = -(-count // fields.itemsize)
        return np.take(fields, self.take(size), mode="clip").view(np.uint8)[:count]

    def low_bits(self, count: int) -> Bytes:
        bits = self.plane(count, _AS_THEY_ARE)
        upper = np.unpackbits(self.take(-(-count // 8)), count=count, bitorder="little")
        upper <<= 2
        bits |= upper
        return bits


class _Meanings(NamedTuple):
    """Exponents that the fields of the four planes of digits stand for, before bases."""

    escape: int
    """Stands for a 3 of the digits; no exponent of the table is equal to it."""
    planes: tuple[NDArray[np.unsignedinteger], ...]

    @classmethod
    def of(cls, table: Bytes) -> "_Meanings":
        escape = min(set(range(RANKS + 1)).difference(table.tolist()))
        digits = (np.append(table[k : k + 3], np.uint8(escape))[_TWO_BITS] for k in (0, 3, 6))
        nibbles = table[9:][_NIBBLES]
        return cls(
            escape,
            (*(each.view(np.uint32).ravel() for each in digits), nibbles.view(np.uint16).ravel()),
        )


def _decode_layer(reader: _Reader, spare: int, layer: Words) -> None:
    """layer [rows, hidden]"""
    rows, hidden = layer.shape
    flags = int(reader.take(1)[0])
    if flags & ~(BASES | (LOW if spare else 0)):
        raise MalformedChunk(f"flags {flags} of a packed layer are unknown")
    meanings = _Meanings.of(reader.take(RANKS))
    bases = None
    if flags & BASES:
        nibbles = _NIBBLES[reader.take(-(-hidden // 2))]
        bases = _tiled(nibbles.reshape(-1)[:hidden])
    words = np.empty(hidden + BLOCK, np.uint16)  # a row that is not complete yet, then a block
    first = row = 0
    for start in range(0, rows * hidden, BLOCK):
        end = first + min(BLOCK, rows * hidden - start)
        of_channels = None if bases is None else bases[first:end]
        _decode_block(reader, meanings, of_channels, spare, bool(flags & LOW), words[first:end])
        whole = end // hidden
        layer[row : row + whole] = words[: whole * hidden].reshape(whole, hidden)
        row += whole
        first = end - whole * hidden
        words[:first] = words[whole * hidden : end]


def _decode_block(
    reader: _Reader, meanings: _Meanings, bases: Bytes | None, spare: int, low: bool, words: Words
) -> None:
    n = len(words)
    n1, n2, n3, x = reader.numbers(4).tolist()
    if not n >= n1 >= n2 >= n3 or x > n:
        raise MalformedChunk(f"packed block of {n} values counts {n1}, {n2}, {n3} and {x}")
    heads = reader.take(n)
    low_bits = reader.low_bits(n) if low else None
    exponents = _read_exponents(reader, meanings, (n, n1, n2, n3))
    if bases is not None:
        exponents += bases
    if spare:
        exponents &= 31
    _join(exponents, heads, spare, words)
    if low_bits is not None:
        words |= low_bits
    if x:
        positions, exceptions = reader.numbers(x), reader.numbers(x)
        if positions[-1] >= n or (positions[1:] <= positions[:-1]).any():
            raise MalformedChunk(f"positions in a packed block of {n} do not rise or go beyond it")
        words[positions] = exceptions


def _read_exponents(reader: _Reader, meanings: _Meanings, counts: Sequence[int]) -> Bytes:
    """Less the bases."""
    planes = [
        reader.plane(count, fields) for count, fields in zip(counts, meanings.planes, strict=True)
    ]
    rest = planes.pop()
    for plane in reversed(planes):
        (escapes,) = (plane == meanings.escape).nonzero()
        if len(escapes) != len(rest):
            raise MalformedChunk(f"{len(escapes)} digits of 3 in a packed plane, not {len(rest)}")
        plane[escapes] = rest
        rest = plane
    return rest


# writing


class _NotPacked(Exception):
    """The chunk is one for another codec."""


class _Writer:
    def __init__(self, out: memoryview) -> None:
        self._out = np.frombuffer(out, np.uint8)
        self.written = 0

    def room(self, size: int) -> Bytes:
        start, end = self.written, self.written + size
        if end > len(self._out):
            raise _NotPacked
        self.written = end
        return self._out[start:end]

    def write(self, data: np.ndarray) -> None:
        self.room(data.nbytes)[:] = data.view(np.uint8)

    def numbers(self, values: NDArray[np.integer] | Sequence[int]) -> None:
        self.write(np.array(values, "<u2"))

    def two_bits(self, fields: Bytes) -> None:
        """Each 0 to 3."""
        fours = _padded(fields, 4).view("<u4")
        # The product has the four fields next to each other in its highest byte.
        fours = fours * (1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)
        self.write((fours >> 24).astype(np.uint8))

    def nibbles(self, fields: Bytes) -> None:
        twos = _padded(fields, 2).view("<u2")
        self.write((twos | twos >> 4).astype(np.uint8))


_ZEROS = np.zeros(3, np.uint8)


def _padded(fields: Bytes, multiple: int) -> Bytes:
    lacking = -len(fields) % multiple
    return np.concatenate((fields, _ZEROS[:lacking])) if lacking else fields


def _encode_layer(layer: Words, spare: int, writer: _Writer) -> None:
    """layer [rows, hidden]"""
    hidden = layer.shape[1]
    plan = plan_of(layer, spare)
    writer.room(1)[0] = LOW * plan.low | BASES * (plan.bases is not None)
    writer.write(plan.table)
    if plan.bases is not None:
        writer.nibbles(plan.bases)
    bases = None if plan.bases is None else _tiled(plan.bases)
    ranks = _Ranks.of(plan.table & np.uint8(255 >> spare))
    for start in range(0, layer.size, BLOCK):
        end = min(start + BLOCK, layer.size)
        first = start % hidden
        rows = layer[start // hidden : -(-end // hidden)]
        words = rows.reshape(-1)[first : first + end - start]
        of_channels = None if bases is None else bases[first : first + end - start]
        digits = _digits(exponents_of(words, of_channels, spare), ranks)
        _encode_block(words, digits, spare, plan.low, writer)


def _encode_block(words: Words, digits: "_Digits", spare: int, low: bool, writer: _Writer) -> None:
    n = len(words)
    exceptions = digits.unranked
    if spare and not low and np.bitwise_or.reduce(words) & 7:
        exceptions = np.union1d(exceptions, np.flatnonzero(words & 7 != 0))
    if len(exceptions) > MAX_EXCEPTIONS:
        raise _NotPacked
    _, n1, n2 = map(len, digits.planes)
    writer.numbers([n1, n2, len(digits.nibbles), len(exceptions)])
    _heads(words, spare, writer.room(n))
    if low:
        bits = words.astype(np.uint8)
        bits &= 7
        writer.two_bits(bits & np.uint8(3))
        writer.write(np.packbits(bits >> 2, bitorder="little"))
    for plane in digits.planes:
        writer.two_bits(plane)
    writer.nibbles(digits.nibbles)
    if len(exceptions):
        writer.numbers(exceptions)
        writer.numbers(words[exceptions])


class _Ranks(NamedTuple):
    digits: list[tuple[int, int, int]]
    """Exponents, less bases, that the fields 0 to 2 of the three planes of digits stand for."""
    nibbles: Bytes
    """[256], the nibble of each exponent less bases; 255 where there is none."""

    @classmethod
    def of(cls, table: Bytes) -> "_Ranks":
        a, b, c, d, e, f, g, h, i, *rest = table.tolist()
        nibbles = np.full(256, 255, np.uint8)
        nibbles[rest] = np.arange(len(rest))
        return cls([(a, b, c), (d, e, f), (g, h, i)], nibbles)


class _Digits(NamedTuple):
    planes: list[Bytes]
    """First, second and third digits."""
    nibbles: Bytes
    unranked: NDArray[np.intp]
    """Positions, rising, of values without a rank: the digits give them rank 0."""


def _digits(exponents: Bytes, ranks: _Ranks) -> _Digits:
    """exponents: less the bases."""
    planes, escapes = [], []
    rest = exponents
    for three in ranks.digits:
        plane, escaped = _next_digits(rest, *three)
        planes.append(plane)
        escapes.append(escaped)
        rest = rest[escaped]
    nibbles = ranks.nibbles[rest]
    (unranked,) = (nibbles == 255).nonzero()
    if len(unranked):
        nibbles = _without(nibbles, unranked)
        for k in (2, 1):
            unranked = escapes[k][unranked]
            planes[k] = _without(planes[k], unranked)
        unranked = escapes[0][unranked]
        planes[0][unranked] = 0
    return _Digits(planes, nibbles, unranked)


def _without(fields: Bytes, places: NDArray[np.intp]) -> Bytes:
    keep = np.ones(len(fields), bool)
    keep[places] = False
    return fields[keep]


def _next_digits(exponents: Bytes, zero: int, one: int, two: int) -> tuple[Bytes, NDArray[np.intp]]:
    """0 to 2 for the three exponents, else 3; and where the 3s are."""
    digits = exponents != zero
    higher = digits & (exponents != one)
    digits &= exponents != two
    (escapes,) = (digits & higher).nonzero()
    fields, twos = digits.view(np.uint8), higher.view(np.uint8)
    fields += twos
    fields += twos
    return fields, escapes
