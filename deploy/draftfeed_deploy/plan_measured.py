"""What `draftfeed bench target` writes and `draftfeed plan --measured` reads."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from draftfeed_deploy.config import plain_words
from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.plan_inputs import Measured, Positive


class Point(Struct, frozen=True, kw_only=True):
    """One replica, measured at one batch."""

    batch: Positive
    """Requests at a time."""
    capture: bool
    """Whether hidden states were captured meanwhile."""
    output_tokens_per_second: Positive
    prefill_tokens_per_second: Positive | None = None
    """Of prompts, with nothing else to do."""
    memory_bytes: Positive | None = None
    """The most that a GPU of the replica had in use."""
    first_token_seconds: Positive | None = None
    """Median time to first token."""


class TargetBenchmark(Struct, frozen=True, kw_only=True):
    """The file. Readers ignore fields that they do not know."""

    format: Literal["draftfeed-bench-target-1"]
    target: str
    """The target's name, as in its stream's descriptor."""
    engine: str
    device: str
    gpus_per_replica: Positive
    output_includes_prefill: bool
    """Whether the time that output rates are over has the prompts' prefill in it."""
    prompt_tokens: Positive
    """Mean of the prompts that it was measured with."""
    response_tokens: Positive
    points: Annotated[tuple[Point, ...], Meta(min_length=1)]


def read(path: Path) -> TargetBenchmark:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TargetBenchmark)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        fault = plain_words(str(error))
        raise ConfigError(str(path), f"is not from draftfeed bench target: {fault}") from None


def measured(benchmark: TargetBenchmark, capture: bool, where: str) -> Measured:
    """What replaces a plan's assumptions: the batch with the most output, and its rates.

    The lengths do not: the benchmark's few prompts are there to be fast. Raises ConfigError when
    nothing was measured with, or without, a capture.
    """
    points = [point for point in benchmark.points if point.capture == capture]
    if not points:
        how = "with" if capture else "without"
        raise ConfigError(where, f"has no point that was measured {how} capture")
    best = max(points, key=lambda point: point.output_tokens_per_second)
    prefill = [p.prefill_tokens_per_second for p in points if p.prefill_tokens_per_second]
    return Measured(
        output_tokens_per_second=best.output_tokens_per_second,
        prefill_tokens_per_second=max(prefill, default=None),
        output_includes_prefill=benchmark.output_includes_prefill,
        batch=best.batch,
    )
