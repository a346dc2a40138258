import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftfeed_proto import chunk, codecs
from draftfeed_proto.errors import LimitExceeded, MalformedChunk, MalformedMessage, ProtoError
from draftfeed_proto.sample import (
    Assembler,
    LayerCounters,
    Sample,
    SampleHeader,
    decoded_bytes,
    encode_chunks,
    header_of,
)
from samples import DESCRIPTOR, HIDDEN, LAYERS, sample

ROW_BYTES = 2 * LAYERS * HIDDEN
CHUNK_BYTES = 8 * ROW_BYTES


def encoded(
    original: Sample, codec: str = "zstd", *, audit: bool = True, chunk_bytes: int = CHUNK_BYTES
) -> tuple[SampleHeader, list[bytes]]:
    frames = list(encode_chunks(original, codecs.by_name(codec), chunk_bytes))
    size = sum(map(len, frames))
    return header_of(original, chunks=len(frames), encoded_bytes=size, audit=audit), frames


def assembled(header: SampleHeader, frames: list[bytes], dtype: str = "fp16") -> Sample:
    assembler = Assembler(header, dtype)
    for frame in frames:
        assert not assembler.done
        assembler.add(frame)
    assert assembler.done
    return assembler.sample()


def plain(value: Sample) -> list[Any]:
    fields = [getattr(value, field) for field in value.__struct_fields__]
    return [field.tolist() if isinstance(field, np.ndarray) else field for field in fields]


@pytest.mark.parametrize("codec", codecs.names())
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("chunk_bytes", [1, CHUNK_BYTES, 1 << 30])
def test_sample_comes_back(codec: str, rows: int, chunk_bytes: int) -> None:
    original = sample(3, rows)
    header, frames = encoded(original, codec, chunk_bytes=chunk_bytes)
    back = assembled(header, frames)
    assert plain(back) == plain(original)
    assert back.digest() == original.digest() == header.digest
    assert header.decoded_bytes == decoded_bytes(rows, LAYERS, HIDDEN)
    assert header.encoded_bytes == sum(map(len, frames))
    header.check_stream(DESCRIPTOR)


def test_with_a_final_state_a_sample_has_one_layer_more_than_layer_ids() -> None:
    header = encoded(sample(0))[0]
    two = msgspec.structs.replace(DESCRIPTOR, layer_ids=(1, 4), final="postnorm")
    header.check_stream(two)
    with pytest.raises(MalformedMessage, match=r"is \[40, 3, 64\] in a stream of 4 layers"):
        header.check_stream(msgspec.structs.replace(DESCRIPTOR, final="postnorm"))


def test_every_id_has_a_label_and_all_but_the_last_a_row() -> None:
    """The last sampled token was never fed forward: n+1 ids and labels, n rows."""
    header, frames = encoded(sample(0, rows=40))
    back = assembled(header, frames)
    assert (len(back.input_ids), len(back.loss_mask), len(back.hidden_states)) == (41, 41, 40)


def test_bf16_states_are_bit_patterns() -> None:
    bits = np.arange(LAYERS * HIDDEN * 8, dtype=np.uint16).reshape(8, LAYERS, HIDDEN)
    original = msgspec.structs.replace(sample(0, 8), hidden_states=bits)
    back = assembled(*encoded(original), dtype="bf16")
    assert back.hidden_states.dtype == np.uint16
    assert np.array_equal(back.hidden_states, bits)


def test_trainers_may_write_into_what_they_get() -> None:
    back = assembled(*encoded(sample(0)))
    for array in (back.input_ids, back.loss_mask, back.hidden_states):
        assert array.flags.writeable
        assert array.base is None, "nothing else keeps memory alive or shares it"


FRAMES = encoded(sample(0, rows=24))[1]
NARROW = bytes(
    chunk.encode_states(np.zeros((8, LAYERS, HIDDEN - 1), np.float16), 0, codecs.by_name("raw"))
)
WRONG_ORDER: dict[str, list[bytes]] = {
    "states before tokens": [FRAMES[1]],
    "tokens twice": [FRAMES[0], FRAMES[0]],
    "one missing": [FRAMES[0], FRAMES[2]],
    "one twice": [FRAMES[0], FRAMES[1], FRAMES[1]],
    "one too many": [*FRAMES, FRAMES[-1]],
    "tokens of another length": [encoded(sample(0, rows=23))[1][0]],
    "another hidden size": [FRAMES[0], NARROW],
    "damaged": [FRAMES[0], FRAMES[1][:-1] + b"\1"],
    "cut": [FRAMES[0], FRAMES[1][:-1]],
}


@pytest.mark.parametrize("frames", WRONG_ORDER.values(), ids=WRONG_ORDER.keys())
def test_frames_that_are_not_the_next_one_are_refused(frames: list[bytes]) -> None:
    assembler = Assembler(encoded(sample(0, rows=24))[0])
    *good, bad = frames
    for frame in good:
        assembler.add(frame)
    with pytest.raises(ProtoError):
        assembler.add(bad)


