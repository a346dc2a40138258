import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from draftfeed_deploy.reckoning import Difference
from draftfeed_deploy.report import Report, judge_run, summary_lines, write_report
from draftfeed_proto.ids import SampleId
from finished_run import (
    ACCOUNTED,
    AGREED,
    AUDIT,
    CHECKPOINT,
    DIGESTS,
    LOSS,
    ONCE,
    PROMPTS,
    READABLE,
    ROWS,
    TRAINED,
    VALUES,
    WIRE,
    Run,
    failed,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_that_went_well_passes_every_check(run: Run) -> None:
    report = run.report()
    assert failed(report) == {}
    assert report.passed
    assert (report.prompts, report.generated, report.trained, report.steps) == (12, 12, 12, 4)
    assert report.tokens_per_second == pytest.approx(70)
    assert report.ratio == pytest.approx(10 / 7, rel=1e-3)
    assert report.final_training_loss == 2.0
    assert [layer.saturated for layer in report.layers] == [0, 0, 7, 0, 0]


def test_layers_are_named_by_their_ids(run: Run) -> None:
    """They were numbered from 1, as no other output does."""
    report = run.report()
    assert [layer.layer for layer in report.layers] == ["1", "8", "14", "20", "final"]
    raw = json.loads((run.dir / "report.json").read_bytes())
    assert raw["layers"][2] == {"layer": "14", "nonfinite": 0, "saturated": 7, "zero_rows": 0}
    page = (run.dir / "report.html").read_text()
    assert '<th scope="row">14</th><td>0</td><td>7</td><td>0</td>' in page


def test_samples_that_are_finished_all_at_once_took_longer_than_their_last_second(
    run: Run,
) -> None:
    """Seven thousand tokens a second were reported of a target that made seventy."""
    for at, snapshot in enumerate(run.producer):
        snapshot["phase"] = "loading" if at < 3 else "generating"
        snapshot["tokens"] = 0 if at < 12 else snapshot["tokens"]
    times = [snapshot["time_seconds"] for snapshot in run.producer]
    expected = run.producer[-1]["tokens"] / (times[-1] - times[2])
    assert run.report().tokens_per_second == pytest.approx(expected)


def test_report_json_decodes_to_the_report_that_was_returned(run: Run) -> None:
    report = run.report()
    raw = (run.dir / "report.json").read_bytes()
    assert msgspec.json.decode(raw, type=Report) == report
    assert json.loads(raw)["passed"] is True
    digest_flipped(run)
    run.report()
    assert json.loads((run.dir / "report.json").read_bytes())["passed"] is False


def trained_twice(run: Run) -> None:
    run.steps[2]["ids"] = [*run.steps[2]["ids"], run.ids[0]]


def lost_before_training(run: Run) -> None:
    run.steps[1]["ids"] = run.steps[1]["ids"][1:]


def lost_before_generation(run: Run) -> None:
    run.generated, run.received = run.generated[:-1], run.received[1:]
    run.steps[-1]["ids"] = run.steps[-1]["ids"][:-1]


def generated_from_another_file(run: Run) -> None:
    stranger = str(SampleId("0" * 16, 0, 0, 3))
    run.generated.append(run.generated[3] | {"id": stranger})
    run.received.append(
        {"id": stranger, "rows": 33, "tokens": 34, "digest": run.generated[3]["digest"]}
    )
    run.steps[-1]["ids"] = [*run.steps[-1]["ids"], stranger]


def trained_although_rejected(run: Run) -> None:
    run.rejected = [{"id": run.ids[4], "reason": "empty response"}]


def digest_flipped(run: Run) -> None:
    run.received[5]["digest"] = "f" * 16


def trained_but_never_received(run: Run) -> None:
    run.received = run.received[1:]


def row_missing_at_the_consumer(run: Run) -> None:
    run.received[5]["tokens"] += 1


def row_missing_at_the_producer(run: Run) -> None:
    run.generated[5]["tokens"] += 1


def row_lost_on_the_way(run: Run) -> None:
    run.generated[5]["rows"] += 1


def wire_larger_than_the_tensors(run: Run) -> None:
    run.producer[-1]["wire_bytes"] = run.producer[-1]["logical_bytes"] + 1


def nothing_crossed_the_wire(run: Run) -> None:
    run.consumer[-1]["wire_bytes"] = 0


def loss_not_fallen_enough(run: Run) -> None:
    assert run.evaluation
    run.evaluation["trained_loss"] = 6.01


def loss_of_a_worse_than_random_start_that_fell_to_random(run: Run) -> None:
    assert run.evaluation
    run.evaluation |= {"untrained_loss": 15.0, "trained_loss": 6.94}


def loss_is_not_a_number(run: Run) -> None:
    assert run.evaluation
    run.evaluation["trained_loss"] = float("nan")


def evaluation_missing(run: Run) -> None:
    run.evaluation = None


def nan_in_one_layer(run: Run) -> None:
    run.producer[-1]["nonfinite"] = [0, 0, 0, 1, 0]


def rows_of_zeros_in_one_layer(run: Run) -> None:
    run.producer[-1]["zero_rows"] = [0, 2, 0, 0, 0]


def zero_rows_not_counted(run: Run) -> None:
    del run.producer[-1]["zero_rows"]


def trained_after_the_last_checkpoint(run: Run) -> None:
    run.checkpoint = {"step": 3, "trained": run.ids[:9]}


def checkpoint_contains_what_no_step_trained(run: Run) -> None:
    stranger = str(SampleId("0" * 16, 0, 0, 3))
    run.checkpoint = {"step": 4, "trained": [*run.ids, stranger]}


def no_checkpoint(run: Run) -> None:
    run.checkpoint = None


def spool_that_does_not_know_a_prompt(run: Run) -> None:
    missing = Difference(1, [run.ids[3]])
    run.audit = replace(AGREED, trained=PROMPTS - 1, missing=missing)


def prompt_left_behind_in_the_spool(run: Run) -> None:
    run.audit = replace(AGREED, trained=PROMPTS - 1, deliverable=1)


FAULTS = [
    (spool_that_does_not_know_a_prompt, AUDIT, "missing: 1 ("),
    (prompt_left_behind_in_the_spool, AUDIT, "1 not terminal"),
    (trained_after_the_last_checkpoint, CHECKPOINT, "3 trained and not in it: p-09 (line 10)"),
    (checkpoint_contains_what_no_step_trained, CHECKPOINT, "1 in it and in no step: 0000"),
    (no_checkpoint, CHECKPOINT, "checkpoint.json: missing"),
    (trained_twice, ONCE, "p-00 (line 1)"),
    (lost_before_training, TRAINED, "p-03 (line 4)"),
    (lost_before_generation, ACCOUNTED, "p-11 (line 12)"),
    (generated_from_another_file, ACCOUNTED, "0000000000000000/0/0/3"),
    (trained_although_rejected, TRAINED, "p-04 (line 5)"),
    (digest_flipped, DIGESTS, "p-06 (line 7)"),
    (trained_but_never_received, DIGESTS, "p-11 (line 12)"),
    (row_missing_at_the_consumer, ROWS, "p-06 (line 7)"),
    (row_missing_at_the_producer, ROWS, "p-05 (line 6)"),
    (row_lost_on_the_way, ROWS, "p-05 (line 6)"),
    (wire_larger_than_the_tensors, WIRE, "producer"),
    (nothing_crossed_the_wire, WIRE, "consumer"),
    (loss_not_fallen_enough, LOSS, "6.010 trained"),
    (loss_of_a_worse_than_random_start_that_fell_to_random, LOSS, "6.931 by uniform guessing"),
    (loss_is_not_a_number, LOSS, "evaluation.json"),
    (evaluation_missing, LOSS, "evaluation.json: missing"),
    (nan_in_one_layer, VALUES, "0, 0, 0, 1, 0"),
    (rows_of_zeros_in_one_layer, VALUES, "all-zero rows per layer: 0, 2, 0, 0, 0"),
    (zero_rows_not_counted, VALUES, "recorded no count"),
]


@pytest.mark.parametrize(
    ("fault", "check", "words"), FAULTS, ids=[f.__name__ for f, _, _ in FAULTS]
)
def test_fault_fails_exactly_its_check_and_is_named(
    run: Run, fault: Any, check: str, words: str
) -> None:
    fault(run)
    report = run.judge()
    assert list(failed(report)) == [check]
    assert words in failed(report)[check]
    assert not report.passed


def test_rejected_samples_are_named_and_do_not_fail_the_run(run: Run) -> None:
    run.steps[1]["ids"] = run.steps[1]["ids"][1:]
    run.rejected = [{"id": run.ids[3], "reason": "empty response"}]
    report = run.judge()
    assert failed(report) == {}
    details = {check.name: check.detail for check in report.checks}
    assert "p-03 (line 4): empty response" in details[TRAINED]


def test_ungated_numbers_never_fail_the_run(run: Run) -> None:
    assert run.evaluation
    run.evaluation |= {"same_as_greedy": False, "accepted_length": 1.0}
    run.producer[-1]["stall_seconds"] = {"spool_full": 600.0, "no_credit": 600.0}
    assert run.judge().passed


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("producer/stats.jsonl", set()),
        ("consumer/stats.jsonl", set()),
        ("producer/samples.jsonl", {ACCOUNTED, TRAINED, DIGESTS}),
        ("consumer/samples.jsonl", {DIGESTS}),
        ("consumer/steps.jsonl", {TRAINED, CHECKPOINT}),
    ],
)
def test_line_cut_in_half_by_a_kill_is_reported_with_its_number(
    run: Run, name: str, others: set[str]
) -> None:
    run.write_files()
    path = run.dir / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 20])
    report = judge_run(run.dir, run.prompts)
    assert failed(report).keys() == {READABLE} | others
    lines = whole.count(b"\n")
    assert f"{name} line {lines}:" in failed(report)[READABLE]


