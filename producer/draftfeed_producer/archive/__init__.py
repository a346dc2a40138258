"""The archive: segments of a spool, sealed, so that later epochs need no target.

ROOT/archive.json   stream and prompt file that it belongs to
ROOT/DIGEST.seg     a segment of a spool, byte for byte; named by what is in it, and never changed
ROOT/DIGEST.idx     its samples and where each lies; a segment without one is not sealed
"""

from draftfeed_producer.archive.config import ArchiveConfig
from draftfeed_producer.archive.index import Archive, ArchiveStatistics
from draftfeed_producer.archive.store import ArchivedSpool

__all__ = ["Archive", "ArchiveConfig", "ArchiveStatistics", "ArchivedSpool"]
