"""Which ids are held, trained and committed, and what a checkpoint carries of it."""

import json

import pytest

from draftfeed_consumer.errors import StateError
from draftfeed_consumer.ledger import Ledger, parse
from draftfeed_proto.ids import IdSet, SampleId
from samples import sample


def ids(*ordinals: int) -> list[SampleId]:
    return [sample(ordinal, rows=1).id for ordinal in ordinals]


def ledger(*held: int) -> Ledger:
    made = Ledger()
    for id in ids(*held):
        made.hold(id)
    return made


def test_received_is_not_trained() -> None:
    assert parse(ledger(0, 1).state("s")).trained == []


def test_state_holds_what_was_trained_and_survives_json() -> None:
    made = ledger(0, 1, 2)
    made.train(ids(0, 2))
    state = json.loads(json.dumps(made.state("s")))
    again = Ledger()
    again.load(state)
    trained, held = again.opening()
    assert IdSet.from_wire(trained) == IdSet(ids(0, 2))
    assert held == []


def test_sample_acknowledged_twice_is_refused() -> None:
    made = ledger(0)
    made.train(ids(0))
    with pytest.raises(ValueError, match="not held"):
        made.train(ids(0))


@pytest.mark.parametrize("wrong", [ids(5), [*ids(0), *ids(0)]])
def test_sample_never_received_or_named_twice_is_refused(wrong: list[SampleId]) -> None:
    with pytest.raises(ValueError, match="not held"):
        ledger(0).train(wrong)


def test_trained_since_the_last_commit_counts_as_held_when_attaching_again() -> None:
    made = ledger(0, 1, 2)
    made.train(ids(0))
    made.committed(parse(made.state("s")))
    made.train(ids(1))
    trained, held = made.opening()
    assert IdSet.from_wire(trained) == IdSet(ids(0))
    assert held == ids(1, 2)


def test_numbers_rise_and_follow_the_producer() -> None:
    made = ledger()
    made.follow(41)
    assert [parse(made.state("s")).number for _ in range(2)] == [42, 43]


def test_sample_that_was_trained_is_not_held_again() -> None:
    made = ledger(0)
    assert not made.hold(ids(0)[0])
    made.train(ids(0))
    assert not made.hold(ids(0)[0])


@pytest.mark.parametrize("state", [{}, {"format": 1}, {"trained": 3}, {"extra": 1}])
def test_checkpoint_of_something_else_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(StateError, match="not a draftfeed state"):
        Ledger().load(state)
