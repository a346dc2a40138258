"""SpecForge on nodes that replace each other, and at producers whose spool is full."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

import tiny_target
from draftfeed_consumer.trainers import TrainResult, dflash
from draftfeed_consumer.trainers.specforge import train
from draftfeed_consumer.trainers.specforge_checkpoints import latest_checkpoint
from draftfeed_consumer.trainers.specforge_hooks import IdleCheckpoints
from draftfeed_proto.ids import SampleId
from memory_stream import FullSpool, MemoryStream, checkpoints, sample_id

pytestmark = pytest.mark.timeout(300)


def node(
    target: Path, out: Path, term: int, count: int, resume_from: str = "latest", **options: object
) -> MemoryStream:
    """Trains the first `count` samples that its checkpoint has not."""
    stream = MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(count), term=term)
    train(stream, tiny_target.run(target, out, resume_from=resume_from, **options))
    return stream


@pytest.mark.parametrize(
    ("holds", "batch_size", "accumulation_steps"), [(4, 1, 1), (3, 2, 1), (7, 2, 3)]
)
def test_trainer_idle_at_a_full_spool_makes_the_checkpoints_that_free_it(
    tiny_target_dir: Path, tmp_path: Path, holds: int, batch_size: int, accumulation_steps: int
) -> None:
    """Its next checkpoint is far away, and what it holds fills no further step."""
    stream = FullSpool(tiny_target.DESCRIPTOR, tiny_target.items(18), holds, checkpoints=2)
    options = {"batch_size": batch_size, "accumulation_steps": accumulation_steps}
    train(stream, tiny_target.run(tiny_target_dir, tmp_path, save_interval_steps=1000, **options))
    assert sorted(stream.trained_ids) == [sample_id(n) for n in range(18)]
    assert {len(step) for step in stream.steps} == {batch_size * accumulation_steps}
    numbers = stream.committed_numbers
    assert len(numbers) >= 2 * ((18 - 1) // holds)
    assert numbers == sorted(set(numbers)), "the second of two equal ones needs a higher number"


def test_resumed_trainer_makes_its_checkpoint_again_for_a_full_spool(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    node(tiny_target_dir, tmp_path, 1, count=3, batch_size=3)
    stream = FullSpool(tiny_target.DESCRIPTOR, tiny_target.items(9), holds=2, checkpoints=2)
    options = {"resume_from": "latest", "batch_size": 3, "max_checkpoints": 9}
    result = train(stream, tiny_target.run(tiny_target_dir, tmp_path, **options))
    assert result.steps == 3
    assert checkpoints(tmp_path)[:3] == [f"drafter-1.{number}-step1" for number in (1, 2, 3)]


def test_checkpoints_that_free_nothing_are_not_made_without_end() -> None:
    stream = MemoryStream(tiny_target.DESCRIPTOR, [])
    saved: list[float] = []
    idle = IdleCheckpoints(stream, lambda: saved.append(time.monotonic()), lambda: 7)
    stream.checkpoint_wanted = True
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        idle.sleep(0.01)
    assert 2 <= len(saved) <= 3


def test_no_checkpoint_is_made_in_the_middle_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    stream = MemoryStream(tiny_target.DESCRIPTOR, [])
    stream.checkpoint_wanted = True
    for step in (None, 0):
        IdleCheckpoints(stream, lambda: pytest.fail("saved"), lambda step=step: step).sleep(0)
    assert caplog.text.count("full before one optimizer step has its samples") == 1


class Drained(MemoryStream):
    """Asked to stop in the middle."""

    def trained(
        self, ids: Iterable[SampleId], step: int, metrics: dict[str, float] | None = None
    ) -> None:
        super().trained(ids, step, metrics)
        self.drain()


def test_drained_trainer_saves_its_progress_and_keeps_no_tail(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """What it had not trained is for whoever comes next, not lost to an unfilled step."""
    stream = Drained(tiny_target.DESCRIPTOR, tiny_target.items(40))
    run = tiny_target.run(tiny_target_dir, tmp_path, batch_size=3, save_interval_steps=1000)
    result: TrainResult = train(stream, run)
    assert 3 <= result.trained < 40
    assert result.tail == ()
    assert stream.tails == []
    assert result.checkpoint is not None
    state = dflash.read_state(result.checkpoint)["draftfeed"]
    assert state["trained"] == sorted(map(str, stream.trained_ids))
    assert len(stream.committed_numbers) == 1


def test_half_written_checkpoint_is_never_the_latest(tiny_target_dir: Path, tmp_path: Path) -> None:
    node(tiny_target_dir, tmp_path, 1, count=2)
    half = tmp_path / "drafter-1.7-step9"
    half.mkdir()
    (half / "training_state_rank0.pt").write_bytes(b"whole")
    (half / "training_state.pt.tmp").write_bytes(b"hal")
    assert latest_checkpoint(tmp_path) == tmp_path / "drafter-1.1-step2"
    second = node(tiny_target_dir, tmp_path, 2, count=3)
    assert second.trained_ids == [sample_id(2)]


@pytest.mark.parametrize("max_checkpoints", [1, 9])
def test_replaced_node_that_saves_late_does_not_become_the_latest(
    tiny_target_dir: Path, tmp_path: Path, max_checkpoints: int
) -> None:
    node(tiny_target_dir, tmp_path, 1, count=2, max_checkpoints=9)
    node(tiny_target_dir, tmp_path, 2, count=3, max_checkpoints=9)
    before = dflash.read_state(tmp_path / "drafter-2.2-step3")["draftfeed"]
    # It was replaced after its first checkpoint, and trains and saves four more steps.
    first = str(tmp_path / "drafter-1.1-step2")
    options = {"save_interval_steps": 1, "max_checkpoints": max_checkpoints}
    node(tiny_target_dir, tmp_path, 1, count=6, resume_from=first, **options)
    assert latest_checkpoint(tmp_path) == tmp_path / "drafter-2.2-step3"
    assert dflash.read_state(tmp_path / "drafter-2.2-step3")["draftfeed"] == before
    assert "drafter-1.5-step6" in checkpoints(tmp_path), "a run resumed further back keeps its own"
    third = node(tiny_target_dir, tmp_path, 3, count=6)
    assert third.trained_ids == [sample_id(n) for n in (3, 4, 5)]


def test_old_checkpoints_go_and_so_do_the_halves_before_them(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "drafter-1.2-step2").mkdir()
    stream = node(tiny_target_dir, tmp_path, 2, count=4, save_interval_steps=1)
    assert stream.committed_numbers == [1, 2, 3, 4]
    assert checkpoints(tmp_path) == ["drafter-2.3-step3", "drafter-2.4-step4"]
