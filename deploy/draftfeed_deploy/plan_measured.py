"""What `draftfeed bench target` writes and `draftfeed plan --measured` reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from draftfeed_deploy.config import plain_words
from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.plan_inputs import Inputs, Measured, NotNegative, Positive

BUSY_CORES = 0.1
"""Used by others; a machine that does nothing else uses less."""
MOST_LENGTHS = 2.0
"""Times that a benchmark's prompts may be longer or shorter than a plan's without a word."""


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
    hidden_size: Positive | None = None
    """The target's. None: not known, as in files by hand."""
    cut: str = ""
    """Why it ended before all that was to be tried; "" if it did not."""
    cores: NotNegative = 0.0
    others_cores: NotNegative = 0.0
    """Of the cores, those that other processes used meanwhile, on average."""
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
    """What replaces a plan's assumptions: the batch with the most output, and both its rates.

    The lengths do not: the benchmark's few prompts are there to be fast. Raises ConfigError when
    nothing was measured with, or without, a capture.
    """
    points = [point for point in benchmark.points if point.capture == capture]
    if not points:
        how = "with" if capture else "without"
        raise ConfigError(where, f"has no point that was measured {how} capture")
    best = max(points, key=lambda point: point.output_tokens_per_second)
    return Measured(
        output_tokens_per_second=best.output_tokens_per_second,
        prefill_tokens_per_second=best.prefill_tokens_per_second,
        output_includes_prefill=benchmark.output_includes_prefill,
        batch=best.batch,
    )


def check_target(benchmark: TargetBenchmark, inputs: Inputs, where: str) -> None:
    """Raises ConfigError for rates of a target of another width: they mean nothing here."""
    planned = inputs.target.hidden_size
    if benchmark.hidden_size and planned and benchmark.hidden_size != planned:
        raise ConfigError(
            where,
            f"was measured with another target: {benchmark.target} has hidden size "
            f"{benchmark.hidden_size:g}, and the plan's has {planned:g}",
        )


def doubts(benchmark: TargetBenchmark, inputs: Inputs, where: str) -> Iterator[str]:
    """Why its rates may not be the plan's, one line each. inputs: with what was measured."""
    planned = target_name(inputs)
    if planned and not same_name(benchmark.target, planned):
        yield f"{where}: measured with target {benchmark.target}; the plan's is {planned}"
    elif not planned and benchmark.hidden_size is None:
        yield f"{where}: measured with target {benchmark.target}; the plan names none to compare"
    gpu, device = inputs.hardware.gpu, benchmark.device
    if not _same_device(gpu, device):
        yield f"{where}: measured on {device!r}; the plan has {gpu!r}"
    used, gpus = benchmark.gpus_per_replica, inputs.layout.gpus_per_replica
    if used != gpus:
        yield f"{where}: measured on {used:g} GPUs a replica; the plan has {gpus:g}"
    tokens, mean = benchmark.prompt_tokens, inputs.workload.prompt_tokens
    if not 1 / MOST_LENGTHS <= tokens / mean <= MOST_LENGTHS:
        yield f"{where}: measured with prompts of {tokens:,.0f} tokens; the plan's have {mean:,.0f}"
    if benchmark.cut:
        yield f"{where}: it ended early: {benchmark.cut}"
    if benchmark.others_cores > BUSY_CORES:
        yield (
            f"{where}: other processes used {benchmark.others_cores:.1f} of {benchmark.cores:g} "
            "cores meanwhile: measure again when they do not"
        )


def same_name(target: str, planned: str) -> bool:
    """target: perhaps with its organisation before it."""
    return target.rpartition("/")[2].casefold() == planned.casefold()


def target_name(inputs: Inputs) -> str:
    """That of the target's directory, or the hub's; "" where the plan names none."""
    config = inputs.target.config
    if config is None:
        return ""
    path = Path(config)
    directory = path.parent if path.name == "config.json" else path
    if directory.parent.name == "snapshots":  # models--org--name/snapshots/<commit>
        return directory.parent.parent.name.rpartition("--")[2]
    return directory.name


def _same_device(planned: str, device: str) -> bool:
    """Drivers say more than people do: "NVIDIA RTX PRO 6000 Blackwell Server Edition"."""
    one, other = (set(name.casefold().replace("-", " ").split()) for name in (planned, device))
    return one <= other or other <= one
