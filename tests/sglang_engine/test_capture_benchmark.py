"""The benchmark runs and prints its figures; whether those are good is not a test's to say."""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "capture.py"
SMALLEST = {
    "--rounds": "1",
    "--timed-rounds": "1",
    "--batch": "2",
    "--prompt": "6",
    # As many as the timed arm writes its figures after.
    "--tokens": "24",
    "--layers": "1,3,4",
}


def run(target: Path) -> subprocess.CompletedProcess[str]:
    """Asked to end when it takes too long: it has engines that it stopped, which only it ends."""
    options = [part for option in SMALLEST.items() for part in option]
    command = [sys.executable, str(SCRIPT), "--json", "--target", str(target), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=1150)
    finally:
        process.terminate()
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.timeout(1200)
def test_capture_on_and_off_do_the_same_work_and_every_row_comes(tiny_qwen3: Path) -> None:
    done = run(tiny_qwen3)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    (turns,) = printed["rounds"]
    assert {name: turn["tokens"] for name, turn in turns.items()} == {
        "off": 48,
        "aux": 48,
        "on": 48,
    }
    # The last token of a response is never fed, but SGLang may have launched its pass already.
    assert turns["on"]["rows"] in range(2 * (6 + 23), 2 * (6 + 24) + 1)
    assert (turns["off"]["rows"], turns["aux"]["rows"]) == (0, 0)
    assert all(turn["scheduler_cpu_seconds"] > 0 for turn in turns.values())
    assert all(stage["calls"] > 0 for stage in printed["stages"].values())
    assert printed["ratios"]["off/on"]["lower"] is None, "one round bounds nothing"


def test_the_lower_bound_is_above_the_median_in_one_of_twenty_cases_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    lower_bound = importlib.import_module("capture").lower_bound
    assert lower_bound(range(1, 21)) == 6
    assert lower_bound([1.0, 1.0, 1.0, 1.0]) is None
    generator = random.Random(3)
    bounds = [lower_bound([generator.expovariate(1) for _ in range(20)]) for _ in range(2000)]
    median = 0.6931  # ln 2
    assert sum(bound is not None and bound > median for bound in bounds) <= 0.05 * len(bounds)
