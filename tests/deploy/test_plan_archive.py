"""What the planner says of an archive: whether it fits, how fast it must be, and what it saves."""

import pytest

from draftfeed_deploy.plan_outcome import Outcome, outcome

DAY = 86_400.0


def values(plan: Outcome) -> dict[str, float]:
    return {result.key: result.value for result in plan.results}


def test_one_epoch_of_the_workload_at_our_ratio_fits_on_one_drive_of_30_terabytes() -> None:
    found = values(outcome("e-replay"))
    encoded = 914_000 * 828 * 5 * 5120 * 2 / 1.48
    assert found["archive_bytes"] == pytest.approx(encoded)
    assert found["drives_filled"] == pytest.approx(encoded / 30.72e12)
    assert found["drives_worn"] == pytest.approx(encoded / 28e15)


def test_the_drives_must_read_what_the_trainer_takes() -> None:
    found = values(outcome("e-replay", ["training.samples_per_second=10"]))
    assert found["drives_read_bytes_per_second"] == pytest.approx(10 * 828 * 51_200 / 1.48)
    assert found["drives_read_share"] == pytest.approx(10 * 828 * 51_200 / 1.48 / 7e9)


def test_drives_that_are_slower_than_the_trainer_decide() -> None:
    slow = outcome("e-replay", ["archive.read_bytes_per_second=1e8", "archive.drives=2"])
    found = values(slow)
    assert slow.plan.times.bottleneck == "generation, then drives"
    read = 5 * found["archive_bytes"] / 2e8
    assert found["elapsed_seconds"] == pytest.approx(found["generation_seconds"] + read)
    writing = outcome("e-replay", ["archive.write_bytes_per_second=1e7"])
    assert writing.plan.times.bottleneck.startswith("drives")


def test_replay_prefill_and_generating_again_are_compared_in_both_directions() -> None:
    plans = {name: values(outcome(name)) for name in ("b-split", "e-replay", "f-prefill-later")}
    elapsed = {name: found["elapsed_seconds"] for name, found in plans.items()}
    replay, prefill = plans["e-replay"], plans["f-prefill-later"]
    saved = elapsed["b-split"] - elapsed["e-replay"]
    assert replay["saved_against_generate_seconds"] == pytest.approx(saved)
    assert saved > 2 * DAY
    between = elapsed["f-prefill-later"] - elapsed["e-replay"]
    assert replay["saved_against_prefill_seconds"] == pytest.approx(between)
    assert prefill["saved_against_replay_seconds"] == pytest.approx(-between)
    assert not any(key.startswith("saved_") for key in plans["b-split"])


@pytest.mark.parametrize(
    ("drive_bytes", "grade", "words"),
    [(15e12, "impossible", "does not fit"), (28e12, "warning", "leaves less than a tenth free")],
)
def test_an_archive_that_does_not_fit_is_said_so(
    drive_bytes: float, grade: str, words: str
) -> None:
    found = outcome("e-replay", [f"archive.drive_bytes={drive_bytes}"]).findings
    assert any(one.grade == grade and words in one.text for one in found), found


def test_a_drive_that_one_run_wears_out_is_said_so() -> None:
    found = outcome("e-replay", ["archive.endurance_bytes=5e13"]).findings
    assert any("of the endurance" in one.text for one in found), found
