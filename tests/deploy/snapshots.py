"""Snapshots with the values that a test speaks of."""

from typing import Any

from draftfeed_deploy.records import ConsumerSnapshot, ProducerSnapshot

NOTHING = {"samples": 0, "tokens": 0, "logical_bytes": 0, "wire_bytes": 0}


def produced(seconds: float, **values: Any) -> ProducerSnapshot:
    settings = {"phase": "generating", "prompts": 200, **NOTHING, **values}
    return ProducerSnapshot(time_seconds=seconds, **settings)


def consumed(seconds: float, **values: Any) -> ConsumerSnapshot:
    return ConsumerSnapshot(time_seconds=seconds, **{**NOTHING, **values})
