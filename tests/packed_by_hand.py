"""The codec `packed` as PROTOCOL.md lays it out, read value by value without draftfeed_proto."""

import struct

BLOCK = 32_768


class Refused(Exception):
    """What a reader of this payload must refuse."""


def unpack(payload: bytes, rows: int, layers: int, hidden: int, *, bf16: bool) -> list[int]:
    """The decoded 16-bit words, [layers][rows][hidden]."""
    reader = Reader(payload)
    refuse(reader.take(1)[0] != bf16)
    words = []
    for _ in range(layers):
        words += _layer(reader, rows * hidden, hidden, bf16)
    refuse(reader.left > 0)
    return words


def refuse(wrong: bool) -> None:
    if wrong:
        raise Refused


class Reader:
    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0

    @property
    def left(self) -> int:
        return len(self._payload) - self._at

    def take(self, size: int) -> bytes:
        refuse(size > self.left)
        self._at += size
        return self._payload[self._at - size : self._at]

    def numbers(self, count: int) -> list[int]:
        return list(struct.unpack(f"<{count}H", self.take(2 * count)))

    def plane(self, count: int, bits: int) -> list[int]:
        each = 8 // bits
        data = self.take(-(-count // each))
        return [data[i // each] >> bits * (i % each) & ((1 << bits) - 1) for i in range(count)]


def _layer(reader: Reader, count: int, hidden: int, bf16: bool) -> list[int]:
    flags = reader.take(1)[0]
    refuse(flags > 3 or (bf16 and flags & 1 == 1))
    table = reader.take(25)
    bases = reader.plane(hidden, 4) if flags & 2 else [0] * hidden
    words = []
    for start in range(0, count, BLOCK):
        n = min(BLOCK, count - start)
        words += _block(reader, table, [bases[(start + i) % hidden] for i in range(n)], flags, bf16)
    return words


def _block(reader: Reader, table: bytes, bases: list[int], flags: int, bf16: bool) -> list[int]:
    n = len(bases)
    n1, n2, n3, x = reader.numbers(4)
    refuse(n1 > n or n2 > n1 or n3 > n2 or x > n)
    heads = reader.take(n)
    lower = reader.plane(n, 2) if flags & 1 else [0] * n
    upper = reader.plane(n, 1) if flags & 1 else [0] * n
    first, second, third = (reader.plane(count, 2) for count in (n, n1, n2))
    ranks = _ranks(first, second, third, reader.plane(n3, 4))
    words = []
    for rank, base, head, two, one in zip(ranks, bases, heads, lower, upper, strict=True):
        sign, mantissa = head & 1, head >> 1
        if bf16:
            words.append(sign << 15 | (table[rank] + base) % 256 << 7 | mantissa)
        else:
            words.append(
                sign << 15 | (table[rank] + base) % 32 << 10 | mantissa << 3 | one << 2 | two
            )
    positions, exceptions = reader.numbers(x), reader.numbers(x)
    refuse(positions != sorted(set(positions)) or any(position >= n for position in positions))
    for position, word in zip(positions, exceptions, strict=True):
        words[position] = word
    return words


def _ranks(first: list[int], second: list[int], third: list[int], nibbles: list[int]) -> list[int]:
    for plane, following in ((first, second), (second, third), (third, nibbles)):
        refuse(plane.count(3) != len(following))
    later = iter(nibbles)
    thirds = iter([6 + digit if digit < 3 else 9 + next(later) for digit in third])
    seconds = iter([3 + digit if digit < 3 else next(thirds) for digit in second])
    return [digit if digit < 3 else next(seconds) for digit in first]
