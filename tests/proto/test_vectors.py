"""The frozen vectors, read twice: by draftfeed_proto, and by hand from PROTOCOL.md alone."""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import numpy as np
import pytest
import xxhash
import zstandard

from draftfeed_proto import chunk
from draftfeed_proto import messages as m
from draftfeed_proto.codecs.packed import Implementation, available
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import Assembler, SampleHeader
from frames import CHECKSUM, FIELDS, HEADER_BYTES, NAMES, seal
from packed_by_hand import unpack

VECTORS = Path(__file__).parents[2] / "proto" / "vectors"


def load(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text())


MESSAGES, CHUNKS, DESCRIPTORS = load("messages"), load("chunks"), load("descriptors")
SAMPLE, IDS, PACKED = load("sample"), load("ids"), load("packed")
by_name = {"argvalues": CHUNKS, "ids": [vector["name"] for vector in CHUNKS]}


def made() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("make_vectors", VECTORS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.files()


@pytest.mark.parametrize("name", ["messages", "chunks", "packed", "descriptors", "ids", "sample"])
def test_frozen(name: str) -> None:
    """If this fails, old peers and old spools can no longer be read: change the code, not the
    file. Only zstd's own output may differ, between versions of the library."""
    fresh = json.loads(made()[f"{name}.json"])
    frozen = load(name)
    if name == "chunks":
        for vectors in (fresh, frozen):
            vectors[-1].pop("frame")
    assert fresh == frozen


# messages


@pytest.mark.parametrize("vector", MESSAGES, ids=lambda v: f"{v['message']['type']}-{v['name']}")
def test_message_is_plain_messagepack(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    assert msgpack.unpackb(data) == vector["message"]
    decode = m.decode_from_member if is_from_member(vector) else m.decode_from_producer
    assert m.encode(decode(data)) == data


def is_from_member(vector: dict[str, Any]) -> bool:
    return vector["message"]["type"] in {kind.__name__ for kind in get_args(m.FromMember)}


def test_every_message_type_has_a_vector() -> None:
    kinds = {kind.__name__ for union in (m.FromMember, m.FromProducer) for kind in get_args(union)}
    assert {vector["message"]["type"] for vector in MESSAGES} == kinds


# chunks, by hand


def parse(frame: bytes) -> tuple[dict[str, Any], bytes]:
    fields = dict(zip(NAMES, FIELDS.unpack_from(frame), strict=True))
    payload = frame[HEADER_BYTES:]
    (checksum,) = CHECKSUM.unpack_from(frame, FIELDS.size)
    assert fields["magic"] == b"DFC1"
    assert (fields["flags"], fields["reserved"]) == (0, 0)
    assert fields["encoded_bytes"] == len(payload)
    assert checksum == xxhash.xxh3_64_intdigest(frame[: FIELDS.size] + payload)
    return fields, payload


def unpacked(fields: dict[str, Any], payload: bytes) -> bytes:
    if fields["codec"] == 0:
        return payload
    if fields["codec"] == 3:
        shape = (fields["rows"], fields["layers"], fields["hidden"])
        return np.frombuffer(payload, "<u2").reshape(shape).swapaxes(0, 1).tobytes()
    if fields["codec"] == 2:
        words = unpack(payload, fields["rows"], fields["layers"], fields["hidden"], bf16=False)
        return np.array(words, "<u2").tobytes()
    assert fields["codec"] == 1
    planes = zstandard.ZstdDecompressor().decompress(payload)
    half = len(planes) // 2
    return bytes(byte for pair in zip(planes[:half], planes[half:], strict=True) for byte in pair)


@pytest.mark.parametrize("vector", **by_name)
def test_chunk_read_by_hand(vector: dict[str, Any]) -> None:
    fields, payload = parse(bytes.fromhex(vector["frame"]))
    values = unpacked(fields, payload)
    assert values.hex() == vector["decoded"]
    assert fields["decoded_bytes"] == len(values)
    per_row = 2 * fields["layers"] * fields["hidden"] if fields["kind"] else 5
    assert len(values) == per_row * fields["rows"]


@pytest.mark.parametrize("vector", **by_name)
def test_chunk_read_by_draftfeed(vector: dict[str, Any]) -> None:
    assert chunk.decode_chunk(bytes.fromhex(vector["frame"]))[1].hex() == vector["decoded"]


def test_every_codec_and_kind_has_a_vector() -> None:
    parsed = [parse(bytes.fromhex(vector["frame"]))[0] for vector in CHUNKS]
    pairs = {(fields["kind"], fields["codec"]) for fields in parsed}
    assert pairs == {(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)}


@pytest.mark.parametrize("level", [-5, 1, 19])
def test_zstd_frames_of_any_level_and_with_a_checksum_are_read(level: int) -> None:
    """Another implementation chooses these as it likes."""
    vector = CHUNKS[-1]
    fields, payload = parse(bytes.fromhex(vector["frame"]))
    planes = zstandard.ZstdDecompressor().decompress(payload)
    other = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(planes)
    header = FIELDS.pack(*(fields | {"encoded_bytes": len(other)}).values())
    assert chunk.decode_chunk(seal(header, other))[1].hex() == vector["decoded"]


# payloads of `packed`

by_packed_name = {"argvalues": PACKED, "ids": [vector["name"] for vector in PACKED]}
IMPLEMENTATIONS = available().implementations


def is_decoded(vector: dict[str, Any], values: bytes) -> bool:
    if hashlib.sha256(values).hexdigest() != vector["decoded_sha256"]:
        return False
    return vector["decoded"] in (None, values.hex())


@pytest.mark.parametrize("vector", **by_packed_name)
def test_packed_read_by_hand(vector: dict[str, Any]) -> None:
    shape = (vector["rows"], vector["layers"], vector["hidden"])
    words = unpack(bytes.fromhex(vector["payload"]), *shape, bf16=vector["dtype"] == "bf16")
    assert is_decoded(vector, np.array(words, "<u2").tobytes())


@pytest.mark.parametrize("codec", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("vector", **by_packed_name)
def test_packed_read_by_draftfeed(codec: Implementation, vector: dict[str, Any]) -> None:
    out = np.empty(
        (vector["layers"], vector["rows"], vector["hidden"]),
        np.uint16 if vector["dtype"] == "bf16" else np.float16,
    )
    codec.decode(memoryview(bytes.fromhex(vector["payload"])), out.swapaxes(0, 1))
    assert is_decoded(vector, out.tobytes())


def test_every_flag_of_packed_has_a_vector() -> None:
    flags = {(vector["dtype"], bytes.fromhex(vector["payload"])[1]) for vector in PACKED}
    assert flags == {*(("fp16", flags) for flags in range(4)), ("bf16", 0), ("bf16", 2)}


# descriptors, ids, samples


@pytest.mark.parametrize("vector", DESCRIPTORS, ids=["minimal", "full", "final"])
def test_stream_id_by_hand(vector: dict[str, Any]) -> None:
    order = (
        *("schema", "model", "revision", "tokenizer_hash", "chat_template_hash", "layer_ids"),
        *("num_layers", "hidden_size", "vocab_size", "dtype", "final"),
    )
    fields = {key: vector["descriptor"][key] for key in order}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    assert text == vector["hashed"]
    assert hashlib.sha256(text.encode()).hexdigest()[:32] == vector["stream_id"]
    assert msgspec.convert(fields, Descriptor).stream_id() == vector["stream_id"]


def test_id_sets_by_hand() -> None:
    by_hand = [
        f"{dataset}/{epoch}/{shard}/{ordinal}"
        for dataset, epoch, shard, first, lengths in IDS["wire"]
        for at in range(0, len(lengths), 2)
        for ordinal in range(first + sum(lengths[:at]), first + sum(lengths[: at + 1]))
    ]
    assert by_hand == IDS["ids"]
    assert [str(id) for id in IdSet.from_wire(IDS["wire"])] == IDS["ids"]
    assert IdSet(map(SampleId.parse, IDS["ids"])) == IdSet.from_wire(IDS["wire"])


def test_sample_by_hand() -> None:
    header = msgpack.unpackb(bytes.fromhex(SAMPLE["header"]))
    frames = [bytes.fromhex(frame) for frame in SAMPLE["frames"]]
    assert header["chunks"] == len(frames)
    assert header["encoded_bytes"] == sum(map(len, frames))
    rows, shape = header["rows"], (header["rows"], header["layers"], header["hidden"])
    tokens = parse(frames[0])[1]
    assert np.frombuffer(tokens[: 4 * rows + 4], "<i4").tolist() == SAMPLE["input_ids"]
    assert list(tokens[4 * rows + 4 :]) == SAMPLE["loss_mask"]
    assert header["response_tokens"] == sum(SAMPLE["loss_mask"])
    descriptor = SAMPLE["descriptor"]
    assert descriptor["final"] == "postnorm"
    assert shape[1:] == (len(descriptor["layer_ids"]) + 1, descriptor["hidden_size"])
    assert len(header["counters"]) == shape[1]
    states = np.empty(shape, "<f2")
    for fields, payload in map(parse, frames[1:]):
        block = np.frombuffer(payload, "<f2").reshape(shape[1], fields["rows"], shape[2])
        first = fields["first_row"]
        states[first : first + fields["rows"]] = block.swapaxes(0, 1)
    assert states.tolist() == SAMPLE["hidden_states"]
    hashed = tokens + states.tobytes()
    assert xxhash.xxh3_128_hexdigest(hashed) == SAMPLE["digest"] == header["digest"]


def test_sample_read_by_draftfeed() -> None:
    header = msgspec.msgpack.decode(bytes.fromhex(SAMPLE["header"]), type=SampleHeader)
    header.check_stream(msgspec.convert(SAMPLE["descriptor"], Descriptor))
    assembler = Assembler(header)
    for frame in SAMPLE["frames"]:
        assembler.add(bytes.fromhex(frame))
    assert assembler.sample().hidden_states.tolist() == SAMPLE["hidden_states"]
