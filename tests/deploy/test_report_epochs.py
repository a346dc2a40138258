"""What the demo's report says of several epochs, and which fault fails which of its checks."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from draftfeed_deploy.report import summary_lines
from draftfeed_proto.ids import SampleId
from finished_run import DIGESTS, ONCE, PROMPTS, TRAINED, Run, failed

GENERATED_ONCE = "the target generated each prompt once"
DELIVERED = "every epoch delivered every prompt once"
EQUAL = "later epochs are byte for byte the first"
ARCHIVED = "the archive holds every prompt, undamaged"
EPOCHS = 3


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.go_round(EPOCHS)
    return run


def later(id: str, epoch: int) -> str:
    return str(replace(SampleId.parse(id), epoch=epoch))


def row_of(run: Run, line: int, epoch: int) -> dict[str, Any]:
    id = later(run.ids[line], epoch)
    return next(row for row in run.received if row["id"] == id)


def test_run_that_generated_once_and_trained_thrice_passes_and_says_so(run: Run) -> None:
    report = run.report()
    assert failed(report) == {}
    assert (report.prompts, report.generated, report.trained) == (36, 12, 36)
    assert [(e.epoch, e.generated, e.delivered, e.trained, e.equal) for e in report.epochs] == [
        (1, PROMPTS, PROMPTS, PROMPTS, PROMPTS),
        (2, 0, PROMPTS, PROMPTS, PROMPTS),
        (3, 0, PROMPTS, PROMPTS, PROMPTS),
    ]
    lines = summary_lines(report)
    assert lines[0].startswith("PASSED: 36 of 36 samples of 3 epochs trained")
    assert "  epochs     1: 12 generated, 0.0 s; 2: 12 replayed, 0.0 s" in "\n".join(lines)
    page = (run.dir / "report.html").read_text("utf-8")
    assert '<th scope="row">epoch 3</th><td>0</td><td>12</td>' in page
    assert "36 samples in 3 epochs" in page


def test_report_of_one_epoch_says_nothing_of_epochs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    report = run.report()
    assert report.epochs == []
    assert "epoch 1" not in (run.dir / "report.html").read_text("utf-8")


def test_what_the_archive_lacked_and_was_generated_for_its_epoch_is_named(run: Run) -> None:
    """It passes for a sample like others: only this check says that the target ran for it."""
    again = run.generated[4] | {"id": later(run.ids[4], 1), "digest": "a" * 16}
    run.generated.append(again)
    run.producer[-1]["samples"] += 1
    for epoch in (1, 2):  # the last that was made is served from then on
        row_of(run, 4, epoch)["digest"] = "a" * 16
    report = run.judge()
    assert failed(report).keys() == {GENERATED_ONCE, EQUAL}
    assert "p-04 (line 5, epoch 2)" in failed(report)[GENERATED_ONCE]
    assert "2 differ: p-04 (line 5, epoch 2)" in failed(report)[EQUAL]
    assert [epoch.generated for epoch in report.epochs] == [12, 1, 0]


def one_differs_in_its_last_epoch(run: Run) -> None:
    row_of(run, 3, 2)["digest"] = "f" * 16


def all_differ_from_what_was_made(run: Run) -> None:
    """Alike in every epoch, and spoilt before the first one's digest was taken again."""
    for epoch in range(EPOCHS):
        row_of(run, 3, epoch)["digest"] = "f" * 16


def never_delivered_in_an_epoch(run: Run) -> None:
    run.received.remove(row_of(run, 7, 1))


def delivered_twice_in_an_epoch(run: Run) -> None:
    run.received.append(row_of(run, 7, 1))


def never_trained_in_an_epoch(run: Run) -> None:
    step = next(step for step in run.steps if later(run.ids[2], 2) in step["ids"])
    step["ids"] = [id for id in step["ids"] if id != later(run.ids[2], 2)]


def trained_again_instead_of_the_next_epoch(run: Run) -> None:
    step = next(step for step in run.steps if later(run.ids[2], 2) in step["ids"])
    step["ids"] = [id.replace("/2/0/", "/1/0/") for id in step["ids"]]


def generated_twice(run: Run) -> None:
    run.generated.append(run.generated[1])
    run.producer[-1]["samples"] += 1


def counted_otherwise_than_listed(run: Run) -> None:
    run.producer[-1]["samples"] += 1


def never_archived(run: Run) -> None:
    """The spool held everything to the end, so that each epoch was whole nevertheless."""
    assert run.archived
    run.archived = run.archived | {"segments": 0, "digests": {}}


def archived_as_something_else(run: Run) -> None:
    assert run.archived
    run.archived["digests"][run.ids[6]] = "e" * 16


def archived_and_damaged_there(run: Run) -> None:
    assert run.archived
    run.archived["damaged"] = [run.ids[6]]


def archive_that_was_not_read(run: Run) -> None:
    run.archived = None


FAULTS = [
    (never_archived, {ARCHIVED}, "12 are not in it: p-00 (line 1)"),
    (archived_as_something_else, {ARCHIVED}, "1 are others there: p-06 (line 7)"),
    (archived_and_damaged_there, {ARCHIVED}, "1 are damaged there: p-06 (line 7)"),
    (archive_that_was_not_read, {ARCHIVED}, "archived.json: missing"),
    (one_differs_in_its_last_epoch, {DIGESTS, EQUAL}, "p-03 (line 4, epoch 3)"),
    (all_differ_from_what_was_made, {DIGESTS, EQUAL}, "p-03 (line 4, epoch 2)"),
    (never_delivered_in_an_epoch, {DIGESTS, DELIVERED}, "p-07 (line 8, epoch 2)"),
    (delivered_twice_in_an_epoch, {DELIVERED}, "1 more than once: p-07 (line 8, epoch 2)"),
    (never_trained_in_an_epoch, {TRAINED}, "p-02 (line 3, epoch 3)"),
    (trained_again_instead_of_the_next_epoch, {TRAINED, ONCE}, "p-02 (line 3, epoch 2)"),
    (generated_twice, {GENERATED_ONCE}, "1 more than once: p-01 (line 2)"),
    (counted_otherwise_than_listed, {GENERATED_ONCE}, "counted 13 samples and listed 12"),
]


@pytest.mark.parametrize(
    ("fault", "checks", "words"), FAULTS, ids=[f.__name__ for f, _, _ in FAULTS]
)
def test_fault_fails_its_checks_and_is_named(
    run: Run, fault: Any, checks: set[str], words: str
) -> None:
    fault(run)
    found = failed(run.judge())
    assert found.keys() == checks
    assert words in " ".join(found.values())
