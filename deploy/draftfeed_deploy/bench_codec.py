"""How small codecs make hidden states, and how fast: side by side, in turns, on one thread.

`draftfeed bench codec` measures with it on the states of a spool, `benchmarks/codec.py` on those
of a model and against other libraries.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np

from draftfeed_deploy.errors import NotLossless
from draftfeed_proto import codecs
from draftfeed_proto.codecs import Chooser, Codec, packed

Buffer: TypeAlias = bytes | bytearray | memoryview

MEMORY_BYTES = 64 << 20
"""A turn goes over so many bytes, each at an address of its own, and writes elsewhere: states come
from memory and go to memory. What stays in a cache is copied up to three times as fast."""
MOST_TIMES = 32
"""That a turn goes over few and small chunks."""


class Encoded(NamedTuple):
    payload: Buffer
    codec: int | None = None
    """Number of the one that was chosen for this chunk, where there is a choice."""


class Coder(Protocol):
    """What is measured. Only one thread calls it, and it may keep memory between calls."""

    name: str
    by_layer: bool
    """It gets values that already lie layer after layer [layers, rows, hidden], as they do in a
    chunk; otherwise rows as they are captured, [rows, layers, hidden]."""

    def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
        """values: 16-bit, contiguous; float16 for fp16, uint16 for the bit patterns of bf16.
        out: as large as the values. The payload lies in it, or in memory of its own."""
        ...

    def decode(self, encoded: Encoded, out: np.ndarray) -> np.ndarray | Buffer:
        """The values: `out`, or memory of its own."""
        ...


class Rates(msgspec.Struct, frozen=True):
    """GB of states per second; a GB is 10^9 bytes."""

    encode: float
    decode: float


Round: TypeAlias = dict[str, Rates]
"""By the coder's name."""


class Memcpy:
    """What nothing that moves the bytes can be faster than."""

    name = "memcpy"
    by_layer = True

    def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
        np.copyto(np.frombuffer(out, values.dtype).reshape(values.shape), values)
        return Encoded(out)

    def decode(self, encoded: Encoded, out: np.ndarray) -> np.ndarray:
        np.copyto(out, np.frombuffer(encoded.payload, out.dtype).reshape(out.shape))
        return out


class Chosen:
    """A codec of ours as chunks are encoded with it: where it saves too little, another one is
    taken, and the time it took to find out counts."""

    by_layer = False

    def __init__(self, name: str, chooser: Chooser, *decoders: Codec) -> None:
        """decoders: instead of those that this process would decode with."""
        self.name = name
        self._chooser = chooser
        self._decoders = {codec.number: codec for codec in decoders}

    def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
        number, size = self._chooser.encode(values, out)
        return Encoded(out[:size], number)

    def decode(self, encoded: Encoded, out: np.ndarray) -> np.ndarray:
        assert encoded.codec is not None
        codec = self._decoders.get(encoded.codec) or codecs.by_number(encoded.codec)
        codec.decode(memoryview(encoded.payload), out)
        return out


def own_coders() -> list[Coder]:
    """draftfeed's codecs, `packed` once for each of its implementations that runs here."""
    return [
        Memcpy(),
        Chosen("raw", codecs.by_name("raw")),
        Chosen("zstd", codecs.by_name("zstd")),
        *map(_packed, packed.available().implementations),
    ]


class Sizes(msgspec.Struct, frozen=True):
    """What one coder makes of each chunk."""

    encoded_bytes: list[int]
    codecs: Counter[str]
    """How many chunks each codec was chosen for; empty where there is no choice."""

    def left_to_others(self, name: str) -> str:
        """In words, for the coder of that name; empty when it encoded all chunks itself."""
        own = name.partition(" ")[0]
        others = [f"{codec} {count}" for codec, count in self.codecs.items() if codec != own]
        return f"{', '.join(others)} of {len(self.encoded_bytes)}" if others else ""


