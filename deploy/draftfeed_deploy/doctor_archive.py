"""Of [archive]: its roots, and whether what is in them can be served."""

from collections.abc import Iterator
from pathlib import Path

from draftfeed_deploy.doctor_disk import bytes_in, disk, existing
from draftfeed_deploy.doctor_finding import Finding, fail, ok
from draftfeed_producer.archive import ArchiveConfig
from draftfeed_producer.archive.roots import NAME, same_contents
from draftfeed_producer.errors import ArchiveError
from draftfeed_producer.spool import SpoolConfig
from draftfeed_producer.spool.files import same_drive


def written_to(config: ArchiveConfig, spool: SpoolConfig) -> Iterator[Finding]:
    """By a producer that archives; the roots that are missing it makes. On the spool's drive there
    must be room beyond what the spool may grow to."""
    directory = spool.dir.expanduser()
    have = bytes_in(directory)
    for root in config.roots:
        needed, floor = 0, config.min_free_bytes
        if same_drive(existing(root), existing(directory)):
            needed, floor = spool.quota_bytes, max(floor, spool.min_free_bytes)
        yield disk(f"archive {root}", root, needed, floor, have_bytes=have)
    there = tuple(root for root in config.roots if (root / NAME).exists())
    if there:
        yield served(there)


def served(roots: tuple[Path, ...]) -> Finding:
    """By a replay, which writes nothing to them."""
    try:
        contents = same_contents(roots)
    except ArchiveError as error:
        return fail("archive", str(error), "mount what is missing; [archive] roots")
    found = f"{contents.descriptor.model}, data set {contents.prompts.dataset}"
    return ok("archive", f"{len(roots)} roots of {found}; draftfeed archive verify reads it all")
