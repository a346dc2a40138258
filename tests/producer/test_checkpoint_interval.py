"""A quota that cannot hold the checkpoint intervals is told of at once, and not at a stall."""

from pathlib import Path

from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_proto.ids import Shards
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
