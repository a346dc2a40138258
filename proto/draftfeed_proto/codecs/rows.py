"""Codec 3: the values as they are, one row after the other, as a sample has them in memory."""

import numpy as np

from draftfeed_proto.errors import MalformedChunk


class Rows:
    name = "rows"
    number = 3

    def encode(self, states: np.ndarray, out: memoryview) -> int:
        if states.nbytes > out.nbytes:
            return 0
        _like(out[: states.nbytes], states)[:] = states
        return states.nbytes

    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        if payload.nbytes != out.nbytes:
            raise MalformedChunk(f"rows of {payload.nbytes} bytes for {out.nbytes}")
        out[:] = _like(payload, out)


def _like(data: memoryview, states: np.ndarray) -> np.ndarray:
    return np.frombuffer(data, states.dtype).reshape(states.shape)
