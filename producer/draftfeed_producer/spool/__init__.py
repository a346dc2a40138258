"""The spool: the producer's durable log of encoded samples, and the record of what became of them.

DIR/LOCK            held while a producer owns the spool
DIR/spool.json      stream and prompt file that it belongs to
DIR/00000001.seg    samples, appended; deleted whole when every one of them is committed
DIR/control.log     commits, tombstones, terms, suspects, voids, shards
"""

from draftfeed_producer.spool.config import SpoolConfig
from draftfeed_producer.spool.store import Spool, SpoolStatistics

__all__ = ["Spool", "SpoolConfig", "SpoolStatistics"]
