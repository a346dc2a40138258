"""What is known of a target from its directory, before its weights are loaded."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from draftfeed_producer.errors import LayerIdError, MissingPackageError, ModelError
from draftfeed_proto.assets import TARGET_MANIFEST
from draftfeed_proto.descriptor import Descriptor, Final, dflash_layer_ids

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
_VOLATILE = {"transformers_version", "_name_or_path"}
"""Keys of config.json that differ between two copies of one model."""
_BLOCKS = 16
_BLOCK_BYTES = 64 << 10
_HEADER_LIMIT_BYTES = 100 << 20


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The target model and the layers to tap."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    """Hugging Face model directory: config, tokenizer, weights. Nothing is downloaded."""
    layer_ids: tuple[int, ...] | None = None
    """0-based ids: k is the output of decoder block k. None: five by the DFlash formula."""
    final: Final = "none"
    """Whether the final state comes along as one more layer: the last block's output (prenorm), or
    that after the final norm (postnorm), which is all that SGLang gives out."""
    name: str | None = None
    """Name in the descriptor. None: the hub's name for a hub snapshot, else the directory's."""
    revision: str | None = None
    """Revision in the descriptor. None: the snapshot's commit, else a digest of the files."""


class Target:
    """A target's config, tokenizer and identity. Holds no weights."""

    def __init__(self, path: Path, config: Any, tokenizer: Any, name: str, revision: str) -> None:
        self.path = path
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision

    @property
    def text_config(self) -> Any:
        """The language model's part of the config (multimodal models wrap it)."""
        return self.config.get_text_config(decoder=True)

    @property
    def num_layers(self) -> int:
        return int(self.text_config.num_hidden_layers)

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence the target was made for."""
        return int(self.text_config.max_position_embeddings)

    def descriptor(
        self, layer_ids: Sequence[int] | None = None, final: Final = "none"
    ) -> Descriptor:
        """Raises LayerIdError, LimitExceeded for more layers than a sample may have, and ValueError
        when None is given and the DFlash formula fails."""
        if layer_ids is None:
            layer_ids = dflash_layer_ids(self.num_layers)
        return Descriptor(
            model=self.name,
            revision=self.revision,
            tokenizer_hash=tokenizer_hash(self.tokenizer),
            chat_template_hash=chat_template_hash(self.tokenizer),
            layer_ids=check_layer_ids(layer_ids, self.num_layers),
            num_layers=self.num_layers,
            hidden_size=int(self.text_config.hidden_size),
            vocab_size=int(self.text_config.vocab_size),
            final=final,
        )


def load_target(config: TargetConfig) -> Target:
    """Reads config and tokenizer, without touching the network.

    Raises ModelError when the directory does not hold a model, MissingPackageError.
    """
    path = Path(config.path).expanduser()
    _check_readable(path)
    if not (path / "config.json").is_file():
        raise ModelError(path, "is not a model directory: it has no config.json")
    if (path / TARGET_MANIFEST).is_file():
        words = "was fetched for a trainer: it has the embedding and head of a model, and no blocks"
        raise ModelError(path, words)
    if not _weight_files(path):
        raise ModelError(path, "has no weights (*.safetensors)")
    model_config, tokenizer = _load_parts(path)
    name = config.name or _hub_name(path) or path.resolve().name
    revision = config.revision or _hub_commit(path) or weights_digest(path)
    return Target(path, model_config, tokenizer, name, revision)


def _check_readable(path: Path) -> None:
    """A service has a user of its own, and the model may be another one's."""
    try:
        files = [file for file in path.iterdir() if file.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        words = "is not a directory; a target is a Hugging Face model directory"
        raise ModelError(path, words) from None
    except OSError as error:
        raise ModelError(path, f"cannot be read by this user: {error.strerror}") from None
    for file in files:
        if not os.access(file, os.R_OK):
            raise ModelError(path, f"has a file that this user cannot read: {file.name}")


def end_tokens(target: Target) -> tuple[int, ...]:
    """What the model and its tokenizer end a response with, in rising order."""
    file = target.path / "generation_config.json"
    own = json.loads(file.read_bytes()).get("eos_token_id") if file.is_file() else None
    if own is None:
        own = target.text_config.eos_token_id
    ends: set[int] = {own} if isinstance(own, int) else set(own or ())
    if target.tokenizer.eos_token_id is not None:
        ends.add(int(target.tokenizer.eos_token_id))
    return tuple(sorted(ends))


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The ids as a tuple. The last block's, num_layers - 1, is fine: its output is pre-norm.

    Raises LayerIdError.
    """
    outside = [k for k in layer_ids if not 0 <= k < num_layers]
    if not layer_ids:
        raise LayerIdError(layer_ids, num_layers, "there are none")
    if outside:
        reason = f"{outside[0]} is out of range, the target has {num_layers} layers"
        raise LayerIdError(layer_ids, num_layers, reason)
    for low, high in pairwise(layer_ids):
        if low == high or layer_ids.count(high) > 1:
            raise LayerIdError(layer_ids, num_layers, f"{high} is repeated")
        if low > high:
            raise LayerIdError(layer_ids, num_layers, f"{high} comes after {low}: sort them")
    return tuple(layer_ids)


def tokenizer_hash(tokenizer: Any) -> str:
    """16 hex digits over what turns text into ids; equal for re-saved copies of a tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    # How a batch is padded or cut is a setting of the caller, not of the tokenizer.
    for setting in ("padding", "truncation"):
        state.pop(setting, None)
    return _digest(json.dumps(state, sort_keys=True).encode())


def chat_template_hash(tokenizer: Any) -> str:
    """16 hex digits over the chat template, "none" when there is none."""
    template = tokenizer.chat_template
    if not template:
        return "none"
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return _digest(text.encode())


def weights_digest(path: Path) -> str:
    """16 hex digits over config.json and, of each weight file, its size, its safetensors header
    (names, shapes, dtypes) and 16 blocks of 64 KiB spread over it.

    Reading all of a 55 GB target at each start would take minutes; a fine-tune changes every
    tensor, so samples find it.
    """
    config = json.loads((path / "config.json").read_bytes())
    stable = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(stable, sort_keys=True).encode())
    for file in _weight_files(path):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for block in _sampled_blocks(file):
            digest.update(block)
    return digest.hexdigest()[:16]


