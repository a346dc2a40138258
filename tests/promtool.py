"""Prometheus' own tools. Debian has them in the package `prometheus`."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="no promtool here: apt-get install prometheus",
)


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
