"""The soak runs, swaps, and counts; and it sees what grows and what is missing."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from soak_watch import growth, look

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.timeout(240)
def test_a_short_soak_swaps_and_loses_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "soak"
    options = ["--minutes=1", "--rate=1", "--swap-every=0.1", "--json", f"--dir={kept}"]
    command = [sys.executable, str(BENCHMARKS / "soak.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    assert printed["faults"] == []
    assert printed["swaps"][0]["how"] == "takeover"
    for line in ("swapped", "steady"):
        samples = printed["samples"][line]
        assert samples["generated"] == printed["setup"]["samples"] <= samples["received"]
        assert samples["exit_codes"] == [0, 0]
    assert "samples.jsonl" in {path.name for path in kept.rglob("*.jsonl")}


def test_a_leak_is_seen_through_noise_and_noise_is_none() -> None:
    """One of 5 MB/h under 10 MB of noise, looked at every ten seconds for two hours."""
    times = np.arange(0, 7200, 10.0)
    noise = np.random.default_rng(0).normal(300, 10, len(times))
    flat, leaking = growth(list(times), list(noise)), growth(list(times), list(noise + times / 720))
    assert flat is not None
    assert leaking is not None
    assert not flat.grows(2.0)
    assert leaking.grows(2.0)
    assert leaking.per_hour == pytest.approx(5, abs=2)


def test_a_process_is_seen_with_its_descriptors_and_is_none_when_it_is_gone() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys; a = os.pipe(); print(flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    seen = look(process.pid)
    assert seen is not None
    assert seen.descriptors >= 5
    assert seen.rss_mb > seen.anonymous_mb > 0
    process.communicate()
    assert look(process.pid) is None
