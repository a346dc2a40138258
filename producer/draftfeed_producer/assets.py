"""What a trainer needs of the target beside its states, as files that are read where they lie.

`model.safetensors` is made of the target's own files without a copy: a header of ours, and behind
it the bytes of embedding, final norm and head, wherever they are.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from draftfeed_producer.errors import ModelError
from draftfeed_proto.messages import AssetFile

COPIED = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Served as they are, where there is one of that name."""
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""Of the text model, in a checkpoint of its own and inside a multimodal one."""
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_MAX_HEADER_BYTES = 100 << 20
_MAX_INDEX_BYTES = 100 << 20
_HASHED_AT_ONCE = 8 << 20


class Span(NamedTuple):
    """A stretch of bytes: of a file, or given."""

    length: int
    path: Path | None = None
    offset: int = 0
    given: bytes = b""


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    span: Span


class ServedFile:
    """A file that may be stitched together of several. Used by one thread."""

    def __init__(self, name: str, spans: Sequence[Span]) -> None:
        """Opens what it is made of: a file that is replaced is still served as it was."""
        self.name, self._spans = name, tuple(span for span in spans if span.length)
        self.bytes = sum(span.length for span in spans)
        self._open: dict[Path, int] = {}
        for path in {span.path for span in self._spans if span.path}:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, size: int) -> bytes:
        """Raises OSError, also when a file is shorter than it was."""
        parts, start = [], 0
        for span in self._spans:
            first, last = max(offset - start, 0), min(offset + size - start, span.length)
            if first < last:
                parts.append(self._read(span, first, last - first))
            start += span.length
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read(self, span: Span, first: int, size: int) -> bytes:
        if span.path is None:
            return span.given[first : first + size]
        data = os.pread(self._open[span.path], size, span.offset + first)
        while len(data) < size:
            at = span.offset + first + len(data)
            more = os.pread(self._open[span.path], size - len(data), at)
            if not more:
                raise OSError(f"{span.path} is shorter than it was")
            data += more
        return data

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def described(file: ServedFile, stopped: Callable[[], bool]) -> AssetFile:
    """With its digest, which takes a second for one to two gigabytes. Raises OSError, and
    InterruptedError when stopped."""
    digest = hashlib.sha256()
    for offset in range(0, file.bytes, _HASHED_AT_ONCE):
        if stopped():
            raise InterruptedError
        digest.update(file.read(offset, min(_HASHED_AT_ONCE, file.bytes - offset)))
    return AssetFile(name=file.name, bytes=file.bytes, digest=digest.hexdigest())


def find_assets(directory: Path) -> list[ServedFile]:
    """The files of a target that are served, open. Raises ModelError and OSError."""
    weights = target_weights(directory)
    served = [
        ServedFile(name, [Span(size, directory / name)])
        for name in COPIED
        if (size := _size(directory / name)) is not None
    ]
    return [*served, ServedFile(WEIGHTS, [_header(weights), *(tensor.span for tensor in weights)])]


def target_weights(directory: Path) -> list[Tensor]:
    """Embedding, final norm and head (if it is not tied) in the order in which they are served.

    Raises ModelError when there is no such tensor, or one that a trainer cannot compute with.
    """
    config = _json(directory / "config.json", _MAX_HEADER_BYTES)
    text: dict[str, Any] = next(
        (config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)),
        config,
    )
    tensors = _Tensors(directory)
    prefix = _prefix(directory, tensors)
    found = [tensors.get(f"{prefix}embed_tokens.weight"), tensors.get(f"{prefix}norm.weight")]
    head = next((name for name in _HEADS if name in tensors), None)
    tied = [each["tie_word_embeddings"] for each in (config, text) if "tie_word_embeddings" in each]
    if head is not None and not (tied and all(tied)):
        found.append(tensors.get(head))
    elif tied and not any(tied):
        raise ModelError(directory, f"has no head: none of {', '.join(_HEADS)}")
    _check_shapes(directory, found, text)
    return sorted(found, key=lambda tensor: (-_DTYPE_BYTES[tensor.dtype], tensor.name))


def _prefix(directory: Path, tensors: "_Tensors") -> str:
    """What the names of the text model begin with: nobody else's embedding has a norm beside it."""
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in tensors and f"{prefix}norm.weight" in tensors:
            return prefix
    looked_for = " or ".join(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)
    raise ModelError(directory, f"has no embedding with a final norm under {looked_for}")


def _check_shapes(directory: Path, found: list[Tensor], text: dict[str, Any]) -> None:
    hidden = text.get("hidden_size")
    for tensor in found:
        if tensor.dtype not in _DTYPE_BYTES:
            raise ModelError(directory, f"has {tensor.name} as {tensor.dtype}: it is quantized")
        norm = tensor.name.endswith("norm.weight")
        rows_are_right = norm or tensor.shape[:1] >= (text.get("vocab_size", 0),)
        if len(tensor.shape) != 2 - norm or tensor.shape[-1] != hidden or not rows_are_right:
            shape = list(tensor.shape)
            words = f"vocab_size {text.get('vocab_size')} and hidden_size {hidden}"
            raise ModelError(directory, f"has {tensor.name} of shape {shape}, and says {words}")


class _Tensors:
    """What a directory's safetensors files hold. Only the headers are read that are needed."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelError."""
        self._directory = directory
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}
        """File: (where its data begins, its header)."""
        self._file_of = self._by_index() or self._by_headers()
        if not self._file_of:
            raise ModelError(directory, "has no safetensors files to take the embedding from")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> Tensor:
        file = self._file_of[name]
        path = self._directory / file
        start, header = self._header(file)
        try:
            entry = header[name]
            dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
            first, last = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ModelError(path, f"has no usable entry for {name}") from None
        whole = _DTYPE_BYTES.get(dtype, 0) * prod(shape)
        fits = 0 <= first <= last <= path.stat().st_size - start
        if not fits or (dtype in _DTYPE_BYTES and last - first != whole):
            raise ModelError(path, f"has {name} at {first} to {last}, which cannot be: it is cut")
        return Tensor(name, dtype, shape, Span(last - first, path, start + first))

    def _by_index(self) -> dict[str, str]:
        path = self._directory / _INDEX
        if not path.is_file():
            return {}
        names = _json(path, _MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in names.values()
        ):
            raise ModelError(path, "has no weight_map of tensors to files beside it")
        return names

    def _by_headers(self) -> dict[str, str]:
        files = sorted(path.name for path in self._directory.glob("*.safetensors"))
        return {name: file for file in files for name in self._header(file)[1]}

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        if file not in self._headers:
            self._headers[file] = _read_header(self._directory / file)
        return self._headers[file]


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= min(path.stat().st_size - 8, _MAX_HEADER_BYTES):
                raise ModelError(path, "is not a safetensors file, or it is cut short")
            header = json.loads(stream.read(size))
    except OSError as error:
        raise ModelError(path, f"cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ModelError(path, "is not a safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise ModelError(path, "is not a safetensors file: its header is no map")
    header.pop("__metadata__", None)
    return 8 + size, header


def _header(tensors: Sequence[Tensor]) -> Span:
    """Of the file that these make. Equal for equal tensors, wherever they lie."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.span.length]
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    given = len(text).to_bytes(8, "little") + text
    return Span(len(given), given=given)


def _json(path: Path, limit_bytes: int) -> dict[str, Any]:
    try:
        if path.stat().st_size > limit_bytes:
            raise ModelError(path, f"has more than {limit_bytes} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(path, f"cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ModelError(path, "is no JSON") from None
    if not isinstance(value, dict):
        raise ModelError(path, "is no map")
    return value


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
