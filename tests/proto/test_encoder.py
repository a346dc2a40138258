"""Frames out of reused memory, and samples put together, with and without threads."""

import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import closing

import msgspec
import numpy as np
import pytest

from draftfeed_proto import chunk, codecs
from draftfeed_proto.encoder import Encoder
from draftfeed_proto.errors import ChecksumMismatch, MalformedChunk
from draftfeed_proto.sample import Assembler, Sample, SampleHeader, encode_chunks, header_of
from draftfeed_proto.workers import Workers
from samples import HIDDEN, LAYERS, sample

ROW_BYTES = 2 * LAYERS * HIDDEN
CHUNK_BYTES = 8 * ROW_BYTES
every_number_of_threads = pytest.mark.parametrize("threads", [1, 2, 5])


def encoder_of(threads: int, codec: str = "packed", chunk_bytes: int = CHUNK_BYTES) -> Encoder:
    return Encoder(codecs.by_name(codec), chunk_bytes, threads)


def expected(original: Sample, codec: str = "packed") -> list[bytes]:
    return list(encode_chunks(original, codecs.by_name(codec), CHUNK_BYTES))


@pytest.fixture(params=[1, 2, 5])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(request.param)
    yield made
    made.close()


def packed(frame: memoryview | chunk.Apart) -> bytes:
    """Encoded, and not laid out in rows."""
    assert isinstance(frame, memoryview)
    return bytes(frame)


# out


@every_number_of_threads
@pytest.mark.parametrize("codec", codecs.names())
def test_frames_come_in_order_and_are_the_same_with_any_number_of_threads(
    threads: int, codec: str
) -> None:
    with closing(encoder_of(threads, codec)) as encoder:
        for rows in (1, 8, 9, 200, 30, 64):
            original = sample(rows, rows)
            assert list(map(packed, encoder.frames(original))) == expected(original, codec)


@every_number_of_threads
def test_a_frame_is_what_it_was_until_the_next_is_asked_for(threads: int) -> None:
    """Whoever writes it to a disk may be slow, and the threads have long gone on."""
    original = sample(0, 400)
    with closing(encoder_of(threads)) as encoder:
        for frame, right in zip(encoder.frames(original), expected(original), strict=True):
            let_finish(encoder._workers, threads)
            assert frame == right
            chunk.verify(packed(frame))


def let_finish(workers: Workers, threads: int) -> None:
    """All that was submitted: no thread has anything left when each of them is at the barrier."""
    barrier = threading.Barrier(threads)
    for future in [workers.submit(barrier.wait) for _ in range(threads)]:
        future.result()


@every_number_of_threads
def test_memory_is_taken_once_and_not_for_each_chunk(threads: int) -> None:
    original = msgspec.structs.replace(
        sample(0, 8), hidden_states=np.zeros((40_000, LAYERS, HIDDEN), np.float16)
    )
    with closing(encoder_of(threads, "raw", 1 << 18)) as encoder:
        for _ in encoder.frames(original):
            pass
        tracemalloc.start()
        for _ in encoder.frames(original):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 200_000, f"{peak:,} bytes for chunks of 262,144"


@every_number_of_threads
def test_few_chunks_are_encoded_ahead_of_the_one_that_is_read(threads: int) -> None:
    """A sample of 32K tokens is not to be encoded whole while the disk takes its first chunk."""
    original = sample(0, 8)
    states = Watched(np.zeros((400, LAYERS, HIDDEN), np.float16))
    watched = msgspec.structs.replace(original, hidden_states=states)
    with closing(encoder_of(threads)) as encoder:
        for read, _ in enumerate(encoder.frames(watched)):
            assert states.taken <= read + (threads if threads > 1 else 0)


def test_closing_waits_for_what_is_under_way() -> None:
    """The disk was full in mid-sample: the engine gets its states back, and may overwrite them,
    only when no thread reads them any more."""
    slow = Slow()
    encoder = Encoder(slow, CHUNK_BYTES, 2)  # type: ignore[arg-type]
    frames = encoder.frames(sample(0, 64))
    next(frames)
    asking = threading.Thread(target=next, args=(frames,))
    asking.start()
    assert slow.begun.wait(30)
    slow.first.set()
    asking.join(30)  # it has the first frame of states; the next is being encoded
    closed = threading.Event()

    def close() -> None:
        frames.close()
        closed.set()

    closing_thread = threading.Thread(target=close)
    closing_thread.start()
    assert not closed.wait(0.2)
    slow.others.set()
    assert closed.wait(30)
    assert slow.running == 0
    closing_thread.join()
    encoder.close()


class Slow:
    """A chooser: the first chunk is held up by one event, all others by another."""

    def __init__(self) -> None:
        self.begun, self.first, self.others = (threading.Event() for _ in range(3))
        self.running, self._calls, self._lock = 0, 0, threading.Lock()

    def encode(self, states: np.ndarray, out: memoryview) -> tuple[int, int]:
        with self._lock:
            self.running += 1
            self._calls += 1
            gate = self.first if self._calls == 1 else self.others
        self.begun.set()
        assert gate.wait(30)
        with self._lock:
            self.running -= 1
        return codecs.by_name("raw").encode(states, out)


def test_threads_that_the_system_refuses_are_an_error_at_once() -> None:
    """An executor that is refused a thread at some later chunk has queued the work nevertheless:
    done by its caller too, it was done twice, the second time into memory of another frame."""
    before = threading.stack_size(1 << 45)  # more than any system gives
    try:
        with pytest.raises(RuntimeError, match="thread"):
            Workers(3)
    finally:
        threading.stack_size(before)
    workers = Workers(3)
    names = {thread.name for thread in threading.enumerate()}
    assert {"codec_0", "codec_1", "codec_2"} <= names, "all are there before there is work"
    workers.close()


