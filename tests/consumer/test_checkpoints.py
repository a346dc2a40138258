"""Checkpoints of anyone's loop: which one is the newest, and when the producer hears of it."""

from pathlib import Path
from typing import Any

import torch

from draftfeed_consumer.checkpoints import Checkpoints
from memory_stream import MemoryStream, descriptor, make_item, sample_id

DESCRIPTOR = descriptor((1,), layers=3, hidden=4, vocab=16)


def stream(**options: Any) -> MemoryStream:
    tokens = torch.arange(3)
    items = [make_item(sample_id(n), tokens, 1, torch.zeros(2, 1, 4)) for n in range(4)]
    return MemoryStream(DESCRIPTOR, items, **options)


def train(source: MemoryStream, samples: int) -> None:
    for step, item in zip(range(samples), source, strict=False):
        source.trained([item["id"]], step)


def test_run_goes_on_with_its_weights_and_what_they_have_not_seen(tmp_path: Path) -> None:
    first = stream()
    checkpoints = Checkpoints(tmp_path, first)
    assert checkpoints.load() is None
    train(first, 3)
    checkpoints.save({"weights": {"w": torch.ones(2)}, "step": 3})
    again = stream(term=2)
    saved = Checkpoints(tmp_path, again).load()
    assert saved is not None
    assert saved["step"] == 3
    assert torch.equal(saved["weights"]["w"], torch.ones(2))
    train(again, 4)
    assert again.trained_ids == [sample_id(3)]


def test_newest_is_of_the_highest_term_whenever_it_was_written(tmp_path: Path) -> None:
    """The node that was replaced was still saving, and its checkpoint came last."""
    Checkpoints(tmp_path, stream(term=2)).save({"node": "new"})
    Checkpoints(tmp_path, stream(term=1)).save({"node": "old"})
    assert Checkpoints(tmp_path, stream(term=3)).load() == {"node": "new"}


def test_producer_hears_of_a_checkpoint_when_it_is_there_and_others_are_kept_until_then(
    tmp_path: Path,
) -> None:
    seen: list[list[str]] = []

    def on_commit(_: dict[str, Any]) -> None:
        paths = checkpoints.paths()
        assert torch.load(paths[-1])["step"] == len(seen)
        seen.append([path.name for path in paths])

    checkpoints = Checkpoints(tmp_path, stream(on_commit=on_commit), name="probe", keep=2)
    for step in range(3):
        checkpoints.save({"step": step})
    names = [f"probe-000001-0000000{number}.pt" for number in (1, 2, 3)]
    assert seen == [names[:1], names[:2], names]
    assert [path.name for path in checkpoints.paths()] == names[1:]


def test_checkpoint_that_was_cut_off_is_none(tmp_path: Path) -> None:
    Checkpoints(tmp_path, stream()).save({"step": 1})
    (tmp_path / "checkpoint-000002-00000001.pt.tmp").write_bytes(b"PK")
    assert Checkpoints(tmp_path, stream(term=3)).load() == {"step": 1}
