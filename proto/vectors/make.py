"""Test vectors of the protocol, made by draftfeed_proto and kept in the files beside this one.

Run by hand (`python proto/vectors/make.py`), and only when the protocol itself changes: a vector
that comes out different from its file means that old peers and old spools can no longer be read.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from draftfeed_proto import chunk, codecs, sample
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import LayerCounters, Sample

HERE = Path(__file__).parent
DATASET = "0123456789abcdef"
MINIMAL = Descriptor(
    model="tiny",
    revision="",
    tokenizer_hash="t",
    chat_template_hash="c",
    layer_ids=(1,),
    num_layers=4,
    hidden_size=8,
    vocab_size=256,
)
FULL = Descriptor(
    model='org/"tïny"\n',
    revision="r1",
    tokenizer_hash="a" * 64,
    chat_template_hash="b" * 64,
    layer_ids=(1, 16, 31, 46, 61),
    num_layers=64,
    hidden_size=5120,
    vocab_size=151936,
    dtype="bf16",
    final="prenorm",
)
SAMPLE = Sample(
    id=SampleId(DATASET, 1, 2, 300),
    key="prompt-300",
    input_ids=np.array([0, 1, 70_000, 255, 2], np.int32),
    loss_mask=np.array([0, 0, 0, 1, 1], np.uint8),
    # Rows, layers and channels are told apart by their values: 100 * row + 10 * layer + channel.
    hidden_states=np.array(
        [[[100 * r + 10 * l + c for c in range(8)] for l in range(2)] for r in range(4)],  # noqa: E741
        np.float16,
    ),
    counters=(LayerCounters(0, 1, 2, 3), LayerCounters(4, 5, 6, 7)),
    finish_reason="stop",
    sampling={"temperature": 0.5, "seed": 7, "stop_token_ids": [2, 3], "top_k": None},
)
OF_SAMPLE = msgspec.structs.replace(MINIMAL, final="postnorm")
"""The stream of SAMPLE: one tapped layer, and the final state as the second."""
RANGES = IdSet(
    SampleId(DATASET, e, s, i) for e, s, i in ((0, 0, 0), (0, 0, 1), (0, 0, 5), (1, 2, 300))
)


def files() -> dict[str, str]:
    """Name and text of every vector file."""
    vectors = {
        "messages.json": messages(),
        "chunks.json": chunks(),
        "packed.json": packed(),
        "descriptors.json": [descriptor(each) for each in (MINIMAL, FULL, OF_SAMPLE)],
        "ids.json": ids(),
        "sample.json": whole_sample(),
    }
    return {name: _text(value) for name, value in vectors.items()}


def _text(value: Any) -> str:
    """JSON with one entry a line."""
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {json.dumps(inner)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"
    return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]\n"


def messages() -> list[dict[str, Any]]:
    here: dict[str, Any] = {"term": 7, "session": "00ff"}
    id = SAMPLE.id
    trained = RANGES.to_wire()
    fence: dict[str, Any] = {"group": "run", "incarnation": "i", "process": "p"}
    rank: dict[str, Any] = {"member": "1", "members": 2, "leader": False}
    shards = Shards(DATASET, 1, (0, 4, 8, 9))
    expect = Expectation(stream_id=FULL.stream_id(), layer_ids=(1, 16), hidden_size=8, dtype="fp16")
    granted: dict[str, Any] = {"shards": shards, "committed": [], "commit_number": 0}
    account: dict[str, Any] = {
        "shards": shards,
        "committed": trained,
        "leased": [],
        "deliverable": [],
        "terminal": {},
        "pending": [],
    }
    asset = m.AssetFile(name="config.json", bytes=2, digest=hashlib.sha256(b"{}").hexdigest())
    pairs: list[tuple[str, m.Message]] = [
        ("minimal", m.Fence(**fence, member="0", term=1)),
        ("full", m.Fence(**fence, **rank, version=(2, 1), term=7, takeover=True, expect=expect)),
        ("minimal", m.Open(**here, trained=[])),
        (
            "full",
            m.Open(
                **here,
                trained=trained,
                held=[id],
                ledger_term=6,
                ledger_number=12,
                rollback="regenerate",
                checkpoint_samples=500,
            ),
        ),
        ("full", m.Grant(**here, ids=[id])),
        ("full", m.Credit(**here, total_bytes=1 << 40)),
        ("full", m.Nack(**here, id=id, reason="checksum")),
        ("minimal", m.Reject(**here, id=id, reason="non-finite")),
        ("full", m.Reject(**here, id=id, reason="no full step", state="tail")),
        ("full", m.AtWork(**here, ids=[id])),
        ("full", m.Release(**here, ids=[id, id])),
        ("full", m.Commit(**here, number=3, trained=trained)),
        ("minimal", m.Bye(**here)),
        ("full", m.Bye(**here, reason="done")),
        ("full", m.Inquire()),
        ("full", m.ListAssets()),
        ("full", m.FetchAsset(name="model.safetensors", offset=1 << 32, bytes=4 << 20)),
        (
            "minimal",
            m.Granted(**here, descriptor=MINIMAL, stream_id=MINIMAL.stream_id(), **granted),
        ),
        (
            "full",
            m.Granted(
                **here,
                descriptor=FULL,
                stream_id=FULL.stream_id(),
                shards=msgspec.structs.replace(shards, epochs=3),
                max_sample_bytes=4096,
                local="draftfeed-00ff",
                committed=trained,
                commit_term=6,
                commit_number=12,
            ),
        ),
        ("minimal", m.Refused(code="mismatch", reason="hidden_size")),
        ("full", m.Refused(code="fenced", reason="term 9 was granted", term=9)),
        ("minimal", m.Account(**account)),
        (
            "full",
            m.Account(
                **{**account, "terminal": {"rejected": trained, "tail": trained}},
                regenerated=trained,
                skipped=trained,
                group="run",
                term=7,
                commit_number=12,
                members=["0", "1"],
            ),
        ),
        ("minimal", m.Assets(stream_id=MINIMAL.stream_id())),
        ("full", m.Assets(stream_id=FULL.stream_id(), files=[asset], reason="none")),
        ("full", m.AssetPiece(name="model.safetensors", offset=1 << 32)),
        ("full", m.Opened(**here)),
        ("full", m.Offer(**here, samples=[(id, 153)])),
        ("full", m.Begin(**here, header=header())),
        ("full", m.Chunk(**here, id=id, index=1)),
        (
            "full",
            m.ChunksAt(**here, id=id, index=1, file=2, places=((1 << 32, 4096), (1 << 33, 1))),
        ),
        ("full", m.Committed(**here, number=3)),
        ("full", m.EndOfSamples(**here, refused=2)),
        ("full", m.AllTerminal(**here)),
        ("full", m.Closing(**here, reason="restart")),
        ("full", m.Ping(**here)),
        ("full", m.CheckpointWanted(**here)),
    ]
    return [
        {"name": name, "message": msgspec.to_builtins(message), "hex": m.encode(message).hex()}
        for name, message in pairs
    ]


def frames() -> list[bytes]:
    """Of SAMPLE, raw and three rows to a chunk, so that a second chunk of states starts at 3."""
    return list(sample.encode_chunks(SAMPLE, codecs.by_name("raw"), chunk_bytes=3 * 2 * 2 * 8))


def header() -> sample.SampleHeader:
    size = sum(map(len, frames()))
    return sample.header_of(SAMPLE, chunks=len(frames()), encoded_bytes=size, audit=True)


def compressible() -> np.ndarray:
    """fp16 [16, 2, 8], the states of SAMPLE four times."""
    return np.concatenate([SAMPLE.hidden_states] * 4)


def chunks() -> list[dict[str, Any]]:
    """zstd's output differs between versions of the library: its vector freezes decoding alone."""
    tokens, first, second = frames()
    zstd = chunk.encode_states(compressible(), 4, codecs.by_name("zstd"))
    packed = chunk.encode_states(states("chunk", (24, 2, 16)), 0, codecs.by_name("packed"))
    rows = b"".join(chunk.lay_rows(SAMPLE.hidden_states[:3], 0).parts)
    raw = {"raw": first, "raw-last": second, "rows": rows}
    named = {"tokens": tokens, **raw, "packed": packed, "zstd": zstd}
    return [
        {"name": name, "decoded": chunk.decode_chunk(frame)[1].hex(), "frame": frame.hex()}
        for name, frame in named.items()
    ]


