"""What the producer answers when it says no, or is asked where its samples are."""

import logging
from typing import TYPE_CHECKING

from draftfeed_producer.session import Action, Send
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet

if TYPE_CHECKING:
    from draftfeed_producer.delivery import Delivery

logger = logging.getLogger(__name__)


def stale(sender: bytes, message: m.Message, term: int) -> list[Action]:
    """Whoever still speaks in a session that is over must hear that it is."""
    logger.debug("%s of a session that is over", type(message).__name__)
    if isinstance(message, m.Bye) or not isinstance(message, m.InSession):
        return []
    if message.term < term:
        reason = f"term {term} was granted since; this is of term {message.term}"
        return [Send(sender, m.Refused(code="fenced", reason=reason, term=term))]
    words = "this session is over; attach again"
    return [Send(sender, m.Refused(code="session", reason=words, term=term))]


def account(delivery: "Delivery") -> m.Account:
    """Where every sample is, now."""
    stock, leased = delivery.stock, IdSet(delivery.fencing.leased)
    deliverable = IdSet(stock) - leased
    terminal: dict[str, IdSet] = {}
    for id, state in delivery.tombstones.items():
        terminal.setdefault(state, IdSet()).add(id)
    pending = delivery.prompts - delivery.committed - leased - deliverable
    for ids in terminal.values():
        pending = pending - ids
    shelved = pending & delivery.replayable() if pending else pending
    term = delivery.fencing.term
    return m.Account(
        shards=delivery.shards,
        committed=delivery.committed.to_wire(),
        leased=leased.to_wire(),
        deliverable=IdSet.union([deliverable, shelved]).to_wire(),
        terminal={state: (ids - delivery.committed).to_wire() for state, ids in terminal.items()},
        pending=(pending - shelved).to_wire(),
        regenerated=delivery.regenerated.to_wire(),
        skipped=delivery.skipped.to_wire(),
        group=term.group if term else "",
        term=delivery.fencing.number,
        commit_number=delivery.authority.key[1],
        members=sorted(member.name for member in delivery.fencing.attached.values()),
    )
