"""Tensor parallelism: two schedulers have the same states, one of them gives them out."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rank_digests
from engine_suite import (  # noqa: F401 - the tests are run here
    Captured,
    make_prompts,
    test_counters_are_the_sums_over_a_samples_own_rows,
    test_every_sample_has_one_id_more_than_rows,
    test_layer_ids_shifted_by_one_do_not_pass_for_equal,
    test_prefill_of_a_response_makes_the_sample_that_live_capture_made,
    test_rows_captured_in_prefill_mode_equal_one_full_forward_pass,
    test_rows_captured_while_generating_equal_one_full_forward_pass,
    test_rows_shifted_by_one_do_not_pass_for_equal,
    test_the_final_state_equals_that_of_one_full_forward_pass,
    test_the_final_state_makes_the_targets_logits,
    test_what_stands_for_the_state_before_the_norm_makes_the_targets_logits,
)
from sglang_engines import Case, Running, fed, in_order, processes_of, started
from sglang_suite import (  # noqa: F401 - the tests are run here
    captured,
    greedy,
    prefilled,
    reader,
    test_greedy_tokens_equal_those_of_transformers,
)
from waiting import eventually

pytestmark = pytest.mark.timeout(300)

CASE = Case(
    "tiny_qwen3",
    (0, 2, 4),
    {"disable_overlap_schedule": True},
    tp_size=2,
    final="postnorm",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory the ranks write to; SGLang finds the plugin on the path of its interpreter."""
    there, plugin = (tmp_path_factory.mktemp(name) for name in ("ranks", "plugin"))
    shutil.copy(rank_digests.__file__, plugin)
    info = plugin / "rank_digests-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rank-digests\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nranks = rank_digests:load\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(plugin), prepend=os.pathsep)
        patch.setenv(rank_digests.DIRECTORY, str(there))
        yield there


@pytest.fixture(scope="module")
def running(ranks: Path, tiny_qwen3: Path) -> Iterator[Running]:
    with started(CASE, tiny_qwen3) as running:
        yield running


def test_both_ranks_have_the_same_states_and_one_gives_them_out(
    running: Running,
    captured: Captured,  # noqa: F811
    ranks: Path,
    record_property: Callable[[str, object], None],
):
    """Every rank copies and sends."""
    names = processes_of(running.log.host).values()
    assert len([name for name in names if "scheduler" in name]) == 2
    engine = running.with_()
    before = engine.captured
    samples = in_order(engine.run(iter(make_prompts([7, 12, 3]))))
    assert engine.captured - before == fed(samples)

    def passes(rank: int) -> list[str]:
        return (ranks / f"rank{rank}").read_text().splitlines()

    eventually(lambda: len(passes(0)) == len(passes(1)), "as many passes on either rank")
    assert passes(0) == passes(1)
    rows = sum(int(line.split()[0]) for line in passes(1))
    record_property("rows with equal bits on both ranks", str(rows))
    assert rows >= fed(captured.samples) + fed(samples)