@pytest.mark.parametrize(
    "damage", [b"", b"\xff\xfe\x00", b"[1, 2]\n", b'{"step": "x"}\n', b"null\n"], ids=repr
)
def test_garbage_in_every_file_gives_a_failed_report_and_no_traceback(
    run: Run, damage: bytes
) -> None:
    run.write_files()
    for path in [*run.dir.rglob("*.json*"), run.prompts]:
        path.write_bytes(damage)
    report = write_report(run.dir, run.prompts)
    assert not report.passed
    assert {ACCOUNTED, TRAINED, ONCE, LOSS, VALUES} & failed(report).keys()
    assert (run.dir / "report.html").exists()


def test_run_killed_before_it_wrote_anything_fails_everything(tmp_path: Path) -> None:
    report = write_report(tmp_path / "run", tmp_path / "no-prompts.jsonl")
    assert set(failed(report)) >= {READABLE, ACCOUNTED, ONCE, DIGESTS, ROWS, WIRE, LOSS, VALUES}
    assert "no-prompts.jsonl cannot be read" in failed(report)[ACCOUNTED]
    assert len(summary_lines(report)) <= 20
    assert "nothing was recorded" in (tmp_path / "run/report.html").read_text("utf-8")


def test_ids_of_a_sharded_prompt_file_are_expected_by_shard(run: Run) -> None:
    run.rename({id: id.replace("/0/0/", f"/0/{n // 5}/") for n, id in enumerate(run.ids)})
    run.write_files()
    assert failed(judge_run(run.dir, run.prompts, shard_size=5)) == {}
    assert list(failed(judge_run(run.dir, run.prompts))) == [ACCOUNTED]


