"""The benchmark of links runs; how fast anything is, is not a test's to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "link.py"


@pytest.mark.timeout(200)
def test_everything_arrives_whole_through_a_slow_link(tmp_path: Path) -> None:
    """Ends compare digests, and the run ends by itself when one differs."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")
    command = [sys.executable, str(SCRIPT), "--quick", "--json", f"--dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    (arms,) = json.loads(done.stdout)["links"].values()
    assert arms.keys() == {"tcp", "pyzmq", "draftfeed", "draftfeed, stored"}
    # Nothing gets through that the link does not let through: 125 MB/s, and a bucket of 375 KB.
    assert 0 < arms["tcp"]["bytes_per_second"]["median"] < 200e6
    assert list(tmp_path.iterdir()) == []


def test_without_root_it_says_so_in_one_line_and_ends_with_two() -> None:
    command = [sys.executable, str(SCRIPT), "--quick"]
    if os.geteuid() == 0:  # as nobody, who may read what root may
        command = ["unshare", "--user", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr}")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "root" in line
