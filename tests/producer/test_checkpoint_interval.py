"""A quota that cannot hold the checkpoint intervals is told of at once, and not at a stall."""

from pathlib import Path

from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_proto.ids import IdSet, Shards
from samples import DATASET, DESCRIPTOR, sample


def test_interval_that_the_quota_cannot_hold_is_named_with_both_numbers(tmp_path: Path) -> None:
    config = SpoolConfig(dir=tmp_path / "spool", quota_bytes=200_000, min_free_bytes=0)
    spool = Spool(config, DESCRIPTOR, Shards(DATASET, 0, (0, 4)))
    assert spool.shortage(1000) == ""  # nothing to judge by
    for ordinal in range(4):
        spool.append(sample(ordinal))
    mean_bytes = spool.statistics().bytes // 4
    fits = 200_000 // (3 * mean_bytes)
    assert spool.shortage(fits - 1) == ""
    assert "quota_bytes is 200000" in spool.shortage(fits + 1)
    spool.close()


def test_what_only_an_older_checkpoint_keeps_is_counted_until_that_is_too_old(
    tmp_path: Path,
) -> None:
    config = SpoolConfig(dir=tmp_path / "spool", segment_bytes=1, min_free_bytes=0)
    spool = Spool(config, DESCRIPTOR, Shards(DATASET, 0, (0, 4)))
    sizes = [spool.append(sample(ordinal)).header.encoded_bytes for ordinal in range(3)]
    assert spool.kept_bytes == 0
    for number, count, kept_bytes in ((1, 2, sum(sizes[:2])), (2, 3, sizes[2]), (3, 3, 0)):
        spool.commit(number, IdSet(sample(k).id for k in range(count)), term=1)
        assert spool.kept_bytes == kept_bytes
    spool.close()
