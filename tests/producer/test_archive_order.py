"""In which order an epoch comes out of an archive, how well that is mixed, and parts of it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archive_helpers import archive_samples, archiving, lines, opened
from draftfeed_producer.archive import Archive
from draftfeed_producer.archive.config import Order
from draftfeed_producer.archive.shelf import Shelf, shuffled
from draftfeed_producer.engines import ReplayConfig
from draftfeed_producer.sources import replay_source
from draftfeed_proto.ids import IdSet
from samples import sample

COUNT = 24
ORDERS: list[Order] = ["samples", "segments", "stored"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 samples, each in a segment of its own."""
    path = tmp_path_factory.mktemp("archive")
    with opened(path / "root") as archive:
        archive_samples(path / "spool", archive, range(COUNT))
    return path / "root"


def served(directory: Path, root: Path, epoch: int, **options: Any) -> list[int]:
    """Lines, in order."""
    with opened(root, **options) as archive, archiving(directory, archive) as spool:
        shelf = Shelf(spool)
        shelf.begin(epoch, lines(range(COUNT), epoch))
        found = []
        while (taken := shelf.take()) is not None:
            id, header = taken
            assert header is not None
            assert id.epoch == epoch
            found.append(id.ordinal)
        return found


@pytest.mark.parametrize("order", ORDERS)
def test_every_line_comes_once_and_the_same_way_for_the_same_seed(
    root: Path, tmp_path: Path, order: Order
) -> None:
    first = served(tmp_path / "1", root, 1, order=order)
    assert sorted(first) == list(range(COUNT))
    assert served(tmp_path / "2", root, 1, order=order) == first
    again = served(tmp_path / "3", root, 2, order=order)
    other_seed = served(tmp_path / "4", root, 1, order=order, seed=1)
    assert sorted(again) == sorted(other_seed) == list(range(COUNT))
    if order == "stored":
        assert again == other_seed == first
    else:
        assert first not in (again, other_seed)
        assert again != other_seed


def test_segments_are_served_one_after_the_other(tmp_path: Path) -> None:
    segments = np.repeat(np.arange(40), 25)
    order = shuffled(np.arange(1000), segments, "segments", 0, 1)
    assert sorted(order) == list(range(1000))
    changes = np.flatnonzero(np.diff(segments[order]))
    assert len(changes) == 39
    assert not np.array_equal(np.sort(order[:25]), order[:25]), "within one they are shuffled"


SEGMENTS, EACH, WINDOW = 400, 50, 64


def through_window(order: np.ndarray, window: int) -> np.ndarray:
    """As the consumer's buffer draws: one at random of the oldest so many."""
    rng, waiting, found = random.Random(0), list[int](), []
    for one in order.tolist():
        waiting.append(one)
        if len(waiting) == window:
            found.append(waiting.pop(rng.randrange(window)))
    rng.shuffle(waiting)
    return np.array(found + waiting)


def neighbours(order: np.ndarray, segments: np.ndarray) -> float:
    """Of any 64 samples that are trained one after the other: how many have another one of their
    own segment among them. Windows side by side."""
    whole = len(order) // WINDOW * WINDOW
    count = 0
    for window in segments[order[:whole]].reshape(-1, WINDOW):
        _, sizes = np.unique(window, return_counts=True)
        count += int(sizes[sizes > 1].sum())
    return count / whole


def correlation(order: np.ndarray) -> float:
    """Spearman's, of when a sample is served with where it was stored."""
    return float(np.corrcoef(order, np.arange(len(order)))[0, 1])


@pytest.mark.parametrize(
    ("order", "most_correlation", "least", "most"),
    [("samples", 0.03, 0.10, 0.20), ("segments", 0.15, 0.9, 1.0), ("stored", 1.0, 0.9, 1.0)],
)
def test_how_well_each_order_mixes(
    order: Order,
    most_correlation: float,
    least: float,
    most: float,
    record_property: Callable[[str, object], None],
) -> None:
    """20,000 samples in 400 segments of 50, drawn from a window of 64 in the consumer."""
    segments = np.repeat(np.arange(SEGMENTS), EACH)
    places = np.arange(SEGMENTS * EACH)
    orders = [shuffled(places, segments, order, 0, epoch) for epoch in (1, 2)]
    served, drawn = orders[0], through_window(orders[0], WINDOW)
    assert abs(correlation(drawn)) <= most_correlation
    assert least <= neighbours(drawn, segments) <= most
    near = neighbours(through_window(orders[0], 4096), segments)
    record_property("correlation with the place, served", round(correlation(served), 3))
    record_property("correlation with the place, window 64", round(correlation(drawn), 3))
    record_property("of 64, of one segment, served", round(neighbours(served, segments), 3))
    record_property("of 64, of one segment, window 64", round(neighbours(drawn, segments), 3))
    record_property("of 64, of one segment, window 4096", round(near, 3))
    both = np.argsort(orders[0]), np.argsort(orders[1])
    record_property("correlation of two epochs", round(float(np.corrcoef(*both)[0, 1]), 3))


def part(archive: Archive, low: float, high: float, **options: int) -> IdSet:
    config = ReplayConfig(subset=(low, high), **options)
    return replay_source(archive, archive.contents.prompts, config).ids


@pytest.fixture
def archive(root: Path) -> Iterator[Archive]:
    with opened(root) as archive:
        yield archive


def test_parts_by_key_have_nothing_in_common_and_make_up_the_whole(archive: Archive) -> None:
    train, validate = part(archive, 0, 0.75), part(archive, 0.75, 1)
    assert not train & validate
    assert IdSet.union([train, validate]) == lines(range(COUNT), epoch=1)
    assert train
    assert validate


def test_part_is_the_same_in_every_epoch_and_in_every_archive_of_the_prompts(
    archive: Archive, tmp_path: Path
) -> None:
    """By the prompt's key, and not by where or when its sample was made."""
    chosen = part(archive, 0, 0.5)
    several = part(archive, 0, 0.5, first_epoch=4, epochs=2)
    assert several == IdSet.union([chosen.in_epoch(4), chosen.in_epoch(5)])
    with opened(tmp_path / "other") as other:
        archive_samples(tmp_path / "spool", other, reversed(range(COUNT)))
        assert part(other, 0, 0.5) == chosen


def test_key_of_a_part_is_the_one_that_the_user_gave(archive: Archive) -> None:
    for record in archive.records():
        assert record.header.key == sample(record.header.id.ordinal).key
