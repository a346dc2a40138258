"""Seals segments that the spool has done with, away from the threads that make and serve."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from draftfeed_producer.archive.index import Archive
from draftfeed_producer.archive.sealed import Interrupted, seal
from draftfeed_producer.errors import SpoolError
from draftfeed_producer.spool.segments import Record, Segment

logger = logging.getLogger(__name__)


class _Job(NamedTuple):
    segment: Segment
    link: bool
    done: Callable[[], None]


class Archiver:
    """One thread. It never fails the stream: a segment that cannot be archived is gone, as without
    an archive, and the samples in it are counted and named."""

    def __init__(self, archive: Archive, counts: Callable[[Record], bool]) -> None:
        """counts: whether a sample is to be served again."""
        self._archive, self._counts = archive, counts
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.alarm = ""
        self.missed = 0
        self._thread = threading.Thread(target=self._run, name="archiver", daemon=True)
        self._thread.start()

    def take(self, segment: Segment, *, link: bool, done: Callable[[], None]) -> None:
        """done: called when the segment may be deleted, by our thread; not when the process ends
        before that: the next start takes it again."""
        self._jobs.put(_Job(segment, link, done))

    def finish(self) -> None:
        """Returns when everything taken so far is sealed, or after `close`."""
        self._jobs.put(None)
        self._thread.join()

    def interrupt(self) -> None:
        """`finish` returns soon: what is not sealed by now stays in the spool."""
        self._stopped.set()

    def close(self) -> None:
        self.interrupt()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._stopped.is_set():
            try:
                self._seal(job)
                job.done()
            except Interrupted:
                return
            except OSError as error:  # the spool's own, which its next start finds again
                logger.error("%s cannot be deleted: %s", job.segment.path, error.strerror)

    def _seal(self, job: _Job) -> None:
        path = job.segment.path
        statistics = self._archive.statistics()
        root, full = self._archive.roots.choose(job.segment.end, statistics.bytes)
        if root is None:
            self._miss(job.segment, full)
            return
        stream_id = self._archive.descriptor.stream_id()
        try:
            head = seal(path, root, stream_id, self._counts, self._stopped.is_set, link=job.link)
            self._archive.add(root, head)
        except (OSError, SpoolError) as error:
            self._miss(job.segment, f"{root}: {getattr(error, 'strerror', None) or error}")
            return
        if self.alarm:
            logger.warning("archiving goes on, in %s", root)
        self.alarm = ""

    def _miss(self, segment: Segment, reason: str) -> None:
        """Said once, when it begins, with the sample from which on epochs are generated again."""
        self.missed += len(segment.ids)
        if not self.alarm:
            first = min(segment.ids, default=None)
            logger.error(
                "nothing more is archived (%s): from sample %s on later epochs generate again what "
                "is missing",
                reason,
                first,
            )
        self.alarm = f"the archive takes no more: {reason}"
