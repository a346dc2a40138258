"""What must hold in every state, and at the end."""

from typing import TYPE_CHECKING

from draftfeed_producer import answers
from draftfeed_proto.ids import IdSet
from model_group import SCRATCH, Group, Rank, check
from model_link import Violation
from model_producer import Producer

if TYPE_CHECKING:
    from model_world import World


def check_state(world: "World") -> None:
    """For every checkpoint that can still be restored: each id is in its weights at most once, its
    ledger says the same, and what it lacks can come again."""
    for checkpoint in world.disk:
        check(checkpoint)
    for group in world.groups:
        group.check_weights()
    for producer in world.producers:
        _check_places(producer)
        _check_restorable(world, producer)


def check_end(world: "World") -> None:
    """Nothing is left to do: then everything must be done."""
    if not world.over:
        raise Violation("nothing can happen any more, and not every prompt is terminal")
    if world.groups:
        raise Violation("every prompt is terminal, and a rank was never told")
    newest = world.disk[-1] if world.disk else SCRATCH
    ended = IdSet(newest.weights)
    for producer in world.producers:
        ended.update(producer.control.tombstones)
    prompts = IdSet(id for producer in world.producers for id in producer.prompts)
    if ended != prompts:
        raise Violation(f"lost: {', '.join(map(str, prompts - ended))}")


def check_refusal(group: Group, rank: Rank) -> None:
    """Nobody is sent away for good but who was replaced, or who would go back behind what was
    freed."""
    if rank.failure is None:
        return
    code, words = rank.failure
    freed = code == "rollback" and group.attach.rollback == "deliver"
    if code != "Fenced" and not freed:
        raise Violation(f"rank {rank.number} was sent away for good: {words}")


def _check_places(producer: Producer) -> None:
    """trained + still deliverable + leased + regenerable + terminal = the prompt list."""
    if producer.delivery is None or producer.blocked:
        return
    account = answers.account(producer.delivery)
    sets = [account.committed, account.leased, account.deliverable, account.pending]
    parts = [IdSet.from_wire(wire) for wire in [*sets, *account.terminal.values()]]
    found = IdSet()
    for part in parts:
        found.update(part)
    if sum(map(len, parts)) != len(producer.prompts) or found != IdSet(producer.prompts):
        words = f"producer {producer.number}: not every prompt is in one place"
        raise Violation(f"{words}: {account}")
    pending = [*IdSet.from_wire(account.pending)]
    if lost := [id for id in pending if id not in producer.engine]:
        raise Violation(f"nobody will generate {', '.join(map(str, lost))}")


def _check_restorable(world: "World", producer: Producer) -> None:
    """Whatever a kept checkpoint lacks can come again: it exists, or will be generated."""
    if world.rolling_back:
        return  # some producers have heard of it, others not
    committed = producer.control.committed
    for checkpoint in world.disk:
        lacking = committed - IdSet.from_wire(checkpoint.state.trained)
        kept = {*producer.records, *producer.control.tombstones}
        gone = [id for id in lacking if id not in kept]
        if gone and not producer.lossy:
            words = ", ".join(map(str, gone))
            raise Violation(f"a kept checkpoint lacks {words}, and the spool too")
        if checkpoint is world.disk[-1] and lacking:
            words = ", ".join(map(str, lacking))
            raise Violation(f"the newest durable checkpoint lacks {words}, which are committed")
    if not world.disk and committed:
        raise Violation("a commit, and no checkpoint was ever durable")
