"""How far a long fetch is, in the log."""

import logging
import time

logger = logging.getLogger(__name__)

REPORT_SECONDS = 5.0


class Progress:
    """Of `total` bytes, of which `there` need not travel."""

    def __init__(self, total: int, there: int) -> None:
        self._total, self._there = total, there
        self._began = self._reported_at = time.monotonic()
        self.travelled = 0
        """Bytes, those included that had to come once more."""
        self._lost = 0
        kept = f", {_mb(there)} of them are here" if there else ""
        logger.info("fetching the target's files: %s%s", _mb(total), kept)

    def add(self, size: int) -> None:
        self.travelled += size
        now = time.monotonic()
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            logger.info("%s", self.line(now))

    def lost(self, size: int) -> None:
        """What had come was damaged."""
        self._lost += size

    def line(self, now: float) -> str:
        done = self._there + self.travelled - self._lost
        rate = self.travelled / max(now - self._began, 1e-9)
        left_seconds = (self._total - done) / max(rate, 1.0)
        return (
            f"fetching the target's files: {_mb(done)} of {_mb(self._total)}, "
            f"{rate / 1e6:.1f} MB/s, {left_seconds:.0f} s left"
        )

    def done(self, where: str) -> None:
        seconds = time.monotonic() - self._began
        logger.info(
            "the target's files are in %s: %s in %.1f s", where, _mb(self.travelled), seconds
        )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