def states(name: str, shape: tuple[int, int, int], kind: str = "fp16") -> np.ndarray:
    """Of that shape [rows, layers, hidden], with exponents around each channel's own. The same in
    every language: 32 bits of SHAKE128(name) make a value. kind: fp16, bf16, or exact, which is
    fp16 with low bits."""
    bits = hashlib.shake_128(name.encode()).digest(4 * int(np.prod(shape)))
    first, second = np.frombuffer(bits, "<u2").reshape(2, *shape).astype(np.uint16)
    exponents = np.bitwise_count(first & 0xFF) + np.arange(shape[2], dtype=np.uint16) % 5
    if kind == "bf16":
        return second & 0x807F | exponents + 110 << 7
    signs_and_mantissas = second & (0x83FF if kind == "exact" else 0x83F8)
    return (signs_and_mantissas | exponents + 4 << 10).view(np.float16)


def odd(values: np.ndarray) -> np.ndarray:
    """Every 61st value is a zero, a subnormal, the largest, an infinity or a NaN instead."""
    fp16 = [0, 0x8000, 1, 0x83FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF]
    bf16 = [0, 0x8000, 1, 0x807F, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF]
    words = values.view(np.uint16).reshape(-1)[::61]
    words[:] = np.resize(fp16 if values.dtype == np.float16 else bf16, len(words))
    return values


