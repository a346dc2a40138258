"""Which part of the prompt file a spool answers for."""

from pathlib import Path

import pytest

from draftfeed_producer.errors import ShardError, SpoolMismatch
from draftfeed_producer.spool import SpoolConfig
from draftfeed_producer.spool.ranges import difference, format_ranges, parse_ranges, union
from draftfeed_producer.spool.shards import give, take
from draftfeed_proto.ids import IdSet, SampleId, Shards
from samples import DATASET, sample
from spool_helpers import open_spool

FILE = Shards(DATASET, 0, (0, 10))


@pytest.mark.parametrize(
    ("text", "ranges", "again"),
    [
        ("0-3,8", (0, 4, 8, 9), "0-3,8"),
        ("8, 0-3", (0, 4, 8, 9), "0-3,8"),
        ("0,1,2", (0, 3), "0-2"),
        ("5-5", (5, 6), "5"),
        ("2-3,4-9", (2, 10), "2-9"),
    ],
)
def test_ranges_are_read_as_people_write_them(
    text: str, ranges: tuple[int, ...], again: str
) -> None:
    assert parse_ranges(text) == ranges
    assert format_ranges(ranges) == again


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a number"),
        ("0-", "'0-' is not a number or a range such as 0-3"),
        ("a", "'a'"),
        ("3-1", "ends before it begins"),
        ("0-4,4", "4 is in it twice"),
        ("-1", "'-1'"),
        ("٣", "is not a number"),
    ],
)
def test_ranges_that_cannot_be_read_say_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ShardError, match=words):
        parse_ranges(text)


def test_range_arithmetic_is_that_of_sets() -> None:
    def members(ranges: tuple[int, ...]) -> set[int]:
        spans = zip(ranges[::2], ranges[1::2], strict=True)
        return {k for start, stop in spans for k in range(start, stop)}

    some = [(), (0, 4), (2, 3, 5, 9), (4, 6), (0, 1, 2, 3, 4, 5), (0, 20)]
    for left in some:
        for right in some:
            for made, wanted in (
                (union(left, right), members(left) | members(right)),
                (difference(left, right), members(left) - members(right)),
            ):
                assert members(made) == wanted
                assert len(set(made)) == len(made)  # no two ranges touch


def test_spool_owns_all_shards_unless_some_are_chosen(tmp_path: Path) -> None:
    for name, chosen, ranges in (("all", "", (0, 10)), ("some", "0-3,8", (0, 4, 8, 9))):
        for _ in range(2):
            spool = open_spool(tmp_path / name, FILE, shards=chosen)
            assert spool.shards == Shards(DATASET, 0, ranges)
            assert spool.lost.ranges == ()
            spool.close()


def test_shards_that_the_prompt_file_does_not_have_are_refused_and_nothing_is_made(
    tmp_path: Path,
) -> None:
    with pytest.raises(ShardError, match="the prompt file has shards 0-9, not 10-12"):
        open_spool(tmp_path, FILE, shards="8-12")
    assert not (tmp_path / "spool.json").exists()
    with pytest.raises(ValueError, match="'x' is not a number"):
        SpoolConfig(dir=tmp_path, shards="x")


@pytest.mark.parametrize(
    ("shards", "file", "words"),
    [
        ("0-4", FILE, "shards '0-3,8'.*'0-4'"),
        ("", FILE, "shards '0-3,8'.*''"),
        ("0-3,8", Shards(DATASET, 1, (0, 10)), "epoch 0.* 1"),
        ("0-3,8", Shards(DATASET, 0, (0, 20)), "shard_size.*'0-9'.*'0-19'"),
    ],
)
def test_other_choice_than_the_spool_was_made_with_is_refused_with_both(
    tmp_path: Path, shards: str, file: Shards, words: str
) -> None:
    open_spool(tmp_path, FILE, shards="8,0-3").close()
    with pytest.raises(SpoolMismatch, match=words):
        open_spool(tmp_path, file, shards=shards)
    open_spool(tmp_path, FILE, shards="0-1,2-3,8").close()  # the same in other words


def test_shards_of_a_lost_spool_count_as_regenerated_but_for_what_the_trainer_has(
    tmp_path: Path,
) -> None:
    """A replica and its spool are gone for good: its samples are made again, and named."""
    open_spool(tmp_path, FILE, shards="0-3").close()
    take(tmp_path, (5, 6), lost=True)
    prompts = IdSet(sample(k).id for k in range(160))
    trained = IdSet(sample(k).id for k in range(80, 90))
    for _ in range(2):  # until the trainer has spoken
        spool = open_spool(tmp_path, FILE, shards="0-3")
        assert spool.lost == Shards(DATASET, 0, (5, 6))
        assert spool.regenerated == IdSet()
        spool.close()
    spool = open_spool(tmp_path, FILE, shards="0-3")
    spool.commit(1, trained, term=1)
    again = spool.settle_lost(prompts)
    assert again == IdSet(sample(k).id for k in range(90, 96))
    assert spool.settle_lost(prompts) == IdSet()
    for k in (1, 90):
        spool.append(sample(k))
    spool.close()
    spool = open_spool(tmp_path, FILE, shards="0-3")
    assert spool.lost.ranges == ()
    assert spool.regenerated == again
    assert spool.shards.ranges == (0, 4, 5, 6)
    spool.close()


def test_shard_that_is_given_away_takes_its_loss_along(tmp_path: Path) -> None:
    open_spool(tmp_path, FILE, shards="0-3").close()
    take(tmp_path, (5, 7), lost=True)
    assert give(tmp_path, (5, 6)).ranges == (0, 4, 6, 7)
    spool = open_spool(tmp_path, FILE, shards="0-3")
    assert spool.lost.ranges == (6, 7)
    spool.close()


def test_moving_shards_keeps_everything_else_in_the_log(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, FILE)
    spool.append(sample(0))
    for number in range(4):
        spool.commit(number, IdSet([sample(0).id]), term=2)
    spool.tombstone(SampleId(DATASET, 0, 1, 16), "rejected", "x")
    spool.close()
    give(tmp_path, (7, 10))
    spool = open_spool(tmp_path, FILE)
    assert (spool.commit_number, spool.commit_term) == (3, 2)
    assert spool.committed == IdSet([sample(0).id])
    assert list(spool.tombstones) == [SampleId(DATASET, 0, 1, 16)]
    assert spool.shards.ranges == (0, 7)
    spool.close()
