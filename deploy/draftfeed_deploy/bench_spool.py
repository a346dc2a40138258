"""The codecs, measured on what a spool holds."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from draftfeed_deploy.bench_codec import (
    SPEED_HEADER,
    Comparison,
    Memcpy,
    Round,
    Sizes,
    own_coders,
    speed_of,
)
from draftfeed_deploy.errors import NothingToMeasure
from draftfeed_deploy.spool_contents import Progressing
from draftfeed_producer.spool.reader import Reader
from draftfeed_producer.spool.segments import Record
from draftfeed_proto import codecs
from draftfeed_proto.chunk import decode_chunk
from draftfeed_proto.codecs import packed
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.errors import ChunkError, LimitExceeded

logger = logging.getLogger(__name__)

MAX_BYTES = 32 << 20
"""Of states."""
CHUNKS_OF_A_SAMPLE = 4
"""A long sample is not to be all that is measured."""
ROUNDS = 11


class Chunk(NamedTuple):
    states: np.ndarray
    """16-bit [rows, layers, hidden]"""
    stored_bytes: int
    """Of its payload in the spool."""


class Taken(msgspec.Struct):
    """What was read."""

    samples: int = 0
    damaged: int = 0
    chunks: list[Chunk] = []


class Result(msgspec.Struct):
    spool: str
    descriptor: Descriptor
    samples: int
    states_bytes: int
    stored_bytes: int
    """What the same chunks take in the spool."""
    implementation: str
    """Of `packed`, the one that draftfeed takes here."""
    not_here: list[str]
    """Those that this machine cannot run, or that were not compiled."""
    sizes: dict[str, Sizes]
    rounds: list[Round]


def measure(directory: Path, console: Console) -> Result:
    """Raises SpoolError when it is no spool, NothingToMeasure when it is empty, NotLossless, and
    UnavailableISA when the environment forces what does not run here."""
    implementation = codecs.PACKED.implementation
    reader = Reader(directory)
    taken = take(reader)
    if not taken.chunks:
        raise NothingToMeasure(directory, taken.damaged)
    if taken.damaged:
        logger.warning("%d damaged chunks are left out", taken.damaged)
    coders = own_coders()
    with Progressing(console, ROUNDS * len(coders), "measuring") as progress:
        comparison = Comparison(coders, [chunk.states for chunk in taken.chunks])
        rounds = list(comparison.rounds(ROUNDS, lambda: progress.add(1)))
    return Result(
        spool=str(directory),
        descriptor=reader.owner.descriptor,
        samples=taken.samples,
        states_bytes=sum(comparison.chunk_bytes),
        stored_bytes=sum(chunk.stored_bytes for chunk in taken.chunks),
        implementation=implementation,
        not_here=[name for name in packed.NAMES if name not in packed.available().implementations],
        sizes=comparison.sizes,
        rounds=rounds,
    )


def take(reader: Reader) -> Taken:
    """States of MAX_BYTES at most, one chunk at least: the oldest samples, as they were chunked."""
    taken = Taken()
    size = 0
    for record in reader.records():
        before = len(taken.chunks)
        for index in _spread(record):
            chunk = _chunk(reader, record, index, taken)
            if chunk is None:
                continue
            if taken.chunks and size + chunk.states.nbytes > MAX_BYTES:
                return taken
            taken.samples += len(taken.chunks) == before
            taken.chunks.append(chunk)
            size += chunk.states.nbytes
    return taken


def lines_of(result: Result) -> Iterator[str]:
    stream = result.descriptor
    yield (
        f"spool    {result.spool}: {stream.model}, {stream.layers} layers, hidden "
        f"{stream.hidden_size}, {stream.dtype}"
    )
    chunks = len(result.sizes[Memcpy.name].encoded_bytes)
    yield (
        f"states   {result.states_bytes / 1e6:.1f} MB in {chunks} chunks of {result.samples} "
        f"samples; as stored ratio {result.states_bytes / result.stored_bytes:.3f}"
    )
    yield f"{'':15}{'ratio':>6}{SPEED_HEADER}".rstrip()
    for name, sizes in result.sizes.items():
        mark = " *" if name == f"packed {result.implementation}" else ""
        ratio = result.states_bytes / sum(sizes.encoded_bytes)
        speed = speed_of(name, result.rounds)
        yield f"{name + mark:15}{ratio:6.3f}{speed}  {sizes.left_to_others(name)}".rstrip()
    if result.not_here:
        yield f"not run: packed {', '.join(result.not_here)} {_why()}"
    yield (
        f"one thread; medians of {len(result.rounds)} rounds, least-most; * is what draftfeed "
        "takes on this machine"
    )


def _why() -> str:
    lacking = packed.available().lacking
    return f"(the C is not there: {lacking})" if lacking else "(not on this processor)"


def _spread(record: Record) -> list[int]:
    """Numbers of chunks of states, evenly over the sample; number 0 are the tokens."""
    count = len(record.chunks) - 1
    some = min(CHUNKS_OF_A_SAMPLE, count)
    return [1 + k * count // some for k in range(some)]


def _chunk(reader: Reader, record: Record, index: int, taken: Taken) -> Chunk | None:
    """None when it is damaged, which is counted, or was deleted by its producer meanwhile."""
    frame = reader.frame(record, index)
    if frame is None:
        return None
    stream = reader.owner.descriptor
    dtype = np.float16 if stream.dtype == "fp16" else np.uint16
    try:
        header, values = decode_chunk(frame, dtype)
    except (ChunkError, LimitExceeded):
        taken.damaged += 1
        return None
    by_layer = np.frombuffer(values, dtype).reshape(header.layers, header.rows, header.hidden)
    return Chunk(np.ascontiguousarray(by_layer.transpose(1, 0, 2)), header.encoded_bytes)
