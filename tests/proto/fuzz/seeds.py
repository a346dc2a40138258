"""Where the search begins: recipes of all kinds, as target.c reads them, and whole payloads."""

import itertools
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from draftfeed_proto.codecs import packed_numpy

PAYLOAD, STATES, EDITS = range(3)
"""What follows a recipe."""
BF16, EXACT, SEVERAL_BLOCKS = 4, 8, 192
SMALL, VECTORS, ODD, GREATEST = 0, 16, 32, 48
"""What `hidden` means: itself, 64 times as much, 37 times, or about as much as there may be."""


def write_seeds(folder: Path) -> None:
    seeds = itertools.chain(_states(), _edits(random.Random(0)), _payloads())
    for number, seed in enumerate(seeds):
        folder.joinpath(f"seed-{number:04}").write_bytes(seed)


def _recipe(
    what: int, layout: int, rows: int, layers: int, hidden: int, odds: bytes, cut: int = 0xFFFF
) -> bytes:
    """`struct recipe` of target.c; odds: spread, outliers, inexact."""
    return struct.pack("<BBBBB3s4sH", what, layout, rows, layers, hidden, odds, b"seed", cut)


SIZES = (
    (SMALL, 25, 50),
    (SMALL, 126, 65),  # a tile of 4,096 values ends one value after a row
    (SMALL, 34, 241),  # and one before it
    (VECTORS, 30, 3),
    (ODD, 2, 200),
    (SMALL | SEVERAL_BLOCKS, 255, 140),
)
ODDS = ((100, 0, 0), (200, 20, 60), (120, 10, 5), (240, 0, 255), (0, 3, 1))
EXACT_COUNT = 248
"""From here on `outliers` asks for 2,044 exceptions a block, 2,045, and so on."""


def _states() -> Iterator[bytes]:
    """All ranks or few, exceptions, low bits, large and odd shapes."""
    literal = bytes(range(0, 250, 5))
    for number, (size, odds) in enumerate(itertools.product(SIZES, ODDS)):
        layout, layers = number % 4 | number << 2, 1 + number % 3
        for flags in (0, BF16, EXACT, EXACT | BF16):
            what = STATES | size[0] | flags
            cut = (0xFFFF, 0x8000, 60, 80)[number % 4]
            yield _recipe(what, layout, size[1], layers, size[2], bytes(odds), cut) + literal
    for hidden in range(3):
        yield _recipe(STATES | GREATEST, 0, 1, 1, hidden, bytes(ODDS[0]))
    for flags, outliers in itertools.product((0, BF16), range(EXACT_COUNT, 256)):
        what = STATES | SMALL | SEVERAL_BLOCKS | flags
        yield _recipe(what, 0, 255, 1, 140, bytes((0, outliers, 0)))


DAMAGED = (  # size, layers, odds
    (SIZES[0], 2, (0, 3, 1)),
    (SIZES[1], 1, (0, 1, 0)),
    (SIZES[3], 1, (200, 20, 60)),
    (SIZES[5], 2, (0, 1, 0)),
)


def _edits(rng: random.Random) -> Iterator[bytes]:
    """Each kind of damage, to the first block and to the second."""
    for (size, layers, odds), flags, kind, block in itertools.product(
        DAMAGED, (0, BF16, EXACT, EXACT | BF16), range(8), range(2)
    ):
        recipe = _recipe(EDITS | size[0] | flags, 0, size[1], layers, size[2], bytes(odds))
        for _ in range(2):
            yield recipe + bytes((kind | block << 3,)) + rng.randbytes(3)


def _payloads() -> Iterator[bytes]:
    """Small enough for libFuzzer to change them byte by byte; the smallest cut off everywhere."""
    rng = np.random.default_rng(0)
    for rows, layers, hidden in ((1, 2, 3), (25, 1, 2), (3, 2, 7), (25, 1, 33), (2, 1, 64)):
        for flags in (0, BF16, EXACT, EXACT | BF16):
            values = rng.standard_normal((rows, layers, hidden), np.float32)
            states = values.astype(np.float16)
            if flags & BF16:
                states = (values.view(np.uint32) >> 16).astype(np.uint16)
            states[0, 0, -1] = 0
            room = np.empty(states.nbytes * 2 + 100 * layers, np.uint8)
            payload = room[: packed_numpy.encode(states, room.data)].tobytes()
            assert payload, "states that cannot be packed are no seed"
            recipe = _recipe(PAYLOAD | SMALL | flags, 2, rows, layers, hidden, bytes(3))
            for size in range(len(payload) if rows * layers * hidden <= 50 else 0):
                yield recipe + payload[:size]
            yield recipe + payload
