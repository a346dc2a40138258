"""The records of a finished run, read back without trusting any of them.

A run that was killed leaves files that are missing or end in half a line. Reading never raises:
what could not be read is named in `RunFiles.problems`.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from draftfeed_deploy.records import (
    ConsumerSnapshot,
    Evaluation,
    GeneratedSample,
    ProducerSnapshot,
    ReceivedSample,
    Rejection,
    Step,
)

T = TypeVar("T")
S = TypeVar("S", ProducerSnapshot, ConsumerSnapshot)


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
