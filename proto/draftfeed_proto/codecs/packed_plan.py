"""What our encoders of codec 2, `packed`, choose for a layer. Another may choose as it likes;
PROTOCOL.md says how ours do, so that all of them write the same bytes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]

RANKS = 25
SAMPLED_ROWS = 32
MIN_ROWS_FOR_BASES = 24
COUNTED_CHANNELS = 64
WINDOW = 32
"""Exponents of which the most frequent get a rank."""


class Plan(NamedTuple):
    """How a layer is coded: a flag and the fields of the format."""

    low: bool
    bases: Bytes | None
    table: Bytes


def plan_of(layer: Words, spare: int) -> Plan:
    """layer [rows, hidden]; spare: mantissa bits that a head leaves out, 3 of fp16, 0 of bf16."""
    rows, hidden = layer.shape
    sampled = min(rows, SAMPLED_ROWS)
    sample = layer[np.arange(sampled) * rows // sampled]
    exponents = exponents_of(sample, None, spare)
    centres = _centres(exponents, 8 - spare)
    # Element hidden // 2 of the centres in rising order.
    mid = int(np.searchsorted(np.cumsum(np.bincount(centres)), hidden // 2, side="right"))
    modulus = 256 >> spare
    if rows >= MIN_ROWS_FOR_BASES:
        bases = np.clip(centres.astype(int) - (mid - 8), 0, 15).astype(np.uint8)
        begin = (mid - 28) % modulus
    else:
        bases, begin = None, (mid - 20) % modulus
    counted = slice(None, None, max(1, hidden // COUNTED_CHANNELS))
    places = exponents[:, counted].astype(int) - begin
    if bases is not None:
        places -= bases[counted]
    counts = np.bincount((places % modulus).ravel(), minlength=WINDOW)[:WINDOW]
    frequent = np.argsort(-counts, kind="stable")[:RANKS]
    with_low = np.count_nonzero(sample[:, counted] & ((1 << spare) - 1))
    return Plan(
        low=bool(10 * with_low > places.size),
        bases=bases,
        table=((begin + frequent) % 256).astype(np.uint8),
    )


def _centres(exponents: Bytes, bits: int) -> Bytes:
    """[rows, hidden] -> [hidden], element rows // 2 of each column in rising order.

    Found bit by bit, the highest first: sorting many short columns takes several times as long.
    """
    rows, hidden = exponents.shape
    centres = np.zeros(hidden, np.uint8)
    for bit in reversed(range(bits)):
        least = centres + np.uint8(1 << bit)
        below = (exponents < least).view(np.uint8).sum(axis=0, dtype=np.uint8)
        centres += (below <= rows // 2).view(np.uint8) << bit
    return centres


def exponents_of(words: Words, bases: Bytes | None, spare: int) -> Bytes:
    """Less the bases."""
    exponents: Bytes = (words >> (7 + spare)).astype(np.uint8)
    if bases is not None:
        exponents -= bases
    if spare:
        exponents &= 31
    return exponents
