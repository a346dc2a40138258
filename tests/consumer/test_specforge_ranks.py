"""SpecForge trains in one process, and resumes only what it was: said in one line, and at once."""

import shutil
from pathlib import Path

import pytest
import torch

import tiny_target
from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.trainers.specforge import check, train
from draftfeed_consumer.trainers.specforge_checkpoints import STATE_FILE, latest_checkpoint
from memory_stream import MemoryStream

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run with two samples in a step."""
    out = tmp_path_factory.mktemp("out")
    stream = MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(4))
    train(stream, tiny_target.run(tiny_target_dir, out, batch_size=2))
    return out


def refusal(target: Path, out: Path, **options: object) -> str:
    """What a run that goes on from the newest checkpoint with these options ends with."""
    stream = MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(8), term=2)
    with pytest.raises(TrainerError) as caught:
        train(stream, tiny_target.run(target, out, resume_from="latest", **options))
    assert not stream.steps
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_several_ranks_are_refused_before_the_stream_is_taken(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would begin a training of its own, and save it over the other's."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainerError, match=r"WORLD_SIZE is 2; docs/examples/ddp_trainer\.py"):
        check(tiny_target.run(tiny_target_dir, tmp_path))


def test_one_rank_that_torchrun_started_is_as_good_as_none(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    check(tiny_target.run(tiny_target_dir, tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 1}, "was written with batch_size=2 but this run has batch_size=1"),
        (
            {"batch_size": 2, "accumulation_steps": 2},
            "was written with accumulation_steps=1 but this run has accumulation_steps=2",
        ),
        ({"batch_size": 2, "block_size": 8}, "but this run has"),
    ],
)
def test_what_cannot_change_on_resume_is_named_with_both_values(
    tiny_target_dir: Path, trained: Path, options: dict[str, object], words: str
) -> None:
    assert words in refusal(tiny_target_dir, trained, **options)


def test_checkpoint_of_several_ranks_is_not_resumed_by_one(
    tiny_target_dir: Path, trained: Path, tmp_path: Path
) -> None:
    """Its optimizer's state lies in parts, of which this process would have the first."""
    out = shutil.copytree(trained, tmp_path / "out")
    newest = latest_checkpoint(out)
    assert newest is not None
    state = torch.load(newest / STATE_FILE, weights_only=False)
    torch.save({**state, "world_size": 2}, newest / STATE_FILE)
    words = refusal(tiny_target_dir, out, batch_size=2)
    assert "world_size=1 (written at world_size=2)" in words
