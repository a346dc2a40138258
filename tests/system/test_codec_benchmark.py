"""The codec's benchmark runs and prints its figures; whether those are good is not a test's to
say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftfeed_proto.codecs import packed
from tiny_models import make_qwen3

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "codec.py"
SETS = ["fp16 from bf16", "bf16", "true fp16", "wide, fp16", "wide, bf16"]
PEERS = {"lz4", "zstd-1", "blosc2", "zipnn", "openzl"}


def run(target: Path, cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    smallest = ["--rounds", "1", "--chunks", "1", "--layers", "1,3,4", "--target", str(target)]
    command = [sys.executable, str(SCRIPT), *smallest, *options]
    own = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=own)


@pytest.mark.timeout(300)
def test_every_codec_is_in_the_table_and_in_the_document_of_each_set(tmp_path: Path) -> None:
    done = run(make_qwen3(tmp_path / "qwen3"), tmp_path / "cache", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    implementations = {f"packed {name}" for name in packed.NAMES}
    coders = {"memcpy", "raw", "zstd"} | implementations | PEERS
    run_here = coders - printed["not_run"].keys()
    assert run_here >= {f"packed {name}" for name in packed.available().implementations}
    assert [data["name"] for data in printed["sets"]] == SETS
    for data in printed["sets"]:
        assert data["coders"].keys() == run_here
        (turns,) = data["rounds"]
        assert turns.keys() == run_here
        ratios = [data["coders"][name]["ratio"] for name in implementations & run_here]
        assert all(ratio == ratios[0] for ratio in ratios)
        assert all(set(ratio) == set(data["chunks"]) for ratio in ratios)
    for name in run_here:
        pattern = rf"^{re.escape(name)} .* \d+\.\d\d-\d+\.\d\d"
        assert len(re.findall(pattern, done.stderr, re.MULTILINE)) == len(SETS), done.stderr
    for name in coders - run_here:
        assert f"not run: {name}: " in done.stderr
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 4, "states that are read once"
    assert printed["versions"].keys() >= {"numpy", "torch"}
    assert all(goal["verdict"] for goal in printed["goals"])
