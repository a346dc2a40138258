"""Samples: what a trainer gets, and how one becomes a header and chunks and back."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from draftfeed_proto import chunk, wire
from draftfeed_proto.codecs import Chooser
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.errors import LimitExceeded, MalformedChunk, MalformedMessage
from draftfeed_proto.ids import SampleId
from draftfeed_proto.limits import (
    MAX_CHUNK_BYTES,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_SAMPLE_BYTES,
    MAX_SAMPLE_TOKENS,
)
from draftfeed_proto.wire import Count, Name, Scalar
from draftfeed_proto.workers import INLINE, Workers

DEFAULT_CHUNK_BYTES = 4 << 20


class LayerCounters(NamedTuple):
    """What the tap saw in one layer of one sample."""

    saturated: Count
    """Values beyond fp16's 65504, clamped to it."""
    nonfinite: Count
    inexact: Count
    """Values that fp16 cannot hold exactly, saturated ones not counted."""
    zero_rows: Count
    """Rows whose every value is zero: no real residual stream has one."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One prompt and its response. n tokens were fed forward; the last sampled one was not,
    so it is a label without a row: n+1 ids, n rows, in every engine and mode."""

    id: SampleId
    key: str
    """The user's own name for the prompt."""
    input_ids: np.ndarray
    """int32[n+1]"""
    loss_mask: np.ndarray
    """uint8[n+1], 1 on the response."""
    hidden_states: np.ndarray
    """float16[n, L, H]; uint16 bit patterns when the wire dtype is bf16. L is `Descriptor.layers`:
    where the stream has the final state, that is the last layer.

    Long samples are gigabytes, so it is only ever read a few rows at a time: whatever has `shape`,
    `dtype`, `nbytes`, a length and slices of rows that are arrays will do for an engine's sample.
    """
    counters: tuple[LayerCounters, ...]
    """L of them."""
    finish_reason: str
    sampling: dict[str, Any]

    def digest(self) -> str:
        """xxh3-128 over ids, mask and states: equal digests mean equal tensors."""
        state = xxhash.xxh3_128(np.ascontiguousarray(self.input_ids, "<i4").data)
        state.update(np.ascontiguousarray(self.loss_mask).data)
        for _, rows in row_blocks(self.hidden_states, DEFAULT_CHUNK_BYTES):
            state.update(np.ascontiguousarray(rows).view(np.uint16).data)
        return state.hexdigest()


class SampleHeader(msgspec.Struct, frozen=True, kw_only=True):
    """All of a sample but its chunks. The same on the wire and in the spool."""

    id: SampleId
    key: Name
    rows: Count
    layers: Count
    hidden: Count
    counters: tuple[LayerCounters, ...]
    finish_reason: Name
    sampling: dict[str, Scalar | list[Scalar]] = {}
    response_tokens: Count
    """Sum of the loss mask."""
    chunks: Count
    encoded_bytes: Count
    """Of all chunk frames, their headers included."""
    digest: Name = ""
    """Of the tensors before encoding; empty when the audit mode is off."""

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the tensors a consumer must have room for."""
        return decoded_bytes(self.rows, self.layers, self.hidden)

    def check(self) -> None:
        """Raises LimitExceeded or MalformedMessage when the numbers cannot be a sample's."""
        for what, value, limit in (
            ("rows of a sample", self.rows, MAX_SAMPLE_TOKENS),
            ("layers", self.layers, MAX_LAYERS),
            ("hidden size", self.hidden, MAX_HIDDEN),
            ("decoded bytes of a sample", self.decoded_bytes, MAX_SAMPLE_BYTES),
            ("chunks", self.chunks, self.rows + 1),
        ):
            if value > limit:
                raise LimitExceeded(what, value, limit)
        if min(self.rows, self.layers, self.hidden) < 1 or self.chunks < 2:
            raise MalformedMessage(
                f"sample {self.id} cannot be [{self.rows}, {self.layers}, {self.hidden}] "
                f"in {self.chunks} chunks"
            )
        if len(self.counters) != self.layers:
            raise MalformedMessage(f"{len(self.counters)} counters for {self.layers} layers")

    def check_stream(self, descriptor: Descriptor) -> None:
        """Raises MalformedMessage when it is no sample of that stream."""
        layers, hidden = descriptor.layers, descriptor.hidden_size
        if (self.layers, self.hidden) != (layers, hidden):
            raise MalformedMessage(
                f"sample {self.id} is [{self.rows}, {self.layers}, {self.hidden}] in a stream of "
                f"{layers} layers and hidden size {hidden}"
            )


def decoded_bytes(rows: int, layers: int, hidden: int) -> int:
    """States (16 bit), ids (int32) and mask (uint8) of a sample with `rows` fed tokens."""
    return 2 * rows * layers * hidden + 5 * (rows + 1)