def _sampled_blocks(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = 0
        if file.suffix == ".safetensors":
            first = 8 + int.from_bytes(stream.read(8), "little")
            if first > min(size, _HEADER_LIMIT_BYTES):
                raise ModelError(file, "is not a safetensors file, or it is cut short")
            stream.seek(0)
            yield stream.read(first)
        room = max(0, size - first - _BLOCK_BYTES)
        for at in sorted({first + room * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
            stream.seek(at)
            yield stream.read(_BLOCK_BYTES)


def _weight_files(path: Path) -> list[Path]:
    for pattern in _WEIGHTS:
        if files := sorted(path.glob(pattern)):
            return files
    return []


def _load_parts(path: Path) -> tuple[Any, Any]:
    try:
        from transformers import AutoConfig, AutoTokenizer
    except ImportError:
        raise MissingPackageError("transformers", "transformers") from None
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        text_config = config.get_text_config(decoder=True)
    # transformers raises almost anything on a broken file; the user needs the one line of it.
    except Exception as error:  # noqa: BLE001
        raise ModelError(path, f"its config cannot be used: {_one_line(error)}") from None
    for field in _NEEDED:
        if getattr(text_config, field, None) is None:
            raise ModelError(path, f"is not a language model: its config has no {field}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # noqa: BLE001
        raise ModelError(path, f"its tokenizer cannot be loaded: {_one_line(error)}") from None
    # Without tokenizer files, transformers makes an empty tokenizer up for models it knows.
    if not tokenizer("a")["input_ids"]:
        raise ModelError(path, "has no tokenizer (tokenizer.json)")
    return config, tokenizer


def _hub_name(path: Path) -> str | None:
    """`models--org--name/snapshots/<commit>` is how the hub's cache keeps org/name."""
    repository = path.absolute().parent.parent.name
    if _hub_commit(path) is None or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def _hub_commit(path: Path) -> str | None:
    path = path.absolute()
    in_snapshots = path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name)
    return path.name if in_snapshots else None


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{lines[0]} ({type(error).__name__})" if lines else type(error).__name__


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
