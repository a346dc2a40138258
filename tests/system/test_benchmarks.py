"""The benchmarks run and print their figures; whether those are good is not a test's to say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import document

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_say_whether_they_mean_tcp(script: Path) -> None:
    """Symptom: figures of encrypted connections from samples that no connection carried, as both
    ends are on one host."""
    for section in script.read_text().split("\n[server]\n")[1:]:
        assert "\nsame_host = " in section.partition("\n[")[0]


@pytest.mark.timeout(240)
def test_swap_prints_its_figures_and_loses_nothing(tmp_path: Path) -> None:
    options = [
        "--engine",
        "synthetic",
        "--rounds",
        "1",
        "--samples",
        "60",
        "--rate",
        "400",
        "--window",
        "3",
        "--json",
    ]
    command = [sys.executable, str(BENCHMARKS / "swap.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    (pair,) = printed["rounds"]
    assert (printed["summary"]["lost"], printed["summary"]["duplicated"]) == (0, 0)
    assert pair["swap"]["old_exit"] == 3
    assert pair["swap"]["before"]["tokens"] > 0
    (tmp_path / "swap.json").write_text(done.stdout)
    assert "samples lost 0, duplicated 0" in document.page(tmp_path).text
    assert pair["control"]["during"]["seconds"] == pytest.approx(pair["swap"]["during"]["seconds"])
