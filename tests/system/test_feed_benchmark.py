"""The trainer's benchmark runs and prints its figures; whether those are good is not a test's to
say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trainer_feed.py"
SMALLEST = ("--rounds=2", "--steps=2", "--step=0.01", "--tokens=16", "--hidden=64")


def run(*options: str) -> str:
    command = [sys.executable, str(SCRIPT), *SMALLEST, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_every_arm_takes_its_steps_on_states_that_came() -> None:
    printed = json.loads(run("--json"))
    for turns in printed["rounds"]:
        assert {turn["steps"] for turn in turns.values()} == {2}
        assert all(turn["state_bytes"] > 0 for turn in turns.values())
        assert turns["no step"]["step_seconds"] == 0 < turns["prefetch"]["step_seconds"]
    assert printed["setup"]["rounds"] == len(printed["rounds"]) == 2
    assert 0 < printed["summary"]["waiting_prefetch"]["median"] < 1


@pytest.mark.timeout(120)
def test_bar_is_printed_beside_its_figure() -> None:
    (line,) = [line for line in run().splitlines() if "prefetch   " in line]
    assert "<= 2" in line or "means nothing" in line