class Watched:
    """States that are made as they are read, as an engine may have them."""

    def __init__(self, states: np.ndarray) -> None:
        self._states, self.taken = states, 0
        self.shape, self.dtype, self.nbytes = states.shape, states.dtype, states.nbytes

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, rows: slice) -> np.ndarray:
        self.taken += 1
        return self._states[rows]


class Untakable(Watched):
    """The third block is none."""

    def __getitem__(self, rows: slice) -> np.ndarray:
        block = super().__getitem__(rows)
        return block if self.taken != 3 else block.astype(np.float32)


@every_number_of_threads
def test_an_error_of_a_thread_reaches_the_caller_in_its_place(threads: int) -> None:
    original = sample(0, 64)
    bad = msgspec.structs.replace(original, hidden_states=Untakable(original.hidden_states))
    with closing(encoder_of(threads)) as encoder:
        read = []
        with pytest.raises(AssertionError, match="float32"):
            read.extend(map(packed, encoder.frames(bad)))
        assert read == expected(original)[:3]
        assert list(map(packed, encoder.frames(original))) == expected(original), "it goes on"


@every_number_of_threads
def test_after_frames_that_nobody_wanted_come_those_of_the_next_sample(threads: int) -> None:
    """A disk that is full in the middle of a sample: it is encoded again from the start, and no
    thread of the first try writes into what the second one makes."""
    original = sample(0, 400)
    with closing(encoder_of(threads)) as encoder:
        for wanted in range(1, 12):
            with closing(encoder.frames(original)) as frames:
                for _ in range(wanted):
                    next(frames)
        assert list(map(packed, encoder.frames(original))) == expected(original)


@every_number_of_threads
def test_two_samples_at_once_are_refused(threads: int) -> None:
    with closing(encoder_of(threads)) as encoder:
        first = encoder.frames(sample(0, 64))
        next(first)
        with pytest.raises(AssertionError, match="another sample"):
            next(encoder.frames(sample(1, 64)))
        first.close()


# in


def header_for(original: Sample, frames: list[bytes]) -> SampleHeader:
    size = sum(map(len, frames))
    return header_of(original, chunks=len(frames), encoded_bytes=size, audit=True)


def assemble(assembler: Assembler, frames: list[bytes]) -> Sample:
    for frame in frames:
        assembler.add(frame)
    return assembler.sample()


@pytest.mark.parametrize("codec", codecs.names())
def test_samples_come_back_through_threads(workers: Workers, codec: str) -> None:
    for rows in (1, 8, 9, 200):
        original = sample(rows, rows)
        frames = expected(original, codec)
        back = assemble(Assembler(header_for(original, frames), workers=workers), frames)
        assert back.digest() == original.digest()
        assert back.hidden_states.base is None


@pytest.mark.parametrize("at", [1, 2, 12, 25])
def test_a_damaged_chunk_is_found_by_add_or_at_the_last_by_sample(
    workers: Workers, at: int
) -> None:
    """Whichever thread found it: the same errors as without threads, so that the same is sent
    again."""
    original = sample(0, 200)
    frames = expected(original)
    frames[at] = frames[at][:-1] + bytes([frames[at][-1] ^ 1])
    assembler = Assembler(header_for(original, frames), workers=workers)
    with pytest.raises(ChecksumMismatch):
        assemble(assembler, frames)
    assembler.close()


def test_few_frames_are_held_undecoded(workers: Workers) -> None:
    original = sample(0, 400)
    frames = expected(original)
    kept = [memoryview(bytearray(frame)) for frame in frames]
    assembler = Assembler(header_for(original, frames), workers=workers)
    held_most = 0
    for frame in kept:
        assembler.add(frame)
        held_most = max(held_most, len(assembler._decoding))
    assert held_most <= workers.ahead


def test_nothing_is_decoded_after_close(workers: Workers) -> None:
    """The room of a sample that is given up is free, and its frames' memory another's."""
    original = sample(0, 400)
    frames = [bytearray(frame) for frame in expected(original)]
    for stop in (2, 3, 20):
        assembler = Assembler(header_for(original, list(map(bytes, frames))), workers=workers)
        for frame in frames[:stop]:
            assembler.add(frame)
        assembler.close()
        before = assembler._states.tobytes()
        for frame in frames:
            frame.append(0)  # BufferError while somebody still reads it
            frame.pop()
        assert assembler._states.tobytes() == before


def test_a_foreign_row_is_not_written_over_a_good_one(workers: Workers) -> None:
    original = sample(0, 200)
    frames = expected(original)
    assembler = Assembler(header_for(original, frames), workers=workers)
    assembler.add(frames[0])
    assembler.add(frames[1])
    with pytest.raises(MalformedChunk, match="rows from 0 where 8 was due"):
        assembler.add(frames[1])
    assembler.close()


def test_a_process_may_end_while_a_daemon_thread_still_decodes() -> None:
    """Trainers that forget to close a stream ended with a traceback of its thread."""
    program = """
import threading
from draftfeed_proto.workers import Workers
workers, begun = Workers(2), threading.Event()
def decode_for_ever():
    while True:
        workers.submit(abs, -1).result()
        begun.set()
threading.Thread(target=decode_for_ever, daemon=True).start()
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
