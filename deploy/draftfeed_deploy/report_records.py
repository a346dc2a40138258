"""What a finished run leaves on disk, read back without trusting any of it.

A run that was killed leaves files that are missing or end in half a line. Reading never raises:
what could not be read is named in `RunFiles.problems`.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")
S = TypeVar("S", "ProducerSnapshot", "ConsumerSnapshot")


class ProducerSnapshot(msgspec.Struct, frozen=True):
    """One line of `producer/stats.jsonl`. Counters are cumulative; lists have one entry a layer."""

    time_seconds: float
    """Monotonic; in the file since the machine started, here since the run's first snapshot."""
    samples: int
    tokens: int
    """Tokens fed to the target, which is the number of rows."""
    logical_bytes: int
    wire_bytes: int
    response_tokens: int = 0
    encoded_bytes: int = 0
    spool_bytes: int = 0
    spool_quota_bytes: int = 0
    leased: int = 0
    committed: int = 0
    rejected: int = 0
    stall_seconds: dict[str, float] = {}
    nonfinite: list[int] | None = None
    saturated: list[int] = []
    zero_rows: list[int] = []


class ConsumerSnapshot(msgspec.Struct, frozen=True):
    """One line of `consumer/stats.jsonl`. Counters are cumulative."""

    time_seconds: float
    """Monotonic; in the file since the machine started, here since the run's first snapshot."""
    samples: int
    tokens: int
    logical_bytes: int
    wire_bytes: int
    buffer_bytes: int = 0
    buffer_capacity_bytes: int = 0
    held: int = 0
    trained: int = 0
    rejected: int = 0
    step: int = 0
    loss: float | None = None
    stall_seconds: dict[str, float] = {}


class GeneratedSample(msgspec.Struct, frozen=True):
    """One line of `producer/samples.jsonl`, written before the sample is encoded."""

    id: str
    key: str
    rows: int
    digest: str
    missing_rows: int
    prompt_tokens: int = 0
    finish_reason: str = ""


class ReceivedSample(msgspec.Struct, frozen=True):
    """One line of `consumer/samples.jsonl`, written after the sample was decoded."""

    id: str
    rows: int
    tokens: int
    digest: str


class Step(msgspec.Struct, frozen=True):
    """One line of `consumer/steps.jsonl`: a completed optimizer step and the samples it used."""

    step: int
    ids: list[str]
    loss: float | None = None


class Rejection(msgspec.Struct, frozen=True):
    """One line of `producer/rejected.jsonl`."""

    id: str
    reason: str


class Evaluation(msgspec.Struct, frozen=True):
    """`evaluation.json`: the drafter before and after training, on the held-out prompts."""

    untrained_loss: float
    trained_loss: float
    accepted_length: float
    """Mean new tokens a target call, its own token included: at 1.0 no draft was accepted."""
    accepted_new_tokens: int
    accepted_target_calls: int
    same_as_greedy: bool
    """Whether speculative decoding printed what greedy decoding prints."""


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Every record of a run that could be read, and what could not."""

    producer: list[ProducerSnapshot]
    consumer: list[ConsumerSnapshot]
    generated: list[GeneratedSample]
    received: list[ReceivedSample]
    steps: list[Step]
    rejected: list[Rejection]
    evaluation: Evaluation | None
    evaluation_problem: str
    """Why `evaluation` is None; empty when it is not."""
    problems: list[str]

    @property
    def duration_seconds(self) -> float:
        """Time of the last snapshot that either side took."""
        return max(_times(self.producer, self.consumer), default=0.0)


def read_run(run_dir: Path) -> RunFiles:
    problems: list[str] = []

    def lines(name: str, type: type[T], *, required: bool = True) -> list[T]:
        if not required and not (run_dir / name).exists():
            return []
        return _read_lines(run_dir, name, type, problems)

    evaluation, evaluation_problem = _read_evaluation(run_dir / "evaluation.json")
    producer = lines("producer/stats.jsonl", ProducerSnapshot)
    consumer = lines("consumer/stats.jsonl", ConsumerSnapshot)
    origin = min(_times(producer, consumer), default=0.0)
    return RunFiles(
        producer=[_since(origin, snapshot) for snapshot in producer],
        consumer=[_since(origin, snapshot) for snapshot in consumer],
        generated=lines("producer/samples.jsonl", GeneratedSample),
        received=lines("consumer/samples.jsonl", ReceivedSample),
        steps=lines("consumer/steps.jsonl", Step),
        rejected=lines("producer/rejected.jsonl", Rejection, required=False),
        evaluation=evaluation,
        evaluation_problem=evaluation_problem,
        problems=problems,
    )


def _times(producer: list[ProducerSnapshot], consumer: list[ConsumerSnapshot]) -> list[float]:
    return [s.time_seconds for s in producer] + [s.time_seconds for s in consumer]


def _since(origin: float, snapshot: S) -> S:
    return msgspec.structs.replace(snapshot, time_seconds=snapshot.time_seconds - origin)


def _read_lines(run_dir: Path, name: str, type: type[T], problems: list[str]) -> list[T]:
    try:
        raw = (run_dir / name).read_bytes()
    except OSError as error:
        problems.append(f"{name}: {_why(error)}")
        return []
    decoder = msgspec.json.Decoder(type)
    records = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(f"{name} line {number}: {error}")
    return records


def _read_evaluation(path: Path) -> tuple[Evaluation | None, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Evaluation), ""
    except OSError as error:
        return None, f"{path.name}: {_why(error)}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"{path.name}: {error}"


def _why(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
