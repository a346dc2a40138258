"""An archive to replay, made as a producer makes it."""

from pathlib import Path

from chaos.plan import Plan
from draftfeed_producer.archive import Archive, ArchiveConfig, ArchivedSpool
from draftfeed_producer.engines.synthetic import synthetic_prompts, synthetic_sample
from draftfeed_producer.spool import SpoolConfig

SEGMENT_BYTES = 500_000


def make_archive(plan: Plan, root: Path, directory: Path) -> None:
    """All samples of the plan, once. directory: for the spool that they go through."""
    engine = plan.engine()
    archive = Archive(
        ArchiveConfig(roots=(root,), min_free_bytes=0), engine.descriptor(), engine.shards
    )
    config = SpoolConfig(
        dir=directory / "generated",
        retain="archive",
        quota_bytes=1 << 30,
        audit=True,
        segment_bytes=SEGMENT_BYTES,
        codec=plan.codec,
        chunk_bytes=plan.chunk_bytes,
        fsync="never",
    )
    spool = ArchivedSpool(config, engine.descriptor(), engine.shards, archive)
    try:
        for prompt in synthetic_prompts(engine):
            spool.append(synthetic_sample(prompt.id, engine))
        spool.archive_rest()
    finally:
        spool.close()
        archive.close()
