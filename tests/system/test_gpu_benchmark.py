"""The GPU benchmark where there is no GPU: every path that has an equal on the CPU is run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TAP = HERE.parents[1] / "benchmarks" / "gpu" / "tap.py"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread: the tensors are tiny, and idle threads of torch spin on cores that others need.
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=hidden)


def test_every_part_runs_and_is_in_the_table_and_in_the_document(tmp_path: Path) -> None:
    out = tmp_path / "results" / "cpu.json"
    done = run(TAP, "--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    rows = {(row["part"], row["what"]): row for row in document["rows"]}
    assert {part for part, _ in rows} == {"parity", "kernel", "ring", "decode"}
    for (part, what), row in rows.items():
        (line,) = [line for line in done.stdout.splitlines() if f"{part} " in line and what in line]
        assert row["value"] in line
    for form in ("packed", "one layer", "one layer + residual", "ring under load"):
        assert rows["parity", f"{form}, eager"]["verdict"] == "met"
        assert rows["parity", f"{form}, graph replayed"]["value"] == "not run: needs CUDA"
    assert document["cut"] == []
    assert document["exit_code"] == 0
    assert len(document["rounds"]["decode"]["rounds"]) == 3
    assert "no goal was judged" in done.stdout


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("value", "layer 0 element 3: 0x3e00, not "),
        ("counter", "layer 0 counter 2: "),
        ("unused slot", "a slot that no token named, "),
    ],
)
def test_a_wrong_gather_fails_the_run_and_the_first_wrong_element_is_named(
    fault: str, named: str
) -> None:
    child = HERE / "broken_gather_child.py"
    done = run(child, fault, "--device", "cpu", "--only", "parity")
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [
        line for line in done.stdout.splitlines() if "packed, eager" in line and "L=" in line
    ]
    assert named in line
    assert line.endswith("FAILED")


def test_a_run_without_time_does_not_pass_for_one_that_found_no_difference() -> None:
    done = run(TAP, "--device", "cpu", "--only", "parity", "--seconds", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "nothing was compared" in done.stdout
    assert "cut for time: parity: 0 of 8 shapes" in done.stdout


def test_a_machine_without_cuda_is_told_so() -> None:
    done = run(TAP)
    assert done.returncode == 2
    assert "no CUDA device here" in done.stdout
