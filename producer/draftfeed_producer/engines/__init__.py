"""Engines: prompts in, samples with the target's hidden states out."""

from collections.abc import Callable, Iterator
from typing import Protocol

from draftfeed_producer.engines.config import (
    CaptureConfig,
    ReplayConfig,
    SamplingConfig,
    SGLangConfig,
    TransformersConfig,
)
from draftfeed_producer.engines.synthetic import SyntheticConfig, SyntheticEngine
from draftfeed_producer.engines.trial import Trial
from draftfeed_producer.errors import MissingPackageError
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.target import TargetConfig, load_target
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample

__all__ = [
    "TARGETLESS",
    "CaptureConfig",
    "Engine",
    "EngineConfig",
    "ReplayConfig",
    "SGLangConfig",
    "SamplingConfig",
    "SyntheticConfig",
    "TransformersConfig",
    "make_engine",
]

EngineConfig = SGLangConfig | TransformersConfig | SyntheticConfig | ReplayConfig
"""Told apart by `name`."""
TARGETLESS = (SyntheticConfig, ReplayConfig)
"""Those that run no model."""


class Engine(Protocol):
    """One thread runs it; only `stop()` may be called from others."""

    descriptor: Descriptor

    @property
    def loading(self) -> bool:
        """Whether `run()` waits for the target to be there: a start, or one after a crash."""
        ...

    @property
    def captured(self) -> int:
        """Rows captured so far, those of samples still being generated included."""
        ...

    @property
    def recaptured(self) -> int:
        """Samples made again because a row was missing."""
        ...

    def max_rows(self, prompt_tokens: int) -> int:
        """Rows of the longest sample that a prompt of up to so many tokens can become. In prefill
        mode those tokens are the prompt's and the response's."""
        ...

    def run(
        self, prompts: Iterator[Prompt], give_up: Callable[[SampleId, str], None] | None = None
    ) -> Iterator[Sample]:
        """Pulls a prompt whenever there is room for one, yields samples as they are finished.

        `prompts` may block: that is back-pressure. Every prompt pulled is yielded or given up,
        exactly once, in any order; after `stop()` the unfinished ones are dropped. One that has
        its response is captured in one pass, whatever the mode. May be called again when it has
        ended.

        give_up: called, by the thread that runs it, with a prompt that cannot be made, and why.
        Raises CaptureError, and EngineError for such a prompt when there is no `give_up`.
        """
        ...

    def stop(self) -> None:
        """`run()` ends within one forward pass. Whoever blocks in `prompts` must let go too."""
        ...

    def close(self) -> None:
        """Frees the model. `run()` must have ended."""
        ...


def make_engine(
    config: EngineConfig,
    target: TargetConfig | None = None,
    capture: CaptureConfig = CaptureConfig(),  # noqa: B008 - frozen
    trial: Trial | None = None,
) -> Engine:
    """Loads what the engine needs; the synthetic one has no target, and nothing to capture.
    trial: to measure it.

    Raises ModelError, LayerIdError, LimitExceeded, EngineError, MissingPackageError.
    """
    if isinstance(config, SyntheticConfig):
        return SyntheticEngine(config)
    assert not isinstance(config, ReplayConfig), "an archive knows what it is of"
    assert target is not None, "this engine runs a target model"
    if isinstance(config, SGLangConfig):
        from draftfeed_producer.engines.sglang.engine import SGLangEngine

        loaded = load_target(target)
        return SGLangEngine(config, loaded, target.layer_ids, capture, target.final, trial)
    try:
        from draftfeed_producer.engines.transformers import TransformersEngine
    except ImportError:
        raise MissingPackageError("torch or transformers", "transformers") from None
    loaded = load_target(target)
    return TransformersEngine(config, loaded, target.layer_ids, capture, target.final, trial)
