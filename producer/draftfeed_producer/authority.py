"""What the group's checkpoints contain: the last commit, and what may follow it. No I/O."""

from collections.abc import Callable, Mapping

from draftfeed_producer.session import StoreCommit
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import SampleHeader

_NAMED = 5
"""Ids spelled out in a sentence."""

HeaderOf = Callable[[SampleId], SampleHeader | None]
"""The header of a sample whose record still exists, a committed one's too."""


class Authority:
    """The restored checkpoint says what is trained, the producer what still exists; the two are
    never united. `committed` holds ids of this producer's shards only."""

    def __init__(
        self,
        committed: IdSet,
        key: tuple[int, int],
        header_of: HeaderOf,
        tombstones: Mapping[SampleId, str],
    ) -> None:
        self.committed = committed.copy()
        self.key = key
        """(term, number) of the checkpoint: tells a commit from one that came twice."""
        self._header_of, self._tombstones = header_of, tombstones

    def refusal(
        self, opening: m.Open, trained: IdSet, lines: tuple[IdSet, ...]
    ) -> m.Refused | None:
        """Whether the checkpoint that a leader loaded went back behind the last commit, or has
        samples that are none of the prompt file's lines. A few bytes can name a trillion of them,
        and as committed ones they would be counted, stored and looked for."""
        strange = trained - self.committed
        for some in lines:
            strange = strange - some
        if strange:
            return _strange_refusal(strange)
        forgotten = self.committed - trained
        if not opening.rollback:
            return self._rollback_refusal(forgotten, opening.ledger_term)
        if opening.rollback == "regenerate":
            return None
        _, gone = self.lost(forgotten)
        return _freed_refusal(gone) if gone else None

    def lost(self, forgotten: IdSet) -> tuple[list[SampleHeader], list[SampleId]]:
        """(those whose records still exist, those that are gone)

        One that was trained in this line of checkpoints may have ended otherwise in another: it
        comes no more, and is not missed."""
        found = {id: self._header_of(id) for id in forgotten if id not in self._tombstones}
        there = [header for header in found.values() if header is not None]
        return there, [id for id, header in found.items() if header is None]

    def follow(self, opening: m.Open, trained: IdSet) -> StoreCommit | None:
        """Make the leader's checkpoint the last commit; None when it is already."""
        key = (opening.ledger_term, opening.ledger_number)
        if self.committed - trained or (opening.rollback and key < self.key):
            return self.advance(key, trained, rollback=True)
        if trained == self.committed:
            return None
        return self.advance(max(key, (self.key[0], self.key[1] + 1)), trained)

    def advance(
        self, key: tuple[int, int], trained: IdSet, *, rollback: bool = False
    ) -> StoreCommit:
        self.committed, self.key = trained.copy(), key
        return StoreCommit(key[1], trained, key[0], rollback)

    def said_again(self, key: tuple[int, int], trained: IdSet) -> bool:
        return key <= self.key and not trained - self.committed

    def exists(self, id: SampleId) -> bool:
        """Whether there is a record of it, or of another epoch's sample that it would be."""
        return self._header_of(id) is not None

    def fault(
        self,
        key: tuple[int, int],
        trained: IdSet,
        received: set[SampleId],
        also: Callable[[SampleId], bool] | None = None,
    ) -> str:
        """A commit adds samples that this group was given, and takes none away. also: what else it
        may have been given, where that is not known."""
        if key <= self.key:
            return f"commit {key[1]} of term {key[0]} after {self.key[1]} of term {self.key[0]}"
        if lost := self.committed - trained:
            return f"commit without {len(lost)} samples that the last one had"
        fresh = trained - self.committed
        # The count first: a few bytes can claim ranges of a billion samples.
        if also is None and len(fresh) > len(received):
            return "commit of more samples than this group holds"
        if any(id not in received and not (also and also(id)) for id in fresh):
            return "commit of samples that this group does not hold"
        return ""

    def _rollback_refusal(self, forgotten: IdSet, ledger_term: int) -> m.Refused | None:
        term, number = self.key
        last = f"this producer has commit {number} of term {term}"
        if forgotten:
            first = next(iter(forgotten))
            reason = (
                f"{last}, of a checkpoint that contains {len(forgotten)} samples more than the one "
                f"loaded (first: {first}); resume from that checkpoint, or say --rollback"
            )
        elif ledger_term < term:
            reason = (
                f"{last}, and the checkpoint loaded is of an older term: another process has "
                "trained since; resume from its checkpoint, or say --rollback"
            )
        else:
            return None
        return m.Refused(code="rollback", reason=reason, term=term)


def _strange_refusal(ids: IdSet) -> m.Refused:
    words = f"{len(ids)} of the samples that it contains ({next(iter(ids))} is the first)"
    reason = f"the checkpoint is of another prompt file: {words} are no lines of this one"
    return m.Refused(code="mismatch", reason=reason)


def _freed_refusal(ids: list[SampleId]) -> m.Refused:
    named = ", ".join(map(str, ids[:_NAMED])) + (", ..." if len(ids) > _NAMED else "")
    reason = (
        f"{len(ids)} of the samples trained after that checkpoint are no longer in the spool "
        f"({named}); --rollback regenerate has them generated again"
    )
    return m.Refused(code="rollback", reason=reason)
