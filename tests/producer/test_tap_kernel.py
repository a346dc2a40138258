"""The gather kernel without a GPU: what it computes, and what machine code it becomes.

Each version of Triton that `make venv` put aside runs in processes of its own. Whether Triton
interprets or compiles binds when it is imported.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
[VERSIONS] = re.findall(r"^TRITONS := (\S+) (\S+)$", MAKEFILE, re.MULTILINE)
CASES = 136
MOST_REGISTERS = 72
"""Seven blocks of 128 threads fit on a multiprocessor, 70 KB of loads in flight."""
HIDDEN, ELEMENTS_A_LOAD, THREADS = 5120, 8, 128

each_triton = pytest.mark.parametrize("triton", VERSIONS)


def run(triton: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Fails in the child, for want of Triton, where `make venv` has not installed that version."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    path = str(ROOT / ".venv/triton" / triton)
    environment = {**kept, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )


@each_triton
@pytest.mark.timeout(600)
def test_kernel_equals_the_reference_bit_for_bit(triton: str, tmp_path: Path, record_property):
    child = run(
        triton,
        *("-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"),
        f"--basetemp={tmp_path / 'child'}",
        str(HERE / "kernel_cases.py"),
        TRITON_INTERPRET="1",
    )
    assert child.returncode == 0, child.stdout + child.stderr
    passed = re.search(r"^(\d+) passed", child.stdout, re.MULTILINE)
    assert passed, child.stdout
    assert int(passed[1]) == CASES
    record_property("cases equal to the reference", passed[1])


@each_triton
@pytest.mark.timeout(600)
def test_kernel_compiles_to_what_a_gpu_runs_fast(triton: str, tmp_path: Path, record_property):
    """Spilled registers or narrow loads would cost the bandwidth, and show in no other test."""
    child = run(
        triton, str(HERE / "kernel_aot.py"), str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "cache")
    )
    assert child.returncode == 0, child.stdout + child.stderr
    reports = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(reports) == 3 * 6
    for form in reports:
        record_property(f"sm_{form['capability']:<3} {form['form']:<21}", line(form))
    for form in reports:
        assert_fast(form)


def line(form: dict[str, Any]) -> str:
    memory = Counter(form["memory"])
    wide = f"{memory['ld.global.v4.b32']} + {memory['st.global.v4.b32']}"
    return (
        f"{form['registers']} registers, {form['spills']} spills, {form['local']} bytes local, "
        f"{wide} loads + stores of 16 bytes, {form['instructions']} instructions"
    )


def assert_fast(form: dict[str, Any]) -> None:
    assert form["stack"] == form["local"] == form["spills"] == 0, form
    assert form["registers"] <= MOST_REGISTERS, form
    assert form["slow_conversions"] == 0, form
    # A flushed denormal would neither be counted as lost nor be in the sum.
    assert not form["flushes"], form
    memory = Counter(form["memory"])
    # The one narrow load is the row map's, the one narrow store the counters'.
    assert memory.pop("ld.global.b32") == memory.pop("st.global.b32") == 1, form
    blocks = HIDDEN // (ELEMENTS_A_LOAD * THREADS)
    inputs = 2 if "residual" in form["form"] else 1
    # All of the first pass, and at least one more in the second one's loop.
    assert memory.keys() == {"ld.global.v4.b32", "st.global.v4.b32"}, form
    assert memory["ld.global.v4.b32"] > inputs * blocks, form
    assert memory["st.global.v4.b32"] > blocks, form
