"""The descriptor: everything that must match before a byte is trained on."""

import hashlib
from typing import Annotated, Any, Literal

import msgspec

from draftfeed_proto.errors import DescriptorMismatch, LimitExceeded, TooFewLayers
from draftfeed_proto.limits import MAX_HIDDEN, MAX_LAYERS
from draftfeed_proto.wire import Count, Name

Dtype = Literal["fp16", "bf16"]
Final = Literal["none", "prenorm", "postnorm"]
LayerIds = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
HiddenSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_HIDDEN)]

SCHEMA = 1


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries. Two streams with equal `stream_id()` may feed one training run."""

    schema: Count = SCHEMA
    model: Name
    revision: Name
    tokenizer_hash: Name
    chat_template_hash: Name
    layer_ids: LayerIds
    """0-based: id k is the output of decoder block k, the residual stream before any norm.

    Hugging Face's `hidden_states` holds it at index k+1; vLLM's and ModelOpt's ids are k+1.
    """
    num_layers: Count
    hidden_size: HiddenSize
    vocab_size: Count
    dtype: Dtype = "fp16"
    """dtype of the states on the wire."""
    final: Final = "none"
    """Whether the target's final state comes along, as one more layer behind those of `layer_ids`.

    prenorm: the output of the last decoder block. postnorm: that after the target's final norm,
    which is what its head is given.
    """

    def __post_init__(self) -> None:
        """Raises LimitExceeded."""
        if self.layers > MAX_LAYERS:
            raise LimitExceeded("layers, the final state among them", self.layers, MAX_LAYERS)

    @property
    def layers(self) -> int:
        """L of a row: the tapped layers, and the final state where there is one."""
        return len(self.layer_ids) + (self.final != "none")

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Of the layers of a row, for people: the ids, and `prenorm` or `postnorm`."""
        final = () if self.final == "none" else (self.final,)
        return (*map(str, self.layer_ids), *final)

    def stream_id(self) -> str:
        """32 hex digits over every field, in declaration order.

        A field that a later version adds must be left out of the hash while it has its default:
        an upgrade must not give old spools and checkpoints another stream.
        """
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]

    def row_bytes(self) -> int:
        """Bytes of one token's states, uncompressed."""
        return 2 * self.layers * self.hidden_size


class Expectation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a consumer insists on; a field left at None matches anything."""

    stream_id: Name | None = None
    model: Name | None = None
    revision: Name | None = None
    tokenizer_hash: Name | None = None
    chat_template_hash: Name | None = None
    layer_ids: LayerIds | None = None
    num_layers: Count | None = None
    hidden_size: HiddenSize | None = None
    vocab_size: Count | None = None
    dtype: Dtype | None = None
    final: Final | None = None

    def check(self, descriptor: Descriptor) -> None:
        """Raises DescriptorMismatch for the first field that differs, with both values.

        Both ends check: an older producer ignores a field that it does not know.
        """
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
