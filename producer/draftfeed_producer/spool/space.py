"""Whether a spool may grow."""

import errno
import resource
from pathlib import Path

from draftfeed_producer.spool.config import SpoolConfig
from draftfeed_producer.spool.files import free_bytes


class Space:
    """The limits of a spool's size: its quota, the disk's free space, a disk that is full, and the
    files that this process may have open: each segment is one."""

    def __init__(self, config: SpoolConfig) -> None:
        self._directory: Path = config.dir
        self._quota_bytes = config.quota_bytes
        self._floor_bytes = config.min_free_bytes
        self._segment_limit = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        """Sockets need the other half."""
        self._full = ""
        self._wanted_bytes = 0

    def refused(self, cause: OSError, wanted_bytes: int) -> None:
        """The disk did not take a record of that size."""
        files = cause.errno in (errno.EMFILE, errno.ENFILE)
        what = "a segment cannot be begun" if files else "the disk is full"
        self._full = f"{what}: {cause.strerror}"
        self._wanted_bytes = wanted_bytes

    def accepted(self) -> None:
        self._full, self._wanted_bytes = "", 0

    def left(self, spare_bytes: int) -> int:
        """Bytes that others leave us, down to the floor; below zero when it is passed, or when the
        disk does not say: it may have been taken out, or its server does not answer."""
        try:
            return self._left(spare_bytes)
        except OSError:
            return -1

    def _left(self, spare_bytes: int) -> int:
        return free_bytes(self._directory) + spare_bytes - self._floor_bytes

    def has_room(self, used_bytes: int, spare_bytes: int, segments: int) -> bool:
        left = self.left(spare_bytes)
        fits = used_bytes < self._quota_bytes and segments < self._segment_limit
        return fits and left >= 0 and left >= self._wanted_bytes

    def reserved(self, used_bytes: int, spare_bytes: int) -> int:
        """Bytes that others must leave free, so that it can grow to its quota."""
        return self._floor_bytes + max(0, self._quota_bytes - used_bytes - spare_bytes)

    def alarm(self, used_bytes: int, spare_bytes: int, segments: int) -> str:
        """Why it may not; empty when it may."""
        if self._full:
            return self._full
        if used_bytes >= self._quota_bytes:
            return f"the spool holds {used_bytes} bytes, quota_bytes is {self._quota_bytes}"
        if segments >= self._segment_limit:
            limit = 2 * self._segment_limit
            return f"{segments} segments are open, of {limit} files; raise segment_bytes"
        try:
            left = self._left(spare_bytes)
        except OSError as error:
            return f"{self._directory}: its free space is not known: {error.strerror}"
        if left < 0:
            free = left + self._floor_bytes
            return f"the disk has {free} bytes left, min_free_bytes is {self._floor_bytes}"
        return ""

    def capacity(self, used_bytes: int, spare_bytes: int) -> int:
        """To what the spool can grow, by whichever limit is met first."""
        return max(1, min(self._quota_bytes, used_bytes + max(0, self.left(spare_bytes))))
