"""What a spool says of its samples when a producer starts on it."""

from collections.abc import Callable
from typing import NamedTuple

from draftfeed_producer.authority import HeaderOf
from draftfeed_producer.spool import Spool
from draftfeed_producer.spool.control import Term
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import SampleHeader


class Stored(NamedTuple):
    """Where delivery goes on, after a start or a restart."""

    committed: IdSet
    commit_term: int
    commit_number: int
    term: Term | None
    suspects: dict[SampleId, int]
    tombstones: dict[SampleId, str]
    """State of each."""
    regenerated: IdSet
    samples: list[SampleHeader]
    """Neither committed nor terminal, oldest first."""
    header_of: HeaderOf
    replayable: Callable[[], IdSet] = IdSet
    """See `Spool.replayable`."""

    @classmethod
    def of(cls, spool: Spool) -> "Stored":
        return cls(
            committed=spool.committed,
            commit_term=spool.commit_term,
            commit_number=spool.commit_number,
            term=spool.term,
            suspects=spool.suspects,
            tombstones={id: one.state for id, one in spool.tombstones.items()},
            regenerated=spool.regenerated,
            samples=[record.header for record in spool.deliverable()],
            header_of=spool.header_of,
            replayable=spool.replayable,
        )
