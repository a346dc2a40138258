"""Prometheus' own tools. Debian has them in the package `prometheus`."""

import shutil
import subprocess
from pathlib import Path

import pytest

THERE = all(map(shutil.which, ("promtool", "prometheus")))
MISSING = "no Prometheus, on Debian `apt-get install --no-install-recommends prometheus` brings it"
needs_prometheus = pytest.mark.skipif(not THERE, reason=MISSING)


def promtool(*arguments: str | Path, given: str = "") -> tuple[int, str]:
    """(exit code, everything that it printed)"""
    done = subprocess.run(
        ["promtool", *map(str, arguments)],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout
