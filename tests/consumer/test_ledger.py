"""Which ids are held, trained and committed, and what a checkpoint carries of it."""

import json

import pytest

from draftfeed_consumer.errors import StateError
from draftfeed_consumer.ledger import Ledger, LedgerState, parse, union
from draftfeed_proto.ids import IdSet, SampleId, Shards
from samples import DATASET, sample


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
    trained, held, *_ = again.opening()
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
    trained, held, *_ = made.opening()
    assert IdSet.from_wire(trained) == IdSet(ids(0))
    assert held == ids(1, 2)


def test_numbers_rise_and_follow_the_producer() -> None:
    made = ledger()
    made.follow(3, 41)
    assert [parse(made.state("s")).number for _ in range(2)] == [42, 43]


def test_sample_that_was_trained_is_not_held_again() -> None:
    made = ledger(0)
    assert not made.hold(ids(0)[0])
    made.train(ids(0))
    assert not made.hold(ids(0)[0])


@pytest.mark.parametrize("state", [{}, {"format": 3}, {"trained": 3}, {"extra": 1}])
def test_checkpoint_of_something_else_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(StateError, match="not a draftfeed state"):
        Ledger().load(state)


def test_checkpoint_of_another_format_is_refused_with_both_numbers() -> None:
    with pytest.raises(StateError, match="format 2, this draftfeed reads 3"):
        Ledger().load({"format": 2, "stream_id": "s", "number": 3, "trained": []})


def test_state_names_its_term_and_the_state_it_descends_from() -> None:
    made = ledger()
    made.follow(3, 0)
    states = [parse(made.state("s")) for _ in range(2)]
    assert [(s.term, s.number, s.parent) for s in states] == [(3, 1, 0), (3, 2, 1)]
    again = Ledger()
    again.load(made.state("s"))
    again.follow(4, 9)
    assert parse(again.state("s")) == LedgerState(3, "s", 4, 10, 3, [])


def test_opening_speaks_of_one_producers_shards_only() -> None:
    made = ledger(0, 20, 40)
    made.train(ids(0, 20))
    made.committed(parse(made.state("s")))
    opening = made.opening(Shards(DATASET, 0, (1, 3)))
    assert IdSet.from_wire(opening.trained) == IdSet(ids(20))
    assert opening.held == ids(40)


def test_rejected_sample_is_claimed_and_never_delivered_or_trained() -> None:
    made = ledger(0)
    made.refuse(ids(0)[0])
    assert made.opening().held == ids(0)
    assert not made.hold(ids(0)[0])
    with pytest.raises(ValueError, match="not held"):
        made.train(ids(0))


def test_given_back_sample_may_come_again() -> None:
    made = ledger(0)
    made.drop(ids(0)[0])
    assert made.opening().held == []
    assert made.hold(ids(0)[0])


def test_at_work_is_what_the_trainer_took_and_has_not_trained() -> None:
    made = ledger(0, 1, 2)
    for id in ids(0, 1):
        made.take(id)
    made.train(ids(0))
    assert made.at_work == ids(1)


def test_state_of_a_group_holds_what_all_ranks_trained_and_any_rank_can_go_on_from_it() -> None:
    ranks = [ledger(0), ledger(1)]
    for rank, made in enumerate(ranks):
        made.follow(2, 5)
        made.train(ids(rank))
    group = union([parse(made.state("s")) for made in ranks])
    assert IdSet.from_wire(group.trained) == IdSet(ids(0, 1))
    ranks[1].join(group)
    ranks[1].committed(group)
    assert not ranks[1].hold(ids(0)[0])  # the other rank trained it
    assert ranks[1].opening().held == []
