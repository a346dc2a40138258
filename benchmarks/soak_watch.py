"""What processes hold while a soak goes on, and whether it grows."""

import os
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BLOCKS = 20
"""Stretches of a series of which one number each is looked at: what lies between two samples is no
growth, and neighbours are not independent of each other."""
SURE = 2.0
"""Standard errors."""
SCRAPE_SECONDS = 5.0


class Look(NamedTuple):
    """At one process."""

    time_seconds: float
    rss_mb: float
    anonymous_mb: float
    """Of those, what no file is behind."""
    descriptors: int
    threads: int
    cpu_seconds: float


class Growth(NamedTuple):
    """A straight line through the medians of the blocks, by least squares."""

    first: float
    last: float
    most: float
    per_hour: float
    error: float
    """Standard error of that."""

    def grows(self, bar: float) -> bool:
        """By more than so much an hour, and not by chance."""
        return self.per_hour - SURE * self.error > bar


def look(pid: int) -> Look | None:
    """None when the process is gone."""
    with suppress(OSError, ValueError, KeyError):
        proc = Path(f"/proc/{pid}")
        lines = (proc / "status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return Look(
            time.monotonic(),
            _megabytes(status["VmRSS"]),
            _megabytes(status["RssAnon"]),
            len(os.listdir(proc / "fd")),
            int(status["Threads"]),
            ticks / os.sysconf("SC_CLK_TCK"),
        )
    return None


def _megabytes(text: str) -> float:
    return int(text.removesuffix("kB")) * 1024 / 1e6


def scrape(port: int) -> None:
    """As Prometheus does; what it costs belongs to what is watched. Nobody may be there yet."""
    with suppress(OSError):
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=SCRAPE_SECONDS) as answer:
            answer.read()


def directory_bytes(path: Path) -> int:
    """Of its files, whichever are there."""
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def growth(times: Sequence[float], values: Sequence[float]) -> Growth | None:
    """times in seconds. None when there are too few to tell."""
    blocks = min(BLOCKS, len(times) // 3)
    if blocks < 4:
        return None
    x = np.array([np.median(part) for part in np.array_split(np.array(times) / 3600, blocks)])
    y = np.array([np.median(part) for part in np.array_split(np.array(values, float), blocks)])
    spread = x - x.mean()
    slope = float((spread * y).sum() / (spread**2).sum())
    rest = y - y.mean() - slope * spread
    error = float(np.sqrt((rest**2).sum() / (blocks - 2) / (spread**2).sum()))
    return Growth(float(y[0]), float(y[-1]), float(max(values)), slope, error)


def thinned(looks: Sequence[Any], most: int = 120) -> list[Any]:
    """For a document: every so many of them."""
    return list(looks[:: max(1, -(-len(looks) // most))])