def longest_rows(layers: int, hidden: int) -> int:
    """Rows of the longest sample that the limits allow."""
    row_bytes = 2 * layers * hidden + 5
    return min(MAX_SAMPLE_TOKENS, (MAX_SAMPLE_BYTES - 5) // row_bytes)


def row_blocks(states: np.ndarray, block_bytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) in order, of at most so many bytes but at least one row each."""
    n, layers, hidden = states.shape
    step = max(1, block_bytes // (2 * layers * hidden))
    for first in range(0, n, step):
        yield first, states[first : first + step]


def encode_chunks(
    sample: Sample, codec: Chooser, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> Iterator[bytes]:
    """The sample's frames in order: tokens first, then states by rows. Each is yours to keep;
    `Encoder` makes the same ones without new memory for each."""
    yield bytes(chunk.encode_tokens(sample.input_ids, sample.loss_mask))
    for first, rows in row_blocks(sample.hidden_states, min(chunk_bytes, MAX_CHUNK_BYTES)):
        yield bytes(chunk.encode_states(rows, first, codec))


def header_of(sample: Sample, *, chunks: int, encoded_bytes: int, audit: bool) -> SampleHeader:
    """The header that goes with the frames `encode_chunks` gave.

    Raises MalformedMessage or LimitExceeded when no consumer could take it: better than to find
    out with the sample on disk.
    """
    rows, layers, hidden = sample.hidden_states.shape
    header = SampleHeader(
        id=sample.id,
        key=sample.key,
        rows=rows,
        layers=layers,
        hidden=hidden,
        counters=sample.counters,
        finish_reason=sample.finish_reason,
        sampling=sample.sampling,
        response_tokens=int(sample.loss_mask.sum()),
        chunks=chunks,
        encoded_bytes=encoded_bytes,
        digest=sample.digest() if audit else "",
    )
    header.check()
    wire.pack(header)
    return header


class Assembler:
    """Puts a sample together from its frames, which must come in order.

    With threads a frame may still be decoded when `add` has returned. It must not change until
    `sample` or `close` has, and what is wrong with it is raised by a later `add`, or by `sample`.
    """

    def __init__(
        self,
        header: SampleHeader,
        dtype: str = "fp16",
        workers: Workers = INLINE,
        empty: Callable[[tuple[int, ...], type[Any]], np.ndarray] = np.empty,
    ) -> None:
        """Allocates the sample's tensors, the states with `empty`. Raises what `SampleHeader.check`
        raises."""
        header.check()
        self.header = header
        # A sample of one chunk gains nothing from another thread.
        self._workers = workers if header.chunks > 2 else INLINE
        self._decoding: deque[Future[chunk.ChunkHeader]] = deque()
        self._states = empty(
            (header.rows, header.layers, header.hidden),
            np.float16 if dtype == "fp16" else np.uint16,
        )
        self._tokens: tuple[np.ndarray, np.ndarray] | None = None
        self._rows = 0
        self._encoded_bytes = 0
        self.chunks = 0

    def add(self, frame: chunk.Frame | chunk.Placed) -> None:
        """A frame in a file is read by whoever decodes it.

        Raises ChunkError or LimitExceeded: the sample must be sent again; or UnknownCodec: that
        would not help. In any case this must then be closed."""
        if self._tokens is None:
            self._tokens = self._checked_tokens(frame)
        else:
            self._add_states(frame)
        self.chunks += 1
        self._encoded_bytes += len(frame)
        if (self._rows == self.header.rows) != (self.chunks == self.header.chunks):
            raise MalformedChunk(
                f"{self._rows} of {self.header.rows} rows in {self.chunks} of "
                f"{self.header.chunks} chunks"
            )

    @property
    def done(self) -> bool:
        return self._rows == self.header.rows and self.chunks == self.header.chunks

    def sample(self) -> Sample:
        """The sample. Its digest is compared when the header carries one.

        Raises what `add` raises, MalformedChunk also when the tensors are not those that the
        header speaks of.
        """
        assert self.done
        assert self._tokens is not None
        self._await_decoding(0)
        header = self.header
        if self._encoded_bytes != header.encoded_bytes:
            raise MalformedChunk(f"{self._encoded_bytes} encoded bytes, not {header.encoded_bytes}")
        sample = Sample(
            id=header.id,
            key=header.key,
            input_ids=self._tokens[0],
            loss_mask=self._tokens[1],
            hidden_states=self._states,
            counters=header.counters,
            finish_reason=header.finish_reason,
            sampling=header.sampling,
        )
        if header.digest and header.digest != sample.digest():
            raise MalformedChunk(f"sample {header.id} decodes to another digest")
        return sample

    def close(self) -> None:
        """It will not be completed. When this returns nothing is decoded any more."""
        wait(self._decoding)

    def _checked_tokens(self, frame: chunk.Frame | chunk.Placed) -> tuple[np.ndarray, np.ndarray]:
        frame = frame if isinstance(frame, chunk.Frame) else chunk.fetch(frame)
        input_ids, loss_mask = chunk.decode_tokens(frame)
        if len(input_ids) != self.header.rows + 1:
            raise MalformedChunk(f"{len(input_ids)} ids for {self.header.rows} rows")
        if int(loss_mask.sum()) != self.header.response_tokens:
            raise MalformedChunk(f"{loss_mask.sum()} of {self.header.response_tokens} masked")
        return input_ids, loss_mask

    def _add_states(self, frame: chunk.Frame | chunk.Placed) -> None:
        head = chunk.read_head(frame)
        header = chunk.read_header(head)
        if header.first_row != self._rows:
            raise MalformedChunk(f"rows from {header.first_row} where {self._rows} was due")
        if isinstance(frame, chunk.Frame):
            decoding = self._workers.submit(chunk.decode_states, frame, self._states)
        else:
            decoding = self._workers.submit(chunk.decode_placed, head, frame, self._states)
        self._decoding.append(decoding)
        self._await_decoding(self._workers.ahead)
        self._rows += header.rows

    def _await_decoding(self, left: int) -> None:
        """Until so many are under way at most."""
        while len(self._decoding) > left:
            self._decoding[0].result()  # what interrupts this leaves it for `close`
            self._decoding.popleft()
