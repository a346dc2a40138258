"""The hidden states that codec.py measures on: a model's, read out of this checkout's texts, and
drawn ones of a wider model's shape."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftfeed_deploy.smollm2 import default_cache_dir
from draftfeed_producer.target import Target
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.sample import DEFAULT_CHUNK_BYTES, row_blocks

ROOT = Path(__file__).parents[1]
TEXTS = {
    "english": ("docs/how-it-works.md", "docs/operate.md", "deploy/draftfeed_deploy/data"),
    "code": ("proto/draftfeed_proto", "producer/draftfeed_producer", "consumer/draftfeed_consumer"),
}
"""Files, or folders of them. Each has its share of the tokens."""
SUFFIXES = (".md", ".jsonl", ".py")
WINDOW = 512
"""Tokens that are fed at a time, from an empty context."""
WIDE_LAYERS, WIDE_HIDDEN, MASSIVE = 5, 5120, 6

Say = Callable[[str], None]


class DataSet(NamedTuple):
    name: str
    note: str
    chunks: dict[str, list[np.ndarray]]
    """By text: states [rows, layers, hidden], float16, or uint16 for the bit patterns of bf16."""

    @property
    def bf16(self) -> bool:
        return next(iter(self.chunks.values()))[0].dtype == np.uint16


def data_sets(
    target: Target, layers: Sequence[int] | None, count: int, say: Say
) -> Iterator[DataSet]:
    """layers: ids, None for the usual five. count: chunks of each text.

    What a model's run gave is kept in the user's cache directory, for the next time.
    """
    stream = target.descriptor(layers)
    rows = count * rows_of_chunk(len(stream.layer_ids), stream.hidden_size)
    texts = {text: _windows(target, sources, rows) for text, sources in TEXTS.items()}
    bits, exact = (
        {text: _states(target, stream, text, ids, dtype, say) for text, ids in texts.items()}
        for dtype in ("bfloat16", "float32")
    )
    name = target.name
    yield _set("fp16 from bf16", f"{name} run in bf16, on the wire as fp16", bits, fp16_of_bf16)
    yield _set("bf16", f"{name} run in bf16, on the wire as bf16", bits)
    yield _set("true fp16", f"{name} run in fp32, rounded to fp16", exact)
    wide = {"drawn": wide_states(count * rows_of_chunk(WIDE_LAYERS, WIDE_HIDDEN))}
    note = (
        f"drawn at random: {WIDE_HIDDEN} channels of very different scales, {MASSIVE} of them "
        "massive. For speed at that shape; its ratio proves nothing"
    )
    yield _set("wide, fp16", note, wide, fp16_of_bf16)
    yield _set("wide, bf16", note, wide)


def rows_of_chunk(layers: int, hidden: int) -> int:
    return DEFAULT_CHUNK_BYTES // (2 * layers * hidden)


def fp16_of_bf16(bits: np.ndarray) -> np.ndarray:
    """As the tap does it: exact where fp16 can be, and saturated."""
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    return np.clip(values, -65504, 65504).astype(np.float16)


def wide_states(rows: int, seed: int = 0) -> np.ndarray:
    """bf16 bit patterns [rows, WIDE_LAYERS, WIDE_HIDDEN], always the same of a seed."""
    random = np.random.default_rng(seed)
    scales = np.exp(random.standard_normal((WIDE_LAYERS, WIDE_HIDDEN)))
    scales *= 1.6 ** np.arange(WIDE_LAYERS)[:, None]
    means = np.zeros_like(scales)
    massive = random.choice(WIDE_HIDDEN, MASSIVE, replace=False)
    means[:, massive] = random.choice((-1, 1), MASSIVE) * random.uniform(100, 2000, MASSIVE)
    values = means + scales * random.standard_normal((rows, WIDE_LAYERS, WIDE_HIDDEN))
    patterns = values.astype(np.float32).view(np.uint32)
    nearest_even = patterns + 0x7FFF + (patterns >> 16 & 1)
    return (nearest_even >> 16).astype(np.uint16)


def _set(
    name: str,
    note: str,
    states: dict[str, np.ndarray],
    convert: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> DataSet:
    chunks = {
        text: [rows for _, rows in row_blocks(convert(values), DEFAULT_CHUNK_BYTES)]
        for text, values in states.items()
    }
    return DataSet(name, note, chunks)


def _states(
    target: Target, stream: Descriptor, text: str, windows: list[list[int]], dtype: str, say: Say
) -> np.ndarray:
    """float16 when the model runs in float32, bit patterns when it runs in bfloat16."""
    import torch
    import transformers

    versions = (str(torch.__version__), transformers.__version__)
    made_of = json.dumps([stream.stream_id(), dtype, versions, windows])
    key = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    path = default_cache_dir() / "bench-codec" / f"{text}-{dtype}-{key}.npy"
    if not path.exists():
        say(f"{target.name} reads {sum(map(len, windows))} tokens of {text} in {dtype}, once")
        states = _read(target, stream.layer_ids, windows, dtype)
        for old in path.parent.glob(f"{text}-{dtype}-*.npy"):
            old.unlink()
        _save(path, states)
    kept: np.ndarray = np.load(path)
    return kept


def _windows(target: Target, sources: Sequence[str], count: int) -> list[list[int]]:
    """Token ids, `count` in all."""
    windows: list[list[int]] = []
    for number, source in enumerate(sources):
        share = count * (number + 1) // len(sources) - count * number // len(sources)
        ids = target.tokenizer(_text(ROOT / source), verbose=False)["input_ids"][:share]
        if len(ids) < share:
            raise SystemExit(f"{source} has only {len(ids)} tokens: ask for fewer --chunks")
        windows += [ids[first : first + WINDOW] for first in range(0, share, WINDOW)]
    return windows


def _text(source: Path) -> str:
    files = [path for path in sorted(source.rglob("*")) if path.suffix in SUFFIXES]
    return "\n".join(path.read_text() for path in files or [source])


def _read(
    target: Target, layer_ids: Sequence[int], windows: list[list[int]], dtype: str
) -> np.ndarray:
    import torch
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    assert max(layer_ids) < target.num_layers - 1, "transformers has the last one after the norm"
    model: Any = AutoModel.from_pretrained(target.path, dtype=getattr(torch, dtype))
    parts = []
    with torch.inference_mode():
        for ids in windows:
            found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            parts.append(torch.stack([found[k + 1][0] for k in layer_ids], dim=1))
    states = torch.cat(parts)
    if dtype == "bfloat16":
        return states.view(torch.int16).numpy().view(np.uint16)
    return states.clamp(-65504, 65504).half().numpy()


def _save(path: Path, states: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.save(file, states)
    part.replace(path)