def test_a_chunk_of_another_sample_in_its_place_is_found_by_the_digest() -> None:
    header, frames = encoded(sample(0, rows=24), "raw")
    foreign = encoded(sample(1, rows=24), "raw")[1]
    with pytest.raises(MalformedChunk, match="another digest"):
        assembled(header, [*frames[:2], foreign[2], *frames[3:]])


def test_without_the_audit_there_is_no_digest() -> None:
    header, frames = encoded(sample(0), audit=False)
    assert header.digest == ""
    assembled(header, frames)


NO_COUNTERS = LayerCounters(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 0),
        ("rows", (1 << 20) + 1),
        ("layers", 0),
        ("layers", 65),
        ("hidden", 0),
        ("hidden", (1 << 16) + 1),
        ("hidden", 1 << 62),
        ("chunks", 0),
        ("chunks", 1),
        ("chunks", 42),
        ("counters", ()),
        ("counters", (NO_COUNTERS,) * (LAYERS + 1)),
    ],
)
def test_headers_of_impossible_samples_take_no_memory(field: str, value: Any) -> None:
    header = msgspec.structs.replace(encoded(sample(0, rows=40))[0], **{field: value})
    with pytest.raises((LimitExceeded, MalformedMessage)):
        Assembler(header)


def test_a_sample_above_the_byte_limit_is_refused() -> None:
    header = encoded(sample(0, rows=40))[0]
    counters = (NO_COUNTERS,) * 64
    huge = msgspec.structs.replace(header, rows=1 << 20, layers=64, counters=counters)
    with pytest.raises(LimitExceeded, match="decoded bytes of a sample"):
        Assembler(huge)


@pytest.mark.parametrize(
    ("field", "shift"),
    [
        ("rows", 1),
        ("rows", -1),
        ("chunks", 1),
        ("chunks", -1),
        ("encoded_bytes", 1),
        ("response_tokens", -1),
    ],
)
def test_a_header_that_lies_about_its_frames_is_found_at_the_last_one(
    field: str, shift: int
) -> None:
    """A sample must never end up neither complete nor refused: its room would stay reserved."""
    header, frames = encoded(sample(0, rows=24))
    lying = msgspec.structs.replace(header, **{field: getattr(header, field) + shift})
    with pytest.raises(MalformedChunk):
        assembled(lying, frames)


@pytest.mark.parametrize("field", ["layers", "hidden"])
def test_a_sample_of_another_stream_is_refused(field: str) -> None:
    header = encoded(sample(0))[0]
    wrong = msgspec.structs.replace(header, **{field: getattr(header, field) * 2})
    with pytest.raises(MalformedMessage, match=f"3 layers and hidden size {HIDDEN}"):
        wrong.check_stream(DESCRIPTOR)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {"key": "k" * 1025},
        lambda s: {"key": "\ud800"},
        lambda s: {"sampling": {"nested": {"a": 1}}},
        lambda s: {"sampling": {"large": 2**70}},
        lambda s: {"counters": s.counters[1:]},
        lambda s: {"hidden_states": s.hidden_states[:0]},
        lambda s: {"finish_reason": "x" * 1025},
    ],
)
def test_what_no_consumer_could_take_is_not_stored(
    change: Callable[[Sample], dict[str, Any]],
) -> None:
    original = sample(0)
    bad = msgspec.structs.replace(original, **change(original))
    with pytest.raises((MalformedMessage, LimitExceeded)):
        encoded(bad)


@given(st.data())
def test_any_one_changed_value_changes_the_digest(data: st.DataObject) -> None:
    original = sample(5, rows=6)
    field = data.draw(st.sampled_from(["input_ids", "loss_mask", "hidden_states"]))
    changed = getattr(original, field).copy()
    at = data.draw(st.integers(0, changed.nbytes - 1))
    changed.view(np.uint8).reshape(-1)[at] ^= 1 << data.draw(st.integers(0, 7))
    assert msgspec.structs.replace(original, **{field: changed}).digest() != original.digest()


def test_the_digest_does_not_depend_on_memory_layout() -> None:
    original = sample(5)
    states = np.asfortranarray(original.hidden_states)
    assert msgspec.structs.replace(original, hidden_states=states).digest() == original.digest()


def test_digest_and_encoding_copy_no_sample() -> None:
    """A copy of a sample of 32K tokens is 1.6 GB more."""
    original = sample(5, rows=8)
    states = np.zeros((400_000, LAYERS, HIDDEN), np.float16)
    big = msgspec.structs.replace(original, hidden_states=states)
    tracemalloc.start()
    try:
        big.digest()
        for _ in encode_chunks(big, codecs.by_name("raw")):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6 < states.nbytes / 5, f"{peak:,} bytes"