def test_blank_lines_of_the_prompt_file_are_no_prompts_but_keep_their_ordinal(run: Run) -> None:
    lines = run.prompts.read_bytes().split(b"\n")
    run.prompts.write_bytes(b"\n".join([*lines[:1], b"", *lines[1:]]))
    dataset = hashlib.sha256(run.prompts.read_bytes()).hexdigest()[:16]
    moved = [str(SampleId(dataset, 0, 0, i)) for i in range(PROMPTS + 1) if i != 1]
    run.rename(dict(zip(run.ids, moved, strict=True)))
    assert failed(run.judge()) == {}


def test_page_shows_the_figures_and_three_plots_and_loads_nothing(run: Run) -> None:
    report = run.report()
    page = (run.dir / "report.html").read_text("utf-8")
    assert page.count("<svg") == 3
    assert all(check.name in page for check in report.checks)
    for figure in (
        "All checks passed",
        "1.429",
        "8.00 → 5.00",
        "1.25",
        "6.93 (ln 1,024)",
        "buffer empty",
        "2.2 s",
        "70",
    ):
        assert figure in page
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|\bsrc=", page)
    assert not re.findall(r"\$\w+", page)


def test_ids_inside_the_page_are_unique(run: Run) -> None:
    run.report()
    ids = re.findall(r'\bid="([^"]+)"', (run.dir / "report.html").read_text("utf-8"))
    assert len(ids) == len(set(ids)) > 20


def test_text_from_the_run_is_escaped_in_the_page(run: Run) -> None:
    run.rejected = [{"id": "<script>alert(1)</script>", "reason": "<b>"}]
    run.report()
    page = (run.dir / "report.html").read_text("utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_summary_is_short_plain_text_and_names_what_failed(run: Run) -> None:
    digest_flipped(run)
    trained_twice(run)
    lines = summary_lines(run.judge())
    assert len(lines) <= 20
    assert lines[0].startswith("FAILED: 12 of 12 prompts trained")
    assert sum(line.startswith("  FAILED ") for line in lines) == 2
    assert all(line.isascii() and "\n" not in line for line in lines)


def test_counters_that_restart_at_zero_do_not_break_the_plots(run: Run) -> None:
    run.producer += [
        copy.deepcopy(run.producer[0]) | {"time_seconds": 7.0},
        run.producer[-1] | {"time_seconds": 8.0},
    ]
    assert failed(run.report()) == {}
