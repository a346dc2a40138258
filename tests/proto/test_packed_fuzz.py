"""The codec's C against hostile payloads and any states, for half a minute. `make fuzz` searches
for as long as one likes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import packed_fuzz

SECONDS = 30
MISSING = "no clang with libFuzzer: on Debian the packages clang and libclang-rt-14-dev"

pytestmark = pytest.mark.timeout(300)


@pytest.mark.skipif(
    not packed_fuzz.available() and os.environ.get("CI") != "true",
    reason=MISSING,
)
def test_no_input_makes_the_codec_overrun_or_disagree(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A crash in a consumer, or states that depend on which processor decoded them."""
    assert packed_fuzz.available(), MISSING
    corpus, seeds, crashes = (tmp_path / name for name in ("corpus", "seeds", "crashes"))
    for folder in (corpus, seeds, crashes):
        folder.mkdir()
    binary = packed_fuzz.build(tmp_path)
    packed_fuzz.write_seeds(seeds)
    finished = packed_fuzz.fuzz(binary, corpus, seeds, crashes, SECONDS)
    record_property(f"inputs in {SECONDS} s", f"{finished.executions:,}")
    record_property("edges covered", str(finished.covered))
    assert not finished.crashes, f"{finished.output}\nfails: {_kept(finished.crashes[0])}"
    assert finished.executions > len(list(seeds.iterdir()))


def _kept(crash: Path) -> Path:
    """The input, where the next test run does not remove it."""
    folder = Path(__file__).parents[2] / "runs/fuzz/crashes"
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(crash, folder))
