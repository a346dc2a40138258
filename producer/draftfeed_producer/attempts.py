"""How often somebody may ask for the stream."""

from collections import OrderedDict

EACH_PER_SECOND, EACH_BURST = 1.0, 16.0
"""Of one connection. A member asks once, and a few times more while it looks for a term."""
ALL_PER_SECOND, ALL_BURST = 50.0, 4096.0
"""Of everybody: all ranks of the largest group may come at once."""
MAX_SENDERS = 4096
"""Connections that are remembered: the last ones."""


class Bucket:
    """So many at once, and then so many a second. Times are monotonic seconds."""

    def __init__(self, per_second: float, burst: float, now: float) -> None:
        self._per_second, self._burst = per_second, burst
        self._left, self._at = burst, now

    def take(self, now: float) -> bool:
        left = self._left + (now - self._at) * self._per_second
        self._left, self._at = min(self._burst, left), now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Attempts:
    """Attempts to attach. One that is too many costs a decoded message and an answer; others may
    cost a write to the disk."""

    def __init__(self, now: float) -> None:
        self._all = Bucket(ALL_PER_SECOND, ALL_BURST, now)
        self._each: OrderedDict[bytes, Bucket] = OrderedDict()

    def allow(self, sender: bytes, now: float) -> bool:
        """Whether this one is to be looked at."""
        own = self._each.pop(sender, None) or Bucket(EACH_PER_SECOND, EACH_BURST, now)
        self._each[sender] = own
        if len(self._each) > MAX_SENDERS:
            self._each.popitem(last=False)
        return own.take(now) and self._all.take(now)
