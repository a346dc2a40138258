"""The way out: samples as frames, in memory that is used again."""

import mmap
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, wait

import numpy as np

from draftfeed_proto import chunk
from draftfeed_proto.codecs import Chooser
from draftfeed_proto.limits import MAX_CHUNK_BYTES
from draftfeed_proto.sample import DEFAULT_CHUNK_BYTES, Sample, row_blocks
from draftfeed_proto.slabs import Slabs
from draftfeed_proto.workers import INLINE, Workers


class Encoder:
    """Encodes one sample after the other, a few chunks ahead of whoever takes them.

    A frame's memory is used again when nobody refers to it any more.
    """

    def __init__(
        self,
        codec: Chooser,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        threads: int = 1,
        kept_bytes: int = 0,
    ) -> None:
        """kept_bytes: of frames that are referred to beside those that are made and read."""
        self._codec = codec
        self._chunk_bytes = min(chunk_bytes, MAX_CHUNK_BYTES)
        self._workers = Workers(threads)
        frame_bytes = chunk.frame_bytes(self._chunk_bytes) + mmap.PAGESIZE
        self._slabs = Slabs(kept_bytes + (2 + self._workers.ahead) * frame_bytes)
        self._busy = False

    def frames(
        self, sample: Sample, *, as_rows: bool = False
    ) -> Generator[memoryview | chunk.Apart, None, None]:
        """The sample's frames in order: tokens first, then states by rows. Each is the caller's
        to keep.

        as_rows: in the codec `rows`, and not in the one that was chosen; these are the sample's
        own memory.

        Read them all or close the iterator: only then may the states change, and another sample's
        frames be asked for.
        """
        assert not self._busy, "the frames of another sample are being read"
        self._busy = True
        pending: deque[Future[memoryview]] = deque()
        try:
            yield chunk.encode_tokens(sample.input_ids, sample.loss_mask)
            if as_rows:
                # As long as may be: they take no memory, and each costs both ends a message.
                for first, rows in row_blocks(sample.hidden_states, MAX_CHUNK_BYTES):
                    yield chunk.lay_rows(rows, first)
            else:
                yield from self._states(sample, pending)
        finally:
            wait(pending)
            self._busy = False

    def close(self) -> None:
        self._workers.close()

    def _states(self, sample: Sample, pending: "deque[Future[memoryview]]") -> Iterator[memoryview]:
        states = sample.hidden_states
        # A sample of one chunk gains nothing from another thread.
        workers = self._workers if states.nbytes > self._chunk_bytes else INLINE
        for first, rows in row_blocks(states, self._chunk_bytes):
            buffer = self._slabs.empty((chunk.frame_bytes(rows.nbytes),), np.uint8)
            work = (rows, first, self._codec, buffer.data)
            pending.append(workers.submit(chunk.encode_states, *work))
            if len(pending) > workers.ahead:
                yield _next(pending)
        while pending:
            yield _next(pending)


def _next(pending: "deque[Future[memoryview]]") -> memoryview:
    frame = pending[0].result()  # what interrupts this leaves it to be waited for
    pending.popleft()
    return frame
