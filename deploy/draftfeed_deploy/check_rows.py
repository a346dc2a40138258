"""Whether two captures of the same tokens are the same rows, and whose rows they are."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from draftfeed_producer.prompts import Prompt
from draftfeed_proto.sample import Sample

TOLERANCES = {"float32": 0.01, "bfloat16": 0.1}
"""Relative L2 of a row of one layer, by the dtype that the target computes in. One pass adds in
another order than a step a token, and after rounding to bf16 each layer goes on from there; rows
that are off by one position, or layers by one, differ by 0.18 and more."""
_BLOCK_ROWS = 256
_LARGEST = 0.01


class Place(NamedTuple):
    error: float
    """Relative L2."""
    row: int
    layer: str
    """Its name in the descriptor."""

    def __str__(self) -> str:
        error = f"{self.error:.1e}" if self.error < 0.1 else f"{self.error:.3g}"
        return f"{error} at row {self.row}, layer {self.layer}"


class Compared(NamedTuple):
    rows: int
    worst: Place
    first: Place | None
    """The first row that is further off than allowed."""


def compare(
    got: np.ndarray, want: np.ndarray, layer_names: Sequence[str], tolerance: float
) -> Compared:
    """got, want: float16 [n, L, H], n >= 1. layer_names: L of them."""
    errors = np.concatenate(list(_errors(got, want)))
    worst = errors.max(1)

    def place(row: int) -> Place:
        return Place(float(worst[row]), row, layer_names[int(errors[row].argmax())])

    beyond = np.flatnonzero(worst > tolerance)
    first = place(int(beyond[0])) if len(beyond) else None
    return Compared(len(errors), place(int(worst.argmax())), first)


def _errors(got: np.ndarray, want: np.ndarray) -> Iterator[np.ndarray]:
    """float [m, L], a block of rows at a time: long samples are gigabytes."""
    for first in range(0, len(want), _BLOCK_ROWS):
        block = slice(first, first + _BLOCK_ROWS)
        yield _relative(got[block].astype(np.float32), want[block].astype(np.float32))


def _relative(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 of each row and layer: over all channels, or without the 1% largest when that is
    more: where some are massive, nothing else would count."""
    peaks = np.abs(want).max(0)
    largest = max(1, int(_LARGEST * peaks.shape[1]))
    small = peaks < np.partition(peaks, -largest, axis=1)[:, -largest, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        everything = _norm(got - want) / _norm(want)
        the_rest = _norm((got - want) * small) / _norm(want * small)
    worse: np.ndarray = np.maximum(everything, the_rest)
    return np.where(np.isnan(worse), np.inf, worse)


def _norm(rows: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.norm(rows, axis=2))


def given(sample: Sample) -> Prompt:
    """The prompt that is captured in one pass as these very tokens."""
    return _split(sample, sample.input_ids)


def with_another_token(sample: Sample, vocab_size: int) -> tuple[Prompt, int]:
    """(the same, but for the token at a position in the middle, that position)

    No row before it may know of the change, and its own must.
    """
    position = len(sample.hidden_states) // 2
    ids = sample.input_ids.copy()
    ids[position] = (ids[position] + 1) % vocab_size
    return _split(sample, ids), position


def _split(sample: Sample, ids: np.ndarray) -> Prompt:
    p = int((sample.loss_mask == 0).sum())
    prompt = Prompt(sample.id, sample.key, ids[:p], ids[p:])
    return msgspec.structs.replace(prompt, finish_reason=sample.finish_reason)
