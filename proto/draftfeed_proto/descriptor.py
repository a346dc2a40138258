"""The descriptor: everything that must match before a byte is trained on."""

import hashlib
from typing import Any, Literal

import msgspec

from draftfeed_proto.errors import DescriptorMismatch, TooFewLayers

Dtype = Literal["fp16", "bf16"]
Final = Literal["none", "prenorm", "postnorm"]

SCHEMA = 1


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries. Two streams with equal `stream_id()` may feed one training run."""

    schema: int = SCHEMA
    model: str
    revision: str
    tokenizer_hash: str
    chat_template_hash: str
    layer_ids: tuple[int, ...]
    """0-based: id k is the output of decoder block k, the residual stream before any norm.

    Hugging Face's `hidden_states` holds it at index k+1; vLLM's and ModelOpt's ids are k+1.
    """
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: Dtype = "fp16"
    """dtype of the states on the wire."""
    final: Final = "none"
    """Whether the target's final state comes along, before or after its norm."""

    def stream_id(self) -> str:
        """32 hex digits over every field, in declaration order."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]

    def row_bytes(self) -> int:
        """Bytes of one token's states, uncompressed."""
        return 2 * len(self.layer_ids) * self.hidden_size


class Expectation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a consumer insists on; a field left at None matches anything."""

    stream_id: str | None = None
    model: str | None = None
    revision: str | None = None
    tokenizer_hash: str | None = None
    layer_ids: tuple[int, ...] | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    dtype: Dtype | None = None
    final: Final | None = None

    def check(self, descriptor: Descriptor) -> None:
        """Raises DescriptorMismatch for the first field that differs, with both values."""
        for field in self.__struct_fields__:
            expected = getattr(self, field)
            served = _served(descriptor, field)
            if expected is not None and expected != served:
                raise DescriptorMismatch(field, expected, served)


def _served(descriptor: Descriptor, field: str) -> Any:
    return descriptor.stream_id() if field == "stream_id" else getattr(descriptor, field)


def dflash_layer_ids(num_layers: int, n: int = 5) -> tuple[int, ...]:
    """DFlash's default taps, `round(1 + i*((N-3)-1)/(n-1))`: 64 layers give 1, 16, 31, 46, 61.

    Newer drafters use other ids, so this is a default to write into a configuration, never an
    assumption. Raises TooFewLayers when there are no n different ids.
    """
    if n < 1 or num_layers < n + 3:
        raise TooFewLayers(num_layers, n)
    if n == 1:
        return (1,)
    return tuple(round(1 + i * (num_layers - 4) / (n - 1)) for i in range(n))
