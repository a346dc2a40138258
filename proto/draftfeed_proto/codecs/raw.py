"""Codec 0: the bytes as they are."""

from draftfeed_proto.errors import MalformedChunk


class Raw:
    name = "raw"
    number = 0

    def encode(self, values: memoryview) -> memoryview:
        return values

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if payload.nbytes != out.nbytes:
            raise MalformedChunk(f"raw payload of {payload.nbytes} bytes for {out.nbytes}")
        out[:] = payload
