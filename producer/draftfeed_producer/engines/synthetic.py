"""The synthetic engine: samples without a model, for chaos, scale and transport tests.

Everything in a sample follows from its id and the configuration, so that the other end can
check content by making the sample again.
"""

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from statistics import NormalDist
from typing import cast

import msgspec
import numpy as np

from draftfeed_producer.prompts import Prompt, line_ids
from draftfeed_producer.target import check_layer_ids
from draftfeed_proto.descriptor import Descriptor, Final, dflash_layer_ids
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import LayerCounters, Sample

_LEVELS = 1 << 16
_TAIL = 0.15
"""Tukey's h: with it the exponent's entropy is 2.7 bits, as in real residual streams."""
_MASSIVE = 24960.0
"""The massive activation of SmolLM2; real models have such values in a channel or two."""
_SPREAD = 0.6
"""Sigma of the lognormal lengths."""
_BURST_SECONDS = 0.25
_HELD_BYTES = 64 << 20
"""States up to this size are made once and held; larger ones are made a few rows at a time,
whenever they are looked at."""
_CACHED_WORDS = 1 << 15
"""Random words drawn at a time: they stay in the processor's cache until they are looked up."""


_POSITIVE = (
    "samples",
    "epochs",
    "shard_size",
    "prompt_tokens",
    "response_tokens",
    "hidden_size",
    "vocab_size",
)


class SyntheticConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="synthetic",
):
    """The stream of a target that does not exist."""

    samples: int = 1000
    """How many prompts there are: the lines of a file that does not exist."""
    epochs: int = 1
    """How often every prompt is answered."""
    shard_size: int = 4096
    """Prompts per shard; a shard is owned by one producer."""
    tokens_per_second: float = 0.0
    """Rows made per second, at most; 0 = as fast as one core can."""
    prompt_tokens: int = 328
    """Mean length of a prompt."""
    response_tokens: int = 500
    """Mean length of a response."""
    max_tokens: int = 8192
    """Longest sample."""
    num_layers: int = 64
    layer_ids: tuple[int, ...] | None = None
    """None: five by the DFlash formula."""
    final: Final = "none"
    """Whether a final state comes along; its values are another layer's."""
    hidden_size: int = 5120
    vocab_size: int = 151_936
    seed: int = 0
    """Another seed is another target: it is part of the revision."""

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, it must be at least 1")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}, it must be at least 2")
        if self.tokens_per_second < 0:
            raise ValueError(f"tokens_per_second is {self.tokens_per_second}, it must be >= 0")

    @property
    def dataset(self) -> str:
        """Hash of the prompts. How fast they are answered is no part of it, nor how often."""
        content = msgspec.structs.replace(self, tokens_per_second=0.0, epochs=1)
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]

    @property
    def shards(self) -> Shards:
        """All there are."""
        count = -(-self.samples // self.shard_size)
        return Shards(self.dataset, 0, (0, count), self.epochs)

    def descriptor(self) -> Descriptor:
        """Raises LayerIdError, LimitExceeded, or ValueError when the DFlash formula fails."""
        layer_ids = self.layer_ids
        if layer_ids is None:
            layer_ids = dflash_layer_ids(self.num_layers)
        return Descriptor(
            model="synthetic",
            revision=str(self.seed),
            tokenizer_hash="none",
            chat_template_hash="none",
            layer_ids=check_layer_ids(layer_ids, self.num_layers),
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            final=self.final,
        )


class SyntheticEngine:
    """Ignores what a prompt says, uses only its id and key."""

    loading = False

    def __init__(self, config: SyntheticConfig) -> None:
        """Raises LayerIdError."""
        self.descriptor = config.descriptor()
        self._config = config
        self._stopped = threading.Event()
        self.captured = 0
        self.recaptured = 0

    def max_rows(self, prompt_tokens: int) -> int:
        """See `Engine.max_rows`."""
        return self._config.max_tokens - 1

    def run(
        self, prompts: Iterator[Prompt], give_up: Callable[[SampleId, str], None] | None = None
    ) -> Iterator[Sample]:
        """See `Engine.run`. Gives nothing up."""
        pace = _Pace(self._config.tokens_per_second)
        for prompt in prompts:
            if self._stopped.is_set():
                return
            sample = synthetic_sample(prompt.id, self._config, prompt.key)
            if self._stopped.wait(pace.delay_seconds(len(sample.hidden_states))):
                return
            self.captured += len(sample.hidden_states)
            yield sample

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self.stop()


class _Pace:
    """A rate that is never exceeded for long: time lost to back-pressure is not made up for."""

    def __init__(self, tokens_per_second: float) -> None:
        self._rate = tokens_per_second
        self._due = -math.inf

    def delay_seconds(self, tokens: int) -> float:
        """How long to wait before these tokens may go."""
        if not self._rate:
            return 0.0
        now = time.monotonic()
        earliest = now if self._due == -math.inf else now - _BURST_SECONDS
        self._due = max(self._due, earliest) + tokens / self._rate
        return max(0.0, self._due - now)


def synthetic_ids(config: SyntheticConfig) -> IdSet:
    """Ids of all prompts of a data set that follows from the configuration."""
    return line_ids(config.shards, config.samples, config.shard_size)


def synthetic_prompt(id: SampleId) -> Prompt:
    return Prompt(id, str(id.ordinal), np.zeros(1, np.int32))


def synthetic_prompts(config: SyntheticConfig) -> Iterator[Prompt]:
    """All of them, in order."""
    return map(synthetic_prompt, synthetic_ids(config))


def synthetic_sample(id: SampleId, config: SyntheticConfig, key: str | None = None) -> Sample:
    """The sample that `id` names: equal on every machine with the same numpy.

    States have a real stream's statistics: bf16-sourced, heavy tails, a rare massive value.
    They are independent of each other, so a codec that looks for repetition finds none. Those of
    a long sample are `SyntheticStates`, which hold nothing.
    """
    rng = _generator(id, config.seed)
    prompt = _length(rng, config.prompt_tokens, config.max_tokens - 1)
    response = _length(rng, config.response_tokens, config.max_tokens - prompt)
    n = prompt + response - 1
    layers = config.descriptor().layers
    loss_mask = np.zeros(n + 1, np.uint8)
    loss_mask[prompt:] = 1
    input_ids = rng.integers(0, config.vocab_size, n + 1, np.int32)
    states = SyntheticStates(rng.bit_generator, (n, layers, config.hidden_size))
    held = states[:] if states.nbytes <= _HELD_BYTES else cast(np.ndarray, states)
    return Sample(
        id=id,
        key=str(id.ordinal) if key is None else key,
        input_ids=input_ids,
        loss_mask=loss_mask,
        hidden_states=held,
        counters=(LayerCounters(0, 0, 0, 0),) * layers,
        finish_reason="length" if prompt + response == config.max_tokens else "stop",
        sampling={"seed": config.seed},
    )


class SyntheticStates:
    """float16[n, layers, hidden] by looking 16 random bits up in the inverse distribution.

    As an array is to who reads it by rows; the rows are made when they are asked for, so that a
    sample of any length takes no memory. For one thread at a time.
    """

    dtype = np.dtype(np.float16)

    def __init__(self, words: np.random.BitGenerator, shape: tuple[int, int, int]) -> None:
        """words: a PCG64, which can jump to where a row's random words begin."""
        assert isinstance(words, np.random.PCG64)
        self.shape = shape
        self.nbytes = 2 * math.prod(shape)
        self._words, self._start = words, words.state
        self._row_words = -(-shape[1] * shape[2] // 4)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """float16[rows, layers, hidden], made anew."""
        first, stop, step = rows.indices(len(self))
        assert step == 1, "rows are read in stretches"
        states = np.empty((max(0, stop - first), *self.shape[1:]), self.dtype)
        self._words.state = self._start
        self._words.advance(first * self._row_words)
        block = max(1, _CACHED_WORDS // self._row_words)
        for at in range(0, len(states), block):
            self._fill(states[at : at + block])
        return states

    def _fill(self, states: np.ndarray) -> None:
        """The next rows, in place."""
        rows, layers, hidden = states.shape
        words = self._words.random_raw(rows * self._row_words).view(np.uint16)
        bits = words.reshape(rows, -1)[:, : layers * hidden].reshape(states.shape)
        for layer in range(layers):
            states[:, layer] = _quantiles(layer).take(bits[:, layer])


def _generator(id: SampleId, seed: int) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed}:{id}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def _length(rng: np.random.Generator, mean: int, longest: int) -> int:
    location = math.log(mean) - _SPREAD**2 / 2
    return min(max(1, round(rng.lognormal(location, _SPREAD))), longest)


@cache
def _quantiles(layer: int) -> np.ndarray:
    """float16[65536]: one layer's inverse distribution. Later layers are wider, as in a model."""
    normal = NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / _LEVELS) for i in range(_LEVELS)])
    scale = 4.0 * 2 ** (layer % 4)  # at 4 the smallest of them is still a normal fp16 number
    x = (scale * z * np.exp(_TAIL * z * z / 2)).astype(np.float32)
    x[[0, -1]] = -_MASSIVE, _MASSIVE
    bits = x.view(np.uint32)
    bf16 = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    quantiles: np.ndarray = bf16.view(np.float32).astype(np.float16)
    return quantiles
