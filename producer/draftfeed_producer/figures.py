"""Figures of delivery that are no part of its state: ages, counts, bytes by member.

The server's thread writes them; others read them whole, as one `DeliveryFigures`.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from draftfeed_producer.distribution import Wait
from draftfeed_producer.session import Member
from draftfeed_producer.stock import Stock
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import SampleHeader

MAX_MEMBERS = 256
"""Whose bytes are counted apart: names are chosen by peers."""


class DeliveryFigures(NamedTuple):
    spooled: int = 0
    """Samples that are here and that nobody has."""
    oldest_seconds: float = 0.0
    """Age of the oldest sample that is not terminal; those of an earlier process count from the
    start of this one. 0: there is none."""
    commit_age_seconds: float = 0.0
    """Since the last commit, or since the start."""
    commits: int = 0
    swaps: int = 0
    """Consumers that took the stream from one that was attached, with --takeover."""
    sent_bytes: tuple[tuple[str, int], ...] = ()
    """By member, frames handed to ZeroMQ, or told of where it reads them itself."""
    sent_logical_bytes: tuple[tuple[str, int], ...] = ()
    """By member, the hidden states in those, decoded."""
    credit_bytes: tuple[tuple[str, int], ...] = ()
    """By member that has a session: encoded, what it may be sent and was not. Where it reads files
    a message counts for its largest chunk."""
    wait_seconds: tuple[tuple[str, float], ...] = (("no_credit", 0.0), ("link_full", 0.0))
    """By what samples waited for."""


class Figures:
    def __init__(self, samples: Iterable[SampleId], now: float) -> None:
        """samples: that are not terminal. Times are monotonic seconds."""
        self._since = dict.fromkeys(samples, now)
        """When a sample was stored, oldest first. Those that are terminal by now leave it when
        they come to the front."""
        self._committed_at = now
        self._commits = self._swaps = 0
        self._sent: Counter[str] = Counter()
        self._sent_logical: Counter[str] = Counter()
        self._waits_for: Wait | None = None
        self._waits_since = now
        self._waited: dict[Wait, float] = {"no_credit": 0.0, "link_full": 0.0}

    def stored(self, id: SampleId, now: float) -> None:
        self._since.pop(id, None)
        self._since[id] = now

    def committed(self, now: float) -> None:
        self._commits += 1
        self._committed_at = now

    def granted(self, *, takeover: bool) -> None:
        self._swaps += takeover

    def sent(self, member: str, count: int) -> None:
        """Bytes of its frames."""
        if member not in self._sent and len(self._sent) >= MAX_MEMBERS:
            oldest = next(iter(self._sent))
            del self._sent[oldest], self._sent_logical[oldest]
        self._sent[member] += count

    def sent_chunks(self, member: str, header: SampleHeader, first: int, behind: int) -> None:
        """Each chunk counts for the same share of its sample; all of them for all of it."""
        size, chunks = 2 * header.rows * header.layers * header.hidden, header.chunks
        self._sent_logical[member] += size * behind // chunks - size * first // chunks

    def waits(self, cause: Wait | None) -> None:
        """What samples wait for from now on."""
        now = time.monotonic()
        if self._waits_for is not None:
            self._waited[self._waits_for] += now - self._waits_since
        self._waits_for, self._waits_since = cause, now

    def now(
        self,
        stock: Stock,
        members: Iterable[Member],
        now: float,
    ) -> DeliveryFigures:
        """members: those that have a session."""
        while self._since and (first := next(iter(self._since))) not in stock:
            del self._since[first]
        oldest = next(iter(self._since.values()), now)
        sessions = [(one.name, one.session) for one in members]
        return DeliveryFigures(
            spooled=stock.spooled,
            oldest_seconds=now - oldest,
            commit_age_seconds=now - self._committed_at,
            commits=self._commits,
            swaps=self._swaps,
            sent_bytes=tuple(self._sent.items()),
            sent_logical_bytes=tuple(self._sent_logical.items()),
            credit_bytes=tuple(
                (name, max(0, one.credit_bytes - one.sent_bytes)) for name, one in sessions if one
            ),
            wait_seconds=tuple(self._waited.items()),
        )
