"""`draftfeed producer --check`: a few prompts through the whole line, before the week starts.

Nothing of the configured run is touched: spool and server are temporary ones, the first where
temporary files go, the second at a loopback port of the system's choice.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from draftfeed_deploy.check_final import FinalStates, check_final
from draftfeed_deploy.check_passage import Passage, pass_through
from draftfeed_deploy.check_rows import (
    TOLERANCES,
    Compared,
    compare,
    given,
    with_another_token,
)
from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.foreground import phase
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import (
    TARGETLESS,
    Engine,
    SGLangConfig,
    TransformersConfig,
    make_engine,
)
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.service import open_prompts
from draftfeed_producer.sources import PromptSource
from draftfeed_producer.target import load_target
from draftfeed_proto import codecs
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample

PROMPTS = 3
NEW_TOKENS = 32
"""At most, of each response."""
CAPTURE_SECONDS = 300.0
"""For each of three captures; the first may start the engine before."""


class Captured(NamedTuple):
    samples: dict[SampleId, Sample]
    rows_per_second: float | None
    """None: too little to tell."""
    computed: int
    """Rows that the target made: fewer than there are where a prefix cache had the others."""


class Changed(NamedTuple):
    """A sample captured once more with another token at one position."""

    position: int
    before: Compared
    """The rows before it, which may not differ."""
    own: Compared
    """Its own row, which must."""


class Findings(NamedTuple):
    descriptor: Descriptor
    longest_rows: int
    """Of the longest sample that the configuration allows."""
    tolerance: float
    prompts: list[Prompt]
    live: Captured
    """As configured: while generating, or in prefill mode in one pass."""
    again: Captured
    """The same tokens in one pass."""
    compared: dict[SampleId, Compared]
    """Of those captured twice."""
    changed: Changed | None
    """None: nothing was captured that could be changed."""
    final: FinalStates | None
    """None: the stream has no final states."""
    passage: Passage | None
    """None: nothing was captured that could be sent."""
    recaptured: int


def run_check(config: ProducerConfig, where: str, console: Console) -> Findings:
    """Raises ConfigError, UnavailableISA, and what the engine and its line raise."""
    short = bounded(config, where)
    codecs.PACKED.prepare()
    with ExitStack() as stack:
        with phase(console, "reading the prompt file and loading the target"):
            source = open_prompts(config, stack)
            engine = make_engine(short.engine, config.target, config.capture)
        stack.callback(engine.close)
        return check(config, engine, source, console)


def bounded(config: ProducerConfig, where: str) -> ProducerConfig:
    """With short responses. Raises ConfigError for an engine that there is nothing to check of."""
    engine = config.engine
    if isinstance(engine, TARGETLESS):
        raise ConfigError(where, "--check runs a target, and this engine has none")
    tokens = min(engine.sampling.max_new_tokens, NEW_TOKENS)
    sampling = msgspec.structs.replace(engine.sampling, max_new_tokens=tokens)
    return msgspec.structs.replace(
        config, engine=msgspec.structs.replace(engine, sampling=sampling)
    )


def check(
    config: ProducerConfig, engine: Engine, source: PromptSource, console: Console
) -> Findings:
    """config: the whole one; engine: one with `bounded` responses. Raises ProducerError,
    ConsumerError."""
    descriptor = engine.descriptor
    prompts = _first_prompts(source)
    with phase(console, f"capturing {len(prompts)} prompts ({config.capture.mode})"):
        live = _capture(engine, prompts, _start_seconds(config) + CAPTURE_SECONDS)
    tolerance = TOLERANCES[_compute_dtype(config)]
    with phase(console, "capturing the same tokens once more, in one pass"):
        again = _capture(engine, [given(sample) for sample in live.samples.values()])
        compared = _compare_all(live, again, descriptor.layer_names, tolerance)
        changed = _change(engine, again, tolerance)
    target, _ = config.needed()
    final = check_final(Path(target.path).expanduser(), descriptor, live.samples.values())
    passage = None
    if live.samples:
        with phase(console, "spool, server and consumer"):
            samples = list(live.samples.values())
            passage = pass_through(config.spool, descriptor, source.shards, samples)
    return Findings(
        descriptor,
        _longest_rows(config, source),
        tolerance,
        prompts,
        live,
        again,
        compared,
        changed,
        final,
        passage,
        engine.recaptured,
    )


def _first_prompts(source: PromptSource) -> list[Prompt]:
    """Responses that are given are cut: it is bounded how long this takes."""
    found = (prompt for id in source.ids if (prompt := source.find(id)) is not None)
    return [_shortened(prompt) for prompt in islice(found, PROMPTS)]


def _shortened(prompt: Prompt) -> Prompt:
    if prompt.response_ids is None:
        return prompt
    return msgspec.structs.replace(prompt, response_ids=prompt.response_ids[:NEW_TOKENS])


def _start_seconds(config: ProducerConfig) -> float:
    """An engine that starts at the first prompt limits itself how long that takes."""
    engine = config.engine
    return engine.start_timeout_seconds if isinstance(engine, SGLangConfig) else 0.0


def _capture(
    engine: Engine, prompts: Sequence[Prompt], limit_seconds: float = CAPTURE_SECONDS
) -> Captured:
    """In the order of the prompts; what is not there in time is missing."""
    at_start: list[tuple[float, int]] = []

    def feed() -> Iterator[Prompt]:
        """What is asked for once more is asked for by an engine that runs."""
        for number, prompt in enumerate(prompts):
            if number == 1:
                at_start.append((time.monotonic(), engine.captured))
            yield prompt

    before = engine.captured
    timer = threading.Timer(limit_seconds, engine.stop)
    timer.start()
    try:
        samples = {sample.id: sample for sample in engine.run(feed())}
    finally:
        timer.cancel()
    ordered = {p.id: samples[p.id] for p in prompts if p.id in samples}
    return Captured(ordered, _rate(at_start, engine.captured), engine.captured - before)


def _rate(at_start: list[tuple[float, int]], captured: int) -> float | None:
    if not at_start:
        return None
    began, before = at_start[0]
    return (captured - before) / max(time.monotonic() - began, 1e-6)


def _compare_all(
    live: Captured, again: Captured, layer_names: Sequence[str], tolerance: float
) -> dict[SampleId, Compared]:
    return {
        id: compare(again.samples[id].hidden_states, sample.hidden_states, layer_names, tolerance)
        for id, sample in live.samples.items()
        if id in again.samples
    }


def _change(engine: Engine, again: Captured, tolerance: float) -> Changed | None:
    """Two captures that put every row one place too far agree with each other; this one finds
    that a row knows of a token that comes after it."""
    long = [sample for sample in again.samples.values() if len(sample.hidden_states) > 1]
    if not long:
        return None
    sample, names = long[0], engine.descriptor.layer_names
    prompt, position = with_another_token(sample, engine.descriptor.vocab_size)
    other = _capture(engine, [prompt]).samples.get(sample.id)
    if other is None:
        return None
    got, want = other.hidden_states, sample.hidden_states
    own = slice(position, position + 1)
    return Changed(
        position,
        compare(got[:position], want[:position], names, tolerance),
        compare(got[own], want[own], names, tolerance),
    )


def _compute_dtype(config: ProducerConfig) -> str:
    """float32 or bfloat16"""
    engine, (target, _) = config.engine, config.needed()
    assert not isinstance(engine, TARGETLESS)
    if engine.dtype != "auto":
        return engine.dtype
    if isinstance(engine, TransformersConfig):
        from draftfeed_producer.engines.transformers import resolve_dtype

        return str(resolve_dtype("auto", engine.device)).removeprefix("torch.")
    dtype = str(load_target(target).text_config.dtype).removeprefix("torch.")
    return dtype if dtype in TOLERANCES else "bfloat16"


def _longest_rows(config: ProducerConfig, source: PromptSource) -> int:
    assert not isinstance(config.engine, TARGETLESS)
    live = config.capture.mode == "live"
    to_come = config.engine.sampling.max_new_tokens if live else 0
    return source.longest_prompt + to_come - 1