class Comparison:
    """Coders side by side over the same chunks."""

    def __init__(self, coders: Sequence[Coder], chunks: Sequence[np.ndarray]) -> None:
        """chunks: 16-bit states [rows, layers, hidden], contiguous; one at least.

        All of it is encoded and decoded, and compared: no speed is worth anything without that.
        Raises NotLossless.
        """
        self.coders = coders
        self.chunk_bytes = [chunk.nbytes for chunk in chunks]
        by_layer = [np.ascontiguousarray(chunk.transpose(1, 0, 2)) for chunk in chunks]
        self._values = {False: list(chunks), True: by_layer}
        self._times = min(math.ceil(MEMORY_BYTES / sum(self.chunk_bytes)), MOST_TIMES)
        self._memory = [np.zeros(size, np.uint8) for size in self.chunk_bytes * self._times]
        self._encoded = {coder.name: self._verified(coder) for coder in coders}
        self.sizes = {name: _sizes(encoded) for name, encoded in self._encoded.items()}
        """By the coder's name."""

    def rounds(self, count: int, progress: Callable[[], None] = lambda: None) -> Iterator[Round]:
        """In a round each coder has a turn; who is first goes round. Calls `progress` after each
        of count * len(coders) turns."""
        for number in range(count):
            first = number % len(self.coders)
            turns = {}
            for coder in (*self.coders[first:], *self.coders[:first]):
                turns[coder.name] = Rates(self._encode_rate(coder), self._decode_rate(coder))
                progress()
            yield {coder.name: turns[coder.name] for coder in self.coders}

    def _encode_rate(self, coder: Coder) -> float:
        values = self._values[coder.by_layer] * self._times
        jobs = [(value.copy(), out.data) for value, out in zip(values, self._memory, strict=True)]
        begin = time.perf_counter()
        for value, payload in jobs:
            coder.encode(value, payload)
        return self._rate(begin)

    def _decode_rate(self, coder: Coder) -> float:
        values = self._values[coder.by_layer] * self._times
        jobs = [
            (item._replace(payload=bytes(memoryview(item.payload))), _like(value, out))
            for item, value, out in zip(
                self._encoded[coder.name] * self._times, values, self._memory, strict=True
            )
        ]
        begin = time.perf_counter()
        for encoded, out in jobs:
            coder.decode(encoded, out)
        return self._rate(begin)

    def _rate(self, begin: float) -> float:
        seconds = time.perf_counter() - begin
        return self._times * sum(self.chunk_bytes) / seconds / 1e9

    def _verified(self, coder: Coder) -> list[Encoded]:
        return [self._round_trip(coder, value) for value in self._values[coder.by_layer]]

    def _round_trip(self, coder: Coder, value: np.ndarray) -> Encoded:
        before, out = value.tobytes(), np.empty_like(value)
        payload = memoryview(bytearray(value.nbytes))
        coder.encode(value, payload)
        encoded = coder.encode(value, payload)  # again: the first may have spoilt what it was given
        encoded = encoded._replace(payload=bytes(encoded.payload))
        for _ in range(2):
            out.fill(0)
            if np.frombuffer(coder.decode(encoded, out), np.uint8).tobytes() != before:
                raise NotLossless(coder.name)
        if value.tobytes() != before:
            raise NotLossless(coder.name)
        return encoded


def _like(value: np.ndarray, memory: np.ndarray) -> np.ndarray:
    return memory.view(value.dtype).reshape(value.shape)


class Spread(NamedTuple):
    """Of one figure, over all rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} {f'{self.least:.2f}-{self.most:.2f}':11}"


class Speed(NamedTuple):
    """Of one coder: GB/s, and each round's over those of memcpy in the same round."""

    encode: Spread
    encode_memcpy: Spread
    decode: Spread
    decode_memcpy: Spread

    def __str__(self) -> str:
        return "".join(f"{figure!s:>{width}}" for figure, width in zip(self, _WIDTHS, strict=True))


_TITLES = ("encode GB/s", "x memcpy", "decode GB/s", "x memcpy")
_WIDTHS = (20, 18, 20, 18)
SPEED_HEADER = "".join(
    f"{title:>{width - 8}}{'':8}" for title, width in zip(_TITLES, _WIDTHS, strict=True)
)


def speed_of(name: str, rounds: Sequence[Round]) -> Speed:
    own, memcpy = [turns[name] for turns in rounds], [turns[Memcpy.name] for turns in rounds]
    pairs = list(zip(own, memcpy, strict=True))
    return Speed(
        _spread([rates.encode for rates in own]),
        _spread([rates.encode / most.encode for rates, most in pairs]),
        _spread([rates.decode for rates in own]),
        _spread([rates.decode / most.decode for rates, most in pairs]),
    )


def _sizes(encoded: list[Encoded]) -> Sizes:
    chosen = [item.codec for item in encoded if item.codec is not None]
    names = Counter(codecs.by_number(number).name for number in chosen)
    return Sizes([len(item.payload) for item in encoded], names)


def _spread(values: list[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


class _Forced:
    """`packed` in one of its implementations, whatever this process would take."""

    name, number = codecs.PACKED.name, codecs.PACKED.number

    def __init__(self, implementation: packed.Implementation) -> None:
        self.encode, self.decode = implementation.encode, implementation.decode


def _packed(implementation: str) -> Chosen:
    codec = _Forced(packed.available().implementations[implementation])
    return Chosen(f"packed {implementation}", codecs.packing(codec), codec)
