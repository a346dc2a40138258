"""What `draftfeed bench target` found: what `draftfeed plan --measured` reads, and more."""

from itertools import product
from statistics import median

from msgspec import Struct

from draftfeed_deploy.bench_target_sweep import Rate
from draftfeed_deploy.plan_measured import Point, TargetBenchmark


class Turn(Struct, frozen=True, kw_only=True):
    """One round at one batch, with capture or without."""

    output_tokens_per_second: float
    prefill_tokens_per_second: float
    first_token_seconds: float
    """Median over the requests."""
    memory_bytes: int | None
    seconds: float
    """All of it."""


class MeasuredPoint(Point, frozen=True, kw_only=True):
    """Medians of its rounds; memory is the most of them."""

    rounds: tuple[Turn, ...]


class Result(TargetBenchmark, frozen=True, kw_only=True):
    points: tuple[MeasuredPoint, ...]
    dtype: str
    layer_ids: tuple[int, ...]
    prompts: int
    """Different ones that it was measured with."""
    memory_of: str
    in_turns: bool
    """Whether capture and no capture took turns in each round, or were measured one after the
    other."""
    most: int
    """The largest batch that was to be tried."""


class Ratio(Struct, frozen=True):
    """Output with capture over without."""

    median: float
    least: float
    most: float


def point(batch: int, capture: bool, turns: list[Turn]) -> MeasuredPoint:
    memory = [turn.memory_bytes for turn in turns if turn.memory_bytes is not None]
    return MeasuredPoint(
        batch=batch,
        capture=capture,
        output_tokens_per_second=median(turn.output_tokens_per_second for turn in turns),
        prefill_tokens_per_second=median(turn.prefill_tokens_per_second for turn in turns),
        first_token_seconds=median(turn.first_token_seconds for turn in turns),
        memory_bytes=max(memory, default=None),
        rounds=tuple(turns),
    )


def by_batch(result: Result, capture: bool) -> dict[int, MeasuredPoint]:
    return {int(one.batch): one for one in result.points if one.capture == capture}


def rates(points: dict[int, MeasuredPoint]) -> list[Rate]:
    return [Rate(batch, one.output_tokens_per_second) for batch, one in points.items()]


def ratio(captured: MeasuredPoint, bare: MeasuredPoint, in_turns: bool) -> Ratio:
    """Round by round, where they took turns: what slows the machine down for a while slows both.
    Otherwise of each round with each."""
    together = zip if in_turns else product
    pairs = together(captured.rounds, bare.rounds)
    found = [a.output_tokens_per_second / b.output_tokens_per_second for a, b in pairs]
    return Ratio(median(found), min(found), max(found))
