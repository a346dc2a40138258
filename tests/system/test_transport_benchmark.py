"""The transports' benchmark moves every sample by every way, and notices what is damaged; how fast
they are is not a test's to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIONAL = {"grpc", "mooncake"}
"""That need packages which the tests do without."""
WIDE = {"tcp", "pyzmq", "files", "draftfeed", "draftfeed, stored", "draftfeed, keys"}


def run(script: str, *options: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCHMARKS / script), *options]
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=own)


@pytest.mark.timeout(300)
def test_every_sample_arrives_by_every_transport_and_the_page_shows_them(tmp_path: Path) -> None:
    """A run ends with an error when a sample is missing, or its digest is another one."""
    done = run("transport.py", "--quick", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    not_run = printed["not_run"].keys()
    assert not_run <= OPTIONAL
    names = {
        layout: {cell["name"] for cell in printed["cells"] if cell["layout"] == layout}
        for layout in ("wide, 1 to 1", "wide, 4 to 2", "smollm2, 1 to 1")
    }
    assert names["wide, 1 to 1"] >= (WIDE | OPTIONAL) - not_run
    for layout in ("wide, 4 to 2", "smollm2, 1 to 1"):
        assert names[layout] >= {"tcp", "draftfeed", "draftfeed, stored"}
    for cell in printed["cells"]:
        assert cell["gb_per_second"]["least"] > 0 < cell["cpu_seconds_per_gb"]["least"]
        assert cell["of_limit"].keys() == {
            "gb_per_second",
            "gb_per_consumer_cpu_second",
            "cpu_seconds_per_gb",
        }
    for what in ("live", "stored"):
        stages = printed["stages"]["draftfeed"][what]
        assert min(stages["consumer"]["decode"], stages["producer"]["spool read"]) > 0
        assert (stages["producer"]["encode"] > 0) == (what == "live")
    assert all(goal["verdict"] for goal in printed["goals"])
    (tmp_path / "transport.json").write_text(done.stdout)
    made = run("document.py", f"--results={tmp_path}", f"--docs={tmp_path}")
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "benchmarks.md").read_text()
    assert all(f"| {name} |" in page for name in WIDE & {"tcp", "pyzmq", "files"})
    assert "(benchmarks-wide-1-to-1.svg)" in page
    assert (tmp_path / "benchmarks-wide-1-to-1.svg").read_text().count("draftfeed, stored") == 1
    check = ("document.py", f"--results={tmp_path}", f"--docs={tmp_path}", "--check")
    assert run(*check).returncode == 0
    (tmp_path / "benchmarks.md").write_text(page.replace("pyzmq", "zmq"))
    assert "benchmarks.md" in run(*check).stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["tcp", "draftfeed"])
def test_one_wrong_bit_ends_the_run(transport: str) -> None:
    only = ("--only", transport, "--states", "wide")
    done = run("transport.py", "--quick", "--corrupt", *only)
    assert done.returncode == 1
    assert f"{transport}: sample 0 of producer 0 is not what was sent" in done.stderr


@pytest.mark.timeout(300)
def test_peer_that_is_not_installed_is_a_line_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("raise ImportError('no grpc on this machine')")
    only = ("--only", "tcp", "grpc", "--states", "wide")
    done = run("transport.py", "--quick", "--json", *only, path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["not_run"] == {"grpc": "no grpc on this machine"}
    assert {cell["name"] for cell in printed["cells"]} == {"tcp"}
    assert "not run: grpc: no grpc on this machine" in done.stderr


@pytest.mark.timeout(120)
def test_the_page_of_benchmarks_is_what_the_results_say() -> None:
    done = run("document.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
