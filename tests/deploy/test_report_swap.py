"""A run in which a second consumer took over: what counts, and what gives it away."""

import copy
from pathlib import Path
from typing import Any

import pytest

from draftfeed_deploy.report import summary_lines
from finished_run import CHECKPOINT, ONCE, READABLE, TRAINED, WIRE, Run, failed

SWAP = "a second consumer took over in mid-run"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The first one trained steps 1 to 3 and saved after 2; the second one goes on from there."""
    run = Run(tmp_path)
    steps = [{**step, "time_seconds": 1.0 + n} for n, step in enumerate(run.steps)]
    again = [{**step, "time_seconds": 4.5 + n} for n, step in enumerate(run.steps[2:])]
    late = [{**row, "time_seconds": 4.0} for row in run.received[:7]]
    sizes = {name: run.consumer[-1][name] // 2 for name in ("logical_bytes", "wire_bytes")}
    for n, snapshot in enumerate(run.producer):
        snapshot |= {"term": 1 if n < 7 else 2, "captured": 35 * n}
    run.steps = steps[:3]
    run.second = {
        "stats": [run.consumer[-1] | sizes],
        "samples": late,
        "steps": again,
    }
    run.swap = {"started_seconds": 2.0, "first_exit_code": 3}
    return run


def test_steps_that_the_second_consumer_made_again_count_once(run: Run) -> None:
    report = run.report()
    assert failed(report) == {}
    assert (report.trained, report.steps) == (12, 4)
    details = {check.name: check.detail for check in report.checks}
    assert "12 uses of 12 samples in 4 optimizer steps; 1 more" in details[ONCE]
    assert details[SWAP] == "2 steps by the first consumer, 2 by the second"


def test_samples_that_the_second_consumer_got_again_may_cross_the_wire_twice(run: Run) -> None:
    assert run.second is not None
    run.second["stats"] = [run.consumer[-1]]
    run.producer[-1]["wire_bytes"] = 14 * run.producer[-1]["logical_bytes"] // 10
    report = run.report()
    assert failed(report) == {}
    details = {check.name: check.detail for check in report.checks}
    assert details[WIRE].endswith("537,600 logical, 376,320 wire on both sides")


def test_times_and_rates_of_the_swap_are_reported(run: Run) -> None:
    swap = run.report().swap
    assert swap is not None
    assert (swap.started_seconds, swap.takeover_seconds) == (2.0, 3.5)
    assert (swap.first_sample_seconds, swap.first_step_seconds) == (4.0, 4.5)
    assert (swap.steps_by_first, swap.steps_undone, swap.steps_by_second) == (2, 1, 2)
    assert swap.before.tokens_per_second == pytest.approx(70)
    assert swap.before.longest_gap_seconds == 0.5
    assert swap.steps_per_second_after == 1
    page = (run.dir / "report.html").read_text("utf-8")
    assert "Swap" in page
    assert "1 undone" in page
    assert any("took over at 3.5 s" in line for line in summary_lines(run.judge()))


def test_generation_that_paused_during_the_swap_shows_as_the_longest_gap(run: Run) -> None:
    for snapshot in run.producer[5:9]:
        snapshot["captured"] = run.producer[4]["captured"]
    swap = run.report().swap
    assert swap is not None
    assert swap.during.longest_gap_seconds == 2.5
    assert swap.before.longest_gap_seconds == 0.5


def sample_lost_in_the_swap(run: Run) -> None:
    assert run.second is not None
    run.second["steps"][0]["ids"] = run.second["steps"][0]["ids"][1:]


def second_consumer_forgot_the_checkpoint(run: Run) -> None:
    """It went on with its own numbers, so that a sample of the first one is trained again."""
    assert run.second is not None
    again = copy.deepcopy(run.second["steps"][-1])
    run.second["steps"].append(again | {"step": 5, "ids": run.ids[:1]})


def first_consumer_was_not_fenced(run: Run) -> None:
    assert run.swap
    run.swap["first_exit_code"] = 0


def producer_saw_no_new_term(run: Run) -> None:
    run.producer[-1]["term"] = 1


@pytest.mark.parametrize(
    ("fault", "checks", "words"),
    [
        (sample_lost_in_the_swap, {TRAINED}, "p-06 (line 7)"),
        (second_consumer_forgot_the_checkpoint, {ONCE}, "p-00 (line 1)"),
        (first_consumer_was_not_fenced, {SWAP}, "ended with exit code 0, not 3"),
        (producer_saw_no_new_term, {SWAP}, "in term 1, not 2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fault_of_a_swap_fails_its_check(
    run: Run, fault: Any, checks: set[str], words: str
) -> None:
    fault(run)
    found = failed(run.judge())
    assert found.keys() == checks
    assert words in "".join(found.values())


def test_swap_in_which_the_second_consumer_trained_nothing_fails(run: Run) -> None:
    assert run.second is not None
    run.second["steps"] = []
    found = failed(run.judge())
    assert "the second consumer trained nothing" in found[SWAP]
    assert TRAINED in found
    assert CHECKPOINT not in found


def test_swap_without_its_record_is_named(run: Run) -> None:
    run.swap = None
    assert "swap.json: missing" in failed(run.judge())[READABLE]
