"""Seals segments that the spool has done with, away from the threads that make and serve."""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from draftfeed_producer.archive.index import Archive
from draftfeed_producer.archive.sealed import Interrupted, digest_of, seal, verified
from draftfeed_producer.errors import SpoolError
from draftfeed_producer.spool.segments import Record, Segment

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""A segment may wait for a root while its space is needed."""
STUCK_SECONDS = 120.0
"""For one segment: a root that takes longer hangs, and nobody waits for it any more."""
RETRY_SECONDS = 1.0
NO_FILES = "this process can open no more files"
CLOSE_SECONDS = 10.0
"""A root that does not answer is not waited for longer when the process is to end."""


class _Job(NamedTuple):
    segment: Segment
    link: bool
    done: Callable[[], None]
    taken_at: float
    """Monotonic seconds."""


class Archiver:
    """One thread. It never fails the stream: a segment that cannot be archived is gone, as without
    an archive, and the samples in it are counted and named."""

    def __init__(
        self, archive: Archive, counts: Callable[[Record], bool], reserved: Callable[[], int]
    ) -> None:
        """counts: whether a sample is to be served again. reserved: bytes that must stay free on
        the spool's drive."""
        self._archive, self._counts, self._reserved = archive, counts, reserved
        self._jobs: deque[_Job] = deque()
        """Not begun."""
        self._changed = threading.Condition()
        """Notified when there is a job, or will be none."""
        self._finishing = False
        self._stopped = threading.Event()
        self._alarm = ""
        self._began_at: float | None = None
        """Of the job that is being done, or was left undone, in monotonic seconds."""
        self.missed = 0
        self._thread = threading.Thread(target=self._run, name="archiver", daemon=True)
        self._thread.start()

    def take(self, segment: Segment, *, link: bool, done: Callable[[], None]) -> None:
        """done: called when the segment may be deleted, by any thread; not when the process ends
        before that: the next start takes it again."""
        with self._changed:
            self._jobs.append(_Job(segment, link, done, time.monotonic()))
            self._changed.notify()

    @property
    def alarm(self) -> str:
        """Why nothing is archived; empty while something is."""
        if self.stuck:
            return f"the archive does not answer for {STUCK_SECONDS:.0f} seconds and more"
        return self._alarm

    @property
    def stuck(self) -> bool:
        began = self._began_at
        return began is not None and time.monotonic() - began > STUCK_SECONDS

    def give_way(self) -> bool:
        """Somebody needs the space now: the oldest is given up when it has waited for long and was
        not begun. False when there is none: a spool is full for as long as its trainer is slow,
        and an archive that keeps up loses nothing by that."""
        with self._changed:
            since = time.monotonic() - PATIENCE_SECONDS
            if not self._jobs or self._jobs[0].taken_at > since:
                return False
            job = self._jobs.popleft()
        roots = ", ".join(map(str, self._archive.config.roots))
        self._miss(job.segment, f"{roots}: slower than what is to be archived")
        self._done(job)
        return True

    def finish(self) -> int:
        """Returns when everything taken so far is sealed or given up, or when that is stuck, or
        soon after `interrupt`: how many segments are not."""
        with self._changed:
            self._finishing = True
            self._changed.notify()
        while self._thread.is_alive() and not (self._stopped.wait(0.05) or self.stuck):
            self._thread.join(0.5)
        self._thread.join(0.0 if self.stuck else CLOSE_SECONDS)
        return len(self._jobs) + (self._began_at is not None)

    def interrupt(self) -> None:
        """`finish` returns soon: what is not sealed by now stays in the spool."""
        self._stopped.set()

    def close(self) -> None:
        self.interrupt()
        self.finish()
        if self._thread.is_alive():
            logger.error("the archive does not answer; what was being sealed stays in the spool")

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._began_at = time.monotonic()
            try:
                self._seal(job)
            except Interrupted:
                return
            except Exception as error:  # a fault of ours: without us the spool would only grow
                logger.exception("%s is not archived", job.segment.path)
                self._miss(job.segment, f"an error of its own: {error!r}")
            self._began_at = None
            if self._stopped.is_set():
                return  # the spool may be another process' by now
            self._done(job)

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._finishing)
            return self._jobs.popleft() if self._jobs and not self._stopped.is_set() else None

    def _done(self, job: _Job) -> None:
        try:
            job.done()
        except OSError as error:  # the spool's own, which its next start finds again
            logger.error("%s cannot be deleted: %s", job.segment.path, error.strerror)

    def _seal(self, job: _Job) -> None:
        """Not once more what is there already. When this process can open no more files, which is
        no fault of a root, it is tried again for a while."""
        if self._is_there(job.segment):
            return
        until = time.monotonic() + PATIENCE_SECONDS
        while (reason := self._try(job)) == NO_FILES and time.monotonic() < until:
            logger.warning("%s is not archived yet: %s", job.segment.path, reason)
            if self._stopped.wait(RETRY_SECONDS):
                raise Interrupted
        if reason:
            self._miss(job.segment, reason)

    def _try(self, job: _Job) -> str:
        """Into the first of the roots that takes it; returns why none did."""
        path, used = job.segment.path, self._archive.statistics().bytes
        end, reserved = job.segment.end, self._reserved()
        roots, reason = self._archive.roots.choose(end, used, path.parent, reserved)
        if not roots:
            return reason
        stream_id, stopped = self._archive.descriptor.stream_id(), self._stopped.is_set
        try:
            records = verified(path, self._counts, stopped)
        except (OSError, SpoolError) as error:
            return self._unread(job.segment, error)
        for root in roots:
            try:
                head = seal(path, root, stream_id, records, stopped, link=job.link)
                self._archive.add(root, head)
            except (OSError, SpoolError) as error:
                reason = _reason(error, f"{root}: ")
                continue
            if self._alarm:
                logger.warning("archiving goes on, in %s", root)
            self._alarm = ""
            return ""
        return reason

    def _unread(self, segment: Segment, error: OSError | SpoolError) -> str:
        """The spool's drive does not give it: no root has to do with that, nor the next segment."""
        reason = _reason(error)
        if reason == NO_FILES:
            return reason
        lines = _lines(segment)
        self.missed += lines
        logger.error(
            "%s cannot be read (%s): %d samples are not archived, and generated again in later "
            "epochs",
            segment.path,
            reason,
            lines,
        )
        return ""

    def _is_there(self, segment: Segment) -> bool:
        """This very segment; of its lines there may be damaged samples, and these replace them."""
        if not all(id in self._archive for id in segment.ids):
            return False  # and it need not be read
        try:
            return self._archive.has(digest_of(segment.path))
        except OSError:
            return False

    def _miss(self, segment: Segment, reason: str) -> None:
        """Said once, when it begins, with the sample from which on epochs are generated again."""
        self.missed += _lines(segment)
        if not self._alarm:
            first = min(segment.ids, default=None)
            logger.error(
                "nothing more is archived (%s): from sample %s on later epochs generate again what "
                "is missing",
                reason,
                first,
            )
        self._alarm = f"the archive takes no more: {reason}"


def _lines(segment: Segment) -> int:
    """Of the prompt file; epochs share samples."""
    return len({id.in_epoch(0) for id in segment.ids})


def _reason(error: OSError | SpoolError, where: str = "") -> str:
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return NO_FILES
    return where + str(getattr(error, "strerror", None) or error)
