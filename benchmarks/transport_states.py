"""The samples that transport.py sends, as both ends read them."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash


class StateSet(NamedTuple):
    """Different samples, which are sent again and again."""

    samples: list[np.ndarray]
    """float16 [rows, layers, hidden] each."""
    digests: list[str]
    """xxh3-128 of each one's bytes."""

    @property
    def largest_bytes(self) -> int:
        return max(sample.nbytes for sample in self.samples)

    @property
    def longest_rows(self) -> int:
        return max(map(len, self.samples))


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def load(directory: Path) -> StateSet:
    """All of it in memory of this process."""
    told = json.loads((directory / "set.json").read_text())
    states = np.load(directory / "states.npy")
    return StateSet(np.split(states, told["edges"]), told["digests"])


def save(directory: Path, samples: list[np.ndarray]) -> None:
    """What is there is whole once `exists` says so."""
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "states.npy", np.concatenate(samples))
    edges = np.cumsum([len(sample) for sample in samples])[:-1].tolist()
    digests = [digest(np.ascontiguousarray(sample).view(np.uint8).data) for sample in samples]
    part = directory / "set.part"
    part.write_text(json.dumps({"edges": edges, "digests": digests}))
    part.replace(directory / "set.json")


def exists(directory: Path) -> bool:
    return (directory / "set.json").exists()
