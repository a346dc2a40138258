"""One producer as a member knows it."""

from typing import Any, Literal, TypeVar

from draftfeed_consumer.ledger import Ledger
from draftfeed_consumer.reception import Reception, Room
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId
from draftfeed_proto.workers import Workers

State = Literal["down", "linked", "fenced", "granted", "open", "done", "out"]
"""down: no link. linked: a link, and nothing said. fenced: asked for the term. granted. open:
samples may come. done: it needs nothing more. out: refused while others were being trained from."""

_M = TypeVar("_M", bound=m.InSession)


class Peer:
    """State and last session; what is known of it outlives its links."""

    def __init__(self, address: str, required: bool) -> None:
        self.address = address
        self.required = required
        """Training does not begin without it."""
        self.state: State = "down"
        self.reception: Reception | None = None
        self.granted: m.Granted | None = None
        """Its last grant."""
        self.opened = False
        """It has accepted our checkpoint once."""
        self.granted_bytes = 0
        """Decoded, asked for since the process began; one that comes late starts level."""
        self.logical_bytes = 0
        """Decoded, of samples that it gave since the process began."""
        self.acknowledged = 0
        self.commit_said = 0
        """Numbers of commits: acknowledged by it, and said in this session."""
        self.at_work_said: list[SampleId] = []

    @property
    def term(self) -> int:
        """In which it granted us last; 0 = never."""
        return self.granted.term if self.granted else 0

    @property
    def given(self) -> bool:
        return self.granted is not None

    @property
    def wanted(self) -> bool:
        """Whether there should be a link."""
        return self.state not in ("done", "out")

    @property
    def attached(self) -> bool:
        return self.state in ("granted", "open")

    @property
    def session(self) -> Reception:
        assert self.reception is not None
        return self.reception

    @property
    def ended(self) -> bool:
        open_and_ended = self.state == "open" and self.session.ended
        return self.state == "done" or open_and_ended

    def granted_in(self, term: int) -> bool:
        return self.term == term or self.state == "done"

    def owns(self, message: m.InSession) -> bool:
        """Whether it is of this session."""
        here = self.reception
        return here is not None and (message.term, message.session) == (here.term, here.session)

    def owner_of(self, id: SampleId) -> bool:
        return self.granted is not None and id.partition in self.granted.shards

    def grant(self, granted: m.Granted, room: Room, ledger: Ledger, workers: Workers) -> None:
        self.granted = granted
        self.reception = Reception(granted, room, ledger, workers)
        self.state = "granted"

    def say(self, kind: type[_M], **fields: Any) -> _M:
        """A message of this session."""
        here = self.session
        return kind(term=here.term, session=here.session, **fields)

    def lose(self) -> None:
        """The link is gone."""
        if self.reception is not None:
            self.reception.close()
        self.reception = None
        self.commit_said = 0
        self.at_work_said = []
        if self.wanted:
            self.state = "down"
