"""What `keep_chunks_mapped` changes, in a process of its own: it cannot be undone."""

import os
import subprocess
import sys

import pytest

RECEIVE = """
import resource, sys
from draftfeed_consumer.memory import keep_chunks_mapped
if "keep" in sys.argv and not keep_chunks_mapped():
    print("none"), sys.exit()
import numpy as np
def chunks(count):
    for _ in range(count):
        frame = np.ones(4 << 20, np.uint8)
        decoded = np.ones(8 << 20, np.uint8)
        sample = np.empty(40 << 20, np.uint8)
chunks(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
chunks(50)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*options: str) -> str:
    # Huge pages would make faults rare either way.
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    command = [sys.executable, "-c", RECEIVE, *options]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_memory_of_chunks_is_not_mapped_anew_for_each_sample() -> None:
    kept = page_faults("keep")
    if kept == "none":
        pytest.skip("this C library has no mallopt")
    assert int(kept) < int(page_faults()) / 10
