"""Chunk frames as PROTOCOL.md lays them out, forged without draftfeed_proto."""

import struct

import xxhash

FIELDS = struct.Struct("<4sBBHIIHHIII")
CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = FIELDS.size + CHECKSUM.size
NAMES = (
    *("magic", "kind", "codec", "flags", "first_row", "rows", "layers", "reserved", "hidden"),
    *("decoded_bytes", "encoded_bytes"),
)


def seal(fields: bytes, payload: bytes) -> bytes:
    """A frame whose checksum holds."""
    return fields + CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields + payload)) + payload


def forge(frame: bytes, *, payload: bytes | None = None, **lies: int | bytes) -> bytes:
    """The frame with other header fields, or another payload and its length, under a checksum
    that holds."""
    fields = dict(zip(NAMES, FIELDS.unpack_from(frame), strict=True))
    if payload is None:
        payload = frame[HEADER_BYTES:]
    else:
        fields["encoded_bytes"] = len(payload)
    return seal(FIELDS.pack(*(fields | lies).values()), payload)
