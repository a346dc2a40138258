"""Codec 0: the bytes as they are."""

from draftfeed_proto.errors import MalformedChunk


class Raw:
    name = "raw"
    number = 0

    def encode(self, values: memoryview) -> memoryview:
        return values

    def check(self, payload: memoryview, decoded_bytes: int) -> None:
        if payload.nbytes != decoded_bytes:
            raise MalformedChunk(f"raw payload of {payload.nbytes} bytes for {decoded_bytes}")

    def decode(self, payload: memoryview, out: memoryview) -> None:
        out[:] = payload