def packed() -> list[dict[str, Any]]:
    """Payloads with and without each flag, with exceptions, of one block and more."""
    named = {
        "fp16": odd(states("fp16", (25, 2, 17))),
        "fp16-low": odd(states("fp16-low", (25, 2, 17), "exact")),
        "fp16-few-rows": states("fp16-few-rows", (5, 3, 33)),
        "fp16-few-rows-low": states("fp16-few-rows-low", (5, 3, 33), "exact"),
        "bf16": odd(states("bf16", (25, 2, 17), "bf16")),
        "bf16-few-rows": states("bf16-few-rows", (5, 3, 33), "bf16"),
        # Blocks of 32,768 and 32 values; the first ends within a row.
        "bf16-blocks": odd(states("bf16-blocks", (41, 1, 800), "bf16")),
    }
    vectors = [payload(name, values) for name, values in named.items()]
    return [*vectors, foreign(vectors[0])]


def payload(name: str, values: np.ndarray) -> dict[str, Any]:
    out = memoryview(bytearray(values.nbytes))
    size = codecs.PACKED.encode(values, out)
    assert size, name
    decoded = values.view(np.uint16).swapaxes(0, 1).astype("<u2").tobytes()
    large = len(decoded) > 1 << 14
    return {
        "name": name,
        "dtype": "fp16" if values.dtype == np.float16 else "bf16",
        **dict(zip(("rows", "layers", "hidden"), values.shape, strict=True)),
        "decoded": None if large else decoded.hex(),
        "decoded_sha256": hashlib.sha256(decoded).hexdigest(),
        "payload": out[:size].hex(),
    }


def foreign(vector: dict[str, Any]) -> dict[str, Any]:
    """As another encoder may write it: in the first layer's table exponents beyond those of fp16,
    which count modulo 32, and bits that mean nothing behind its bases."""
    data = bytearray.fromhex(vector["payload"])
    for place in range(2, 2 + 25):
        data[place] |= 0xE0
    data[2 + 25 + vector["hidden"] // 2] |= 0xF0
    return {**vector, "name": "fp16-foreign", "payload": data.hex()}


def descriptor(value: Descriptor) -> dict[str, Any]:
    return {
        "descriptor": msgspec.to_builtins(value),
        "hashed": msgspec.json.encode(value).decode(),
        "stream_id": value.stream_id(),
    }


def ids() -> dict[str, Any]:
    return {"ids": [str(id) for id in RANGES], "wire": RANGES.to_wire()}


def whole_sample() -> dict[str, Any]:
    return {
        "descriptor": msgspec.to_builtins(OF_SAMPLE),
        "header": msgspec.msgpack.encode(header()).hex(),
        "frames": [frame.hex() for frame in frames()],
        "input_ids": SAMPLE.input_ids.tolist(),
        "loss_mask": SAMPLE.loss_mask.tolist(),
        "hidden_states": SAMPLE.hidden_states.tolist(),
        "digest": SAMPLE.digest(),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text)
