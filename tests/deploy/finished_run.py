"""The files of a small run that went well, for tests of its report."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from draftfeed_deploy.reckoning import Difference, ProducerAudit
from draftfeed_deploy.report import Report, judge_run, write_report
from draftfeed_proto.ids import SampleId

PROMPTS, PER_STEP, LAYERS = 12, 3, 5
ROW_BYTES = LAYERS * 64 * 2

READABLE = "every record readable"
ACCOUNTED = "every prompt accounted for"
TRAINED = "samples generated = samples trained"
ONCE = "each trained exactly once"
AUDIT = "sums of the audit agree with the prompt list"
CHECKPOINT = "the last checkpoint says the same"
DIGESTS = "tensors equal on both sides"
ROWS = "a row for every fed token"
WIRE = "wire bytes within logical bytes"
LOSS = "held-out loss 25% below untrained, and below uniform guessing"
VALUES = "no non-finite values, no all-zero rows"


NONE = Difference(0, [])
AGREED = ProducerAudit(
    config="producer.toml",
    asked="spool",
    running=False,
    group="demo",
    term=1,
    members=[],
    dataset="0" * 16,
    shards="0",
    prompts=PROMPTS,
    skipped=0,
    trained=PROMPTS,
    held=None,
    deliverable=0,
    ended={},
    to_be_generated=0,
    regenerated=0,
    sum=PROMPTS,
    missing=NONE,
    extra=NONE,
    twice=NONE,
)


class Run:
    """The files of a small run that went well, as values a test may spoil before writing them."""

    def __init__(self, root: Path) -> None:
        self.dir, self.prompts = root / "run", root / "prompts.jsonl"
        lines = [{"id": f"p-{i:02d}", "messages": []} for i in range(PROMPTS)]
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        dataset = hashlib.sha256(self.prompts.read_bytes()).hexdigest()[:16]
        self.epochs = 1
        self.ids = [str(SampleId(dataset, 0, 0, i)) for i in range(PROMPTS)]
        self.generated = [self._generated(i) for i in range(PROMPTS)]
        self.received = [self._received(i) for i in reversed(range(PROMPTS))]
        self.steps = [
            {"step": n + 1, "ids": self.ids[n * PER_STEP : (n + 1) * PER_STEP], "loss": 5.0 - n}
            for n in range(PROMPTS // PER_STEP)
        ]
        self.producer = [self._producer(n) for n in range(13)]
        self.consumer = [self._consumer(n) for n in range(13)]
        self.checkpoint: dict[str, Any] | None = {"step": len(self.steps), "trained": None}
        """Trained: what the steps say, unless a test sets it."""
        self.second: dict[str, list[dict[str, Any]]] | None = None
        self.swap: dict[str, Any] | None = None
        self.audit: ProducerAudit | None = AGREED
        self.archived: dict[str, Any] | None = None
        self.rejected: list[dict[str, Any]] = []
        self.evaluation: dict[str, Any] | None = {
            "untrained_loss": 8.0,
            "trained_loss": 5.0,
            "vocab_size": 1024,
            "accepted_length": 1.25,
            "accepted_new_tokens": 125,
            "accepted_target_calls": 100,
            "same_as_greedy": True,
        }

    def _generated(self, i: int) -> dict[str, Any]:
        return {
            "id": self.ids[i],
            "key": f"p-{i:02d}",
            "rows": 30 + i,
            "tokens": 31 + i,
            "prompt_tokens": 10,
            "finish_reason": "stop",
            "digest": f"{i:016x}",
        }

    def _received(self, i: int) -> dict[str, Any]:
        return {"id": self.ids[i], "rows": 30 + i, "tokens": 31 + i, "digest": f"{i:016x}"}

    def _producer(self, n: int) -> dict[str, Any]:
        tokens = 35 * n
        return {
            "time_seconds": 0.5 * n,
            "samples": n,
            "tokens": tokens,
            "response_tokens": 20 * n,
            "logical_bytes": tokens * ROW_BYTES,
            "encoded_bytes": tokens * ROW_BYTES * 7 // 10,
            "wire_bytes": tokens * ROW_BYTES * 7 // 10,
            "spool_bytes": 1000 * (n % 4),
            "spool_quota_bytes": 1_000_000,
            "leased": 2,
            "committed": n,
            "rejected": 0,
            "stall_seconds": {"spool_full": 0.0, "no_credit": 1.5},
            "layers": ["1", "8", "14", "20", "final"],
            "nonfinite": [0] * LAYERS,
            "saturated": [0, 0, 7, 0, 0],
            "zero_rows": [0] * LAYERS,
        }

    def _consumer(self, n: int) -> dict[str, Any]:
        shared = {key: self._producer(n)[key] for key in ("time_seconds", "samples", "tokens")}
        sizes = {key: self._producer(n)[key] for key in ("logical_bytes", "wire_bytes")}
        buffer = {"buffer_bytes": 500 * (n % 3), "buffer_capacity_bytes": 4000, "held": 1}
        training = {
            "trained": n,
            "rejected": 0,
            "step": n // PER_STEP,
            "loss": None if n == 0 else 4.0,
        }
        return (
            shared
            | sizes
            | buffer
            | training
            | {"stall_seconds": {"buffer_empty": 2.25, "link_down": 0.0}}
        )

    def rename(self, new: dict[str, str]) -> None:
        for row in [*self.generated, *self.received]:
            row["id"] = new[row["id"]]
        for step in self.steps:
            step["ids"] = [new[id] for id in step["ids"]]

    def report(self) -> Report:
        self.write_files()
        return write_report(self.dir, self.prompts, epochs=self.epochs)

    def write_files(self) -> None:
        self.write("producer/stats.jsonl", self.producer)
        self.write("consumer/stats.jsonl", self.consumer)
        self.write("producer/samples.jsonl", self.generated)
        self.write("consumer/samples.jsonl", self.received)
        self.write("consumer/steps.jsonl", self.steps)
        if self.second is not None:
            for name, rows in self.second.items():
                self.write(f"consumer-2/{name}.jsonl", rows)
        records = {
            "checkpoint": self._saved(),
            "swap": self.swap,
            "audit": self.audit,
            "archived": self.archived,
        }
        for name, value in records.items():
            if value is not None:
                (self.dir / f"{name}.json").write_bytes(msgspec.json.encode(value))
        if self.rejected:
            self.write("producer/rejected.jsonl", self.rejected)
        if self.evaluation is not None:
            (self.dir / "evaluation.json").write_text(json.dumps(self.evaluation), "utf-8")

    def _saved(self) -> dict[str, Any] | None:
        if self.checkpoint is None or self.checkpoint["trained"] is not None:
            return self.checkpoint
        second = self.second["steps"] if self.second else []
        steps = {step["step"]: step["ids"] for step in [*self.steps, *second]}
        return {"step": max(steps), "trained": sorted({id for ids in steps.values() for id in ids})}

    def judge(self) -> Report:
        self.write_files()
        return judge_run(self.dir, self.prompts, epochs=self.epochs)

    def go_round(self, epochs: int) -> None:
        """Later epochs as well, out of the first one's generation."""
        self.epochs = epochs
        digests = {row["id"]: row["digest"] for row in self.generated}
        self.archived = {"segments": 1, "bytes": 1000, "digests": digests, "damaged": []}
        received, steps = list(self.received), list(self.steps)
        for epoch in range(1, epochs):
            ids = {id: str(replace(SampleId.parse(id), epoch=epoch)) for id in self.ids}
            self.received += [row | {"id": ids[row["id"]]} for row in received]
            self.steps += [
                step | {"step": len(self.steps) + n, "ids": [ids[id] for id in step["ids"]]}
                for n, step in enumerate(steps, start=1)
            ]
        for row in [row for row in self.consumer if row["samples"] == PROMPTS]:
            row |= {name: epochs * row[name] for name in ("logical_bytes", "wire_bytes")}
        self.producer[-1]["wire_bytes"] *= epochs

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def failed(report: Report) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks if not check.passed}
