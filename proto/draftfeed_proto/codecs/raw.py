"""Codec 0: the values as they are, one layer after the other."""

import numpy as np

from draftfeed_proto.errors import MalformedChunk


class Raw:
    name = "raw"
    number = 0

    def encode(self, states: np.ndarray, out: memoryview) -> int:
        if states.nbytes > out.nbytes:
            return 0
        _by_layer(out[: states.nbytes], states)[:] = states
        return states.nbytes

    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        if payload.nbytes != out.nbytes:
            raise MalformedChunk(f"raw payload of {payload.nbytes} bytes for {out.nbytes}")
        out[:] = _by_layer(payload, out)


def _by_layer(data: memoryview, states: np.ndarray) -> np.ndarray:
    """Bytes that hold the values layer after layer, as an array like `states`."""
    rows, layers, hidden = states.shape
    values = np.frombuffer(data, states.dtype).reshape(layers, rows, hidden)
    return values.transpose(1, 0, 2)
