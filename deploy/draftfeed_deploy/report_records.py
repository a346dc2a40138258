"""The records of a finished run, read back without trusting any of them.

A run that was killed leaves files that are missing or end in half a line. Reading never raises:
what could not be read is named in `RunFiles.problems`.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from draftfeed_deploy.reckoning import ProducerAudit
from draftfeed_deploy.records import (
    Archived,
    Checkpoint,
    ConsumerSnapshot,
    Evaluation,
    GeneratedSample,
    ProducerSnapshot,
    ReceivedSample,
    Rejection,
    Step,
    Swap,
)

T = TypeVar("T")
S = TypeVar("S", ProducerSnapshot, ConsumerSnapshot, GeneratedSample, ReceivedSample, Step)

CONSUMERS = ("consumer", "consumer-2")
"""Directories: the second one's is there when it took over from the first."""


class ConsumerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What one consumer wrote down."""

    snapshots: list[ConsumerSnapshot]
    received: list[ReceivedSample]
    steps: list[Step]


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Every record of a run that could be read, and what could not."""

    producer: list[ProducerSnapshot]
    consumers: list[ConsumerFiles]
    """In the order in which they had the stream."""
    generated: list[GeneratedSample]
    swap: Swap | None
    checkpoint: Checkpoint | None
    checkpoint_problem: str
    """Why `checkpoint` is None; empty when it is not."""
    audit: ProducerAudit | None
    audit_problem: str
    archived: Archived | None
    archived_problem: str
    """Why `archived` is None; of one epoch there is no archive."""
    rejected: list[Rejection]
    evaluation: Evaluation | None
    evaluation_problem: str
    """Why `evaluation` is None; empty when it is not."""
    problems: list[str]

    @property
    def consumer(self) -> list[ConsumerSnapshot]:
        return [snapshot for one in self.consumers for snapshot in one.snapshots]

    @property
    def received(self) -> list[ReceivedSample]:
        return [sample for one in self.consumers for sample in one.received]

    @property
    def steps(self) -> list[Step]:
        """Those whose effect is in the drafter. A consumer goes on from a checkpoint: what the one
        before it did after that was undone, and comes again under the same step numbers."""
        lineage: list[Step] = []
        for step in self._all_steps:
            while lineage and lineage[-1].step >= step.step:
                lineage.pop()
            lineage.append(step)
        return lineage

    @property
    def undone_steps(self) -> int:
        return len(self._all_steps) - len(self.steps)

    @property
    def _all_steps(self) -> list[Step]:
        return [step for one in self.consumers for step in one.steps]

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

    def consumer(name: str) -> ConsumerFiles:
        return ConsumerFiles(
            snapshots=lines(f"{name}/stats.jsonl", ConsumerSnapshot),
            received=lines(f"{name}/samples.jsonl", ReceivedSample),
            steps=lines(f"{name}/steps.jsonl", Step),
        )

    evaluation, evaluation_problem = _read(run_dir / "evaluation.json", Evaluation)
    checkpoint, checkpoint_problem = _read(run_dir / "checkpoint.json", Checkpoint)
    audit, audit_problem = _read(run_dir / "audit.json", ProducerAudit)
    archived, archived_problem = _read(run_dir / "archived.json", Archived)
    swap, swap_problem = _read(run_dir / "swap.json", Swap)
    swapped = (run_dir / CONSUMERS[1]).exists()
    if swapped and swap is None:
        problems.append(swap_problem)
    producer = lines("producer/stats.jsonl", ProducerSnapshot)
    generated = lines("producer/samples.jsonl", GeneratedSample)
    consumers = [consumer(name) for name in CONSUMERS[: 1 + swapped]]
    origin = min(_times(producer, consumers[0].snapshots), default=0.0)
    return RunFiles(
        producer=_since(origin, producer),
        consumers=[
            ConsumerFiles(
                snapshots=_since(origin, one.snapshots),
                received=_since(origin, one.received),
                steps=_since(origin, one.steps),
            )
            for one in consumers
        ],
        generated=_since(origin, generated),
        rejected=lines("producer/rejected.jsonl", Rejection, required=False),
        swap=swap and msgspec.structs.replace(swap, started_seconds=swap.started_seconds - origin),
        checkpoint=checkpoint,
        checkpoint_problem=checkpoint_problem,
        audit=audit,
        audit_problem=audit_problem,
        archived=archived,
        archived_problem=archived_problem,
        evaluation=evaluation,
        evaluation_problem=evaluation_problem,
        problems=problems,
    )


def _times(producer: list[ProducerSnapshot], consumer: list[ConsumerSnapshot]) -> list[float]:
    return [s.time_seconds for s in producer] + [s.time_seconds for s in consumer]


def _since(origin: float, records: list[S]) -> list[S]:
    return [
        msgspec.structs.replace(record, time_seconds=record.time_seconds - origin)
        for record in records
    ]


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


def _read(path: Path, type: type[T]) -> tuple[T | None, str]:
    """(the record, why there is none)"""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type), ""
    except OSError as error:
        return None, f"{path.name}: {_why(error)}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"{path.name}: {error}"


def _why(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
