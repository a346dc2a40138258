"""Files of segments that nobody needs any more, for new segments to be written over.

The kernel has their pages: to find and clear new ones for what is written takes it several times
as long as to write.
"""

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from draftfeed_producer.spool import entries
from draftfeed_producer.spool.files import sync_directory

SUFFIX = ".spare"


class Spares:
    """Of one spool. They have no meaning to anybody else, and go when it is closed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._files: deque[tuple[Path, int]] = deque()
        """With their sizes; oldest first."""

    @property
    def bytes(self) -> int:
        return sum(size for _, size in list(self._files))

    def keep(self, path: Path, fd: int, *, sync: bool) -> bool:
        """Make a spare of a segment's file; False where there is more to it than entries, and it
        is left as it was. sync: its samples must be gone for good before others lie there, even
        if the power fails. Raises OSError; the file is deleted then, or by the next start."""
        size = os.fstat(fd).st_size
        places = [(entry.payload_offset, entry.end) for entry in entries.scan(fd, 0, size)]
        if not places or places[-1][1] != size:
            return False
        spare = path.with_suffix(SUFFIX)
        path.rename(spare)
        sync_directory(self._directory)
        try:
            for payload_offset, _ in places:
                start = payload_offset - entries.HEADER_BYTES
                entries.write_all(fd, bytes(entries.HEADER_BYTES), start)
            if sync:
                os.fdatasync(fd)
        except BaseException:
            spare.unlink()
            raise
        with self._lock:
            self._files.append((spare, size))
        return True

    def take(self) -> Path | None:
        with self._lock:
            return self._files.popleft()[0] if self._files else None

    def clear(self) -> None:
        """Those of a process that was killed, too."""
        with self._lock:
            self._files.clear()
        for path in self._directory.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # the next start tries again
                path.unlink()
