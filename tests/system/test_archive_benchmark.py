"""The archive's benchmark runs and prints its figures; whether those are good is not a test's to
say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "archive.py"


@pytest.mark.timeout(240)
def test_every_arm_moves_the_archive_and_generation_is_the_same_with_it(tmp_path: Path) -> None:
    """It ends by itself when an arm's samples are not all there, when what it calls cold came out
    of memory, or when the arms of the generation did not make the same."""
    command = [sys.executable, str(SCRIPT), "--quick", "--json", f"--dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    if "the page cache cannot be dropped" in done.stderr:
        pytest.skip("the page cache of this file system cannot be dropped")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    (rates,) = printed["rounds"]
    assert {"link", "received", "decoded", "seal, linked", "seal, copied"} < rates.keys()
    assert all(rate > 0 for rate in rates.values())
    (made,) = printed["generation"]
    assert len({arm["tokens"] for arm in made.values()}) == 1
    assert printed["setup"]["archived_bytes"] > 0
    limit = printed["summary"]["limit"]["median"]
    received = printed["summary"]["received / limit"]["median"]
    assert received == pytest.approx(rates["received"] / limit)
    assert list(tmp_path.iterdir()) == []
