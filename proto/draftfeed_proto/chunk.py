"""Chunks: the unit that is checksummed, stored and sent. A spool stores a frame as it is sent.

A frame is a 40-byte header and the codec's payload; PROTOCOL.md ("Chunks") gives it byte by byte.
"""

import struct
import threading
from enum import IntEnum
from typing import Protocol

import msgspec
import numpy as np
import xxhash

from draftfeed_proto import codecs
from draftfeed_proto.errors import ChecksumMismatch, LimitExceeded, MalformedChunk
from draftfeed_proto.limits import (
    MAX_CHUNK_BYTES,
    MAX_FRAME_BYTES,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_SAMPLE_TOKENS,
)

MAGIC = b"DFC1"
_FIELDS = struct.Struct("<4sBBHIIHHIII")  # up to the checksum
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

Frame = bytes | bytearray | memoryview
PIECE_BYTES = 256 << 10
"""Read at a time from a file: its checksum is taken while it is in the processor's cache."""


class Apart:
    """A frame whose payload lies where the sample has it, and its header elsewhere."""

    def __init__(self, header: Frame, payload: memoryview) -> None:
        self.parts = (header, payload)

    def __len__(self) -> int:
        return sum(map(len, self.parts))


class Placed(Protocol):
    """A frame in a file that may be read."""

    def __len__(self) -> int: ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the frame's bytes from offset on. Raises MalformedChunk when they
        are not there."""
        ...


class ChunkKind(IntEnum):
    TOKENS = 0
    """int32 input_ids[n+1], then uint8 loss_mask[n+1]."""
    STATES = 1
    """16-bit states [layers, rows, hidden] of rows first_row .. first_row+rows."""


class ChunkHeader(msgspec.Struct, frozen=True):
    kind: ChunkKind
    codec: int
    first_row: int
    rows: int
    layers: int
    hidden: int
    decoded_bytes: int
    encoded_bytes: int
    checksum: int


def read_header(frame: Frame) -> ChunkHeader:
    """Header of a frame, or of its first HEADER_BYTES, with every length checked.

    Raises MalformedChunk or LimitExceeded. The checksum is not checked here.
    """
    if len(frame) < HEADER_BYTES:
        raise MalformedChunk(f"{len(frame)} bytes are too few for a header of {HEADER_BYTES}")
    fields = _FIELDS.unpack_from(frame)
    magic, kind, codec, reserved, first_row, rows, layers, reserved2, hidden, decoded, encoded = (
        fields
    )
    if magic != MAGIC:
        raise MalformedChunk(f"it begins with {magic!r}, not {MAGIC!r}")
    if kind not in ChunkKind._value2member_map_ or reserved or reserved2:
        raise MalformedChunk(f"kind {kind} with flags {reserved}, {reserved2} is unknown")
    (checksum,) = _CHECKSUM.unpack_from(frame, _FIELDS.size)
    header = ChunkHeader(
        ChunkKind(kind), codec, first_row, rows, layers, hidden, decoded, encoded, checksum
    )
    _check_limits(header)
    return header


def verify(frame: Frame) -> ChunkHeader:
    """Header of a whole frame whose checksum holds. Raises ChunkError or LimitExceeded."""
    header = read_header(frame)
    view = memoryview(frame)
    if view.nbytes != HEADER_BYTES + header.encoded_bytes:
        raise MalformedChunk(
            f"frame of {view.nbytes} bytes, its header says {HEADER_BYTES + header.encoded_bytes}"
        )
    actual = _checksum(view[: _FIELDS.size], view[HEADER_BYTES:])
    if actual != header.checksum:
        raise ChecksumMismatch(header.checksum, actual)
    return header


def encode_tokens(input_ids: np.ndarray, loss_mask: np.ndarray) -> memoryview:
    """input_ids int32[n+1], loss_mask uint8[n+1] -> one TOKENS frame."""
    assert input_ids.dtype == np.int32
    assert loss_mask.dtype == np.uint8
    assert input_ids.shape == loss_mask.shape
    values = input_ids.astype("<i4").tobytes() + loss_mask.tobytes()
    frame = memoryview(bytearray(HEADER_BYTES) + values)
    fields = (ChunkKind.TOKENS, codecs.RAW.number, 0, 0, len(input_ids), 0, 0, 0)
    return _sealed(frame, *fields, len(values), len(values))


def encode_states(
    states: np.ndarray, first_row: int, codec: codecs.Chooser, buffer: memoryview | None = None
) -> memoryview:
    """states float16 or, for bf16, uint16 [rows, layers, hidden], any strides -> one STATES frame.

    buffer: of the caller's, at least `frame_bytes(states.nbytes)`; the frame lies at its beginning.
    """
    assert states.dtype in (np.float16, np.uint16), states.dtype
    if states.strides[2] != 2:
        states = np.ascontiguousarray(states)
    if buffer is None:
        buffer = memoryview(bytearray(frame_bytes(states.nbytes)))
    rows, layers, hidden = states.shape
    number, payload_bytes = codec.encode(states, buffer[HEADER_BYTES:])
    fields = (ChunkKind.STATES, number, 0, first_row, rows, layers, 0, hidden)
    return _sealed(buffer, *fields, states.nbytes, payload_bytes)


def lay_rows(states: np.ndarray, first_row: int) -> Apart:
    """states float16 or uint16 [rows, layers, hidden] -> one STATES frame of codec `rows`.

    Where they are contiguous they are not copied: they must not change while the frame is used.
    """
    states = np.ascontiguousarray(states)
    payload = states.reshape(-1).view(np.uint8).data
    size = states.nbytes
    header = bytearray(HEADER_BYTES)
    shape = (first_row, *states.shape[:2], 0, states.shape[2])
    fields = (ChunkKind.STATES, codecs.ROWS.number, 0, *shape, size, size)
    _FIELDS.pack_into(header, 0, MAGIC, *fields)
    _CHECKSUM.pack_into(header, _FIELDS.size, _checksum(header[: _FIELDS.size], payload))
    return Apart(header, payload)


def frame_bytes(decoded_bytes: int) -> int:
    """Of the largest frame that decodes to so many bytes."""
    return HEADER_BYTES + decoded_bytes


def decode_states(frame: Frame, out: np.ndarray) -> ChunkHeader:
    """Write the rows of a STATES frame into out 16-bit [n, layers, hidden], hidden contiguous.

    Raises ChunkError, UnknownCodec or LimitExceeded. Nothing but those rows is written, and what
    they hold is good only when nothing is raised.
    """
    header = verify(frame)
    rows = _rows_of(header, out)
    codecs.by_number(header.codec).decode(memoryview(frame)[HEADER_BYTES:], rows)
    return header


def read_head(frame: Frame | Placed) -> bytes:
    """Its first HEADER_BYTES. Raises MalformedChunk when there are fewer."""
    if isinstance(frame, Frame):
        return bytes(memoryview(frame)[:HEADER_BYTES])
    head = bytearray(HEADER_BYTES)
    frame.read(0, memoryview(head))
    return bytes(head)


def fetch(frame: Placed, buffer: bytearray | None = None) -> memoryview:
    """All of it, at the beginning of the buffer, or of a new one when that is too small. Raises
    LimitExceeded or MalformedChunk."""
    if len(frame) > MAX_FRAME_BYTES:
        raise LimitExceeded("bytes of a chunk", len(frame), MAX_FRAME_BYTES)
    if buffer is None or len(buffer) < len(frame):
        buffer = bytearray(len(frame))
    whole = memoryview(buffer)[: len(frame)]
    frame.read(0, whole)
    return whole


def decode_placed(head: bytes, frame: Placed, out: np.ndarray) -> ChunkHeader:
    """`decode_states` of a frame in a file. head: what `read_head` gave, and was gone by."""
    header = read_header(head)
    if header.codec == codecs.ROWS.number:
        _read_rows(head, header, frame, _rows_of(header, out))
        return header
    # It never grows: the error of a chunk that was refused may still have a view of it.
    whole = fetch(frame, getattr(_own, "buffer", None))
    _own.buffer = whole.obj
    if whole[:HEADER_BYTES] != head:
        raise MalformedChunk("its header has changed")
    return decode_states(whole, out)


_own = threading.local()
"""Of each thread that decodes: memory that a frame is read into."""


def _read_rows(head: bytes, header: ChunkHeader, frame: Placed, rows: np.ndarray) -> None:
    """Straight to where they belong, and the checksum on the way."""
    size = header.encoded_bytes
    if size != rows.nbytes or len(frame) != HEADER_BYTES + size:
        raise MalformedChunk(f"rows of {size} bytes for {rows.nbytes}, in {len(frame)}")
    assert rows.flags.c_contiguous
    values = rows.reshape(-1).view(np.uint8).data
    digest = xxhash.xxh3_64(head[: _FIELDS.size])
    for at in range(0, size, PIECE_BYTES):
        piece = values[at : at + PIECE_BYTES]
        frame.read(HEADER_BYTES + at, piece)
        digest.update(piece)
    if digest.intdigest() != header.checksum:
        raise ChecksumMismatch(header.checksum, digest.intdigest())


def _rows_of(header: ChunkHeader, out: np.ndarray) -> np.ndarray:
    """Those of `out` that the chunk is for. Raises MalformedChunk."""
    n, layers, hidden = out.shape
    if (header.kind, header.layers, header.hidden) != (ChunkKind.STATES, layers, hidden):
        raise MalformedChunk(
            f"{header.kind.name} [{header.layers}, {header.hidden}] for [{layers}, {hidden}]"
        )
    if header.first_row + header.rows > n:
        raise MalformedChunk(f"rows {header.first_row}+{header.rows} in a sample of {n}")
    return out[header.first_row : header.first_row + header.rows]


def decode_tokens(frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """input_ids int32[n+1] and loss_mask uint8[n+1] of a TOKENS frame, writable.

    Raises ChunkError or LimitExceeded: MalformedChunk also for a negative id or a mask beyond 0
    and 1.
    """
    header, values = decode_chunk(frame)
    if header.kind is not ChunkKind.TOKENS:
        raise MalformedChunk(f"{header.kind.name} where the tokens were due")
    edge = 4 * header.rows
    input_ids = np.frombuffer(values[:edge], "<i4").astype(np.int32)
    loss_mask = np.frombuffer(values[edge:], np.uint8).copy()
    if input_ids.min() < 0 or loss_mask.max() > 1:
        raise MalformedChunk(f"token id {input_ids.min()}, mask value {loss_mask.max()}")
    return input_ids, loss_mask


def decode_chunk(
    frame: Frame, dtype: type[np.float16 | np.uint16] = np.float16
) -> tuple[ChunkHeader, memoryview]:
    """A frame of either kind by itself: its header, and its decoded bytes as PROTOCOL.md lays them
    out. dtype: of states. Raises ChunkError, UnknownCodec or LimitExceeded."""
    header = verify(frame)
    payload = memoryview(frame)[HEADER_BYTES:]
    if header.kind is ChunkKind.TOKENS:
        if (header.codec, header.encoded_bytes) != (codecs.RAW.number, header.decoded_bytes):
            raise MalformedChunk(f"tokens in {header.encoded_bytes} bytes of codec {header.codec}")
        return header, payload
    values = np.empty((header.layers, header.rows, header.hidden), dtype)
    codecs.by_number(header.codec).decode(payload, values.transpose(1, 0, 2))
    return header, values.view(np.uint8).reshape(-1).data


def _sealed(frame: memoryview, *fields: int) -> memoryview:
    """The payload is in its place: put the header before it."""
    _FIELDS.pack_into(frame, 0, MAGIC, *fields)
    whole = frame[: HEADER_BYTES + fields[-1]]
    _CHECKSUM.pack_into(frame, _FIELDS.size, _checksum(whole[: _FIELDS.size], whole[HEADER_BYTES:]))
    return whole


def _checksum(fields: Frame, payload: Frame) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(payload)
    return digest.intdigest()


def _check_limits(header: ChunkHeader) -> None:
    for what, value, limit in (
        ("decoded bytes of a chunk", header.decoded_bytes, MAX_CHUNK_BYTES),
        ("encoded bytes of a chunk", header.encoded_bytes, MAX_CHUNK_BYTES),
        ("layers", header.layers, MAX_LAYERS),
        ("hidden size", header.hidden, MAX_HIDDEN),
        ("rows", header.first_row + header.rows, MAX_SAMPLE_TOKENS + 1),
    ):
        if value > limit:
            raise LimitExceeded(what, value, limit)
    row_bytes = _row_bytes(header)
    if 0 in (header.rows, row_bytes) or header.decoded_bytes != header.rows * row_bytes:
        raise MalformedChunk(f"{header.rows} rows cannot decode to {header.decoded_bytes} bytes")
    if header.encoded_bytes > header.decoded_bytes:
        raise MalformedChunk(f"{header.encoded_bytes} bytes to hold {header.decoded_bytes}")


def _row_bytes(header: ChunkHeader) -> int:
    if header.kind is ChunkKind.STATES:
        return 2 * header.layers * header.hidden
    if header.first_row or header.layers or header.hidden:
        raise MalformedChunk("tokens with a first row, layers or a hidden size")
    return 5
