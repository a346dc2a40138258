import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftfeed_proto.errors import MalformedMessage
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.limits import MAX_ORDINALS

A, B = "a" * 16, "0123456789abcdef"
ids = st.builds(
    SampleId, st.sampled_from([A, B]), st.integers(0, 1), st.integers(0, 1), st.integers(0, 12)
)
sets = st.sets(ids, max_size=40)
steps = st.lists(st.tuples(st.sampled_from(["add", "discard", "update"]), ids, sets), max_size=30)


@given(steps)
def test_behaves_like_a_set(steps: list[tuple[str, SampleId, set[SampleId]]]) -> None:
    ours, plain = IdSet(), set[SampleId]()
    for operation, id, many in steps:
        argument = many if operation == "update" else id
        getattr(ours, operation)(argument)
        getattr(plain, operation)(argument)
        assert (id in ours) == (id in plain)
    assert list(ours) == sorted(plain)
    assert len(ours) == len(plain)
    assert ours == IdSet(plain), "one set has one representation"


@given(sets, sets)
def test_difference_and_union_are_those_of_sets(left: set[SampleId], right: set[SampleId]) -> None:
    assert list(IdSet(left) - IdSet(right)) == sorted(left - right)
    union = IdSet(left)
    union.update(IdSet(right))
    assert list(union) == sorted(left | right)


@given(sets)
def test_survives_the_wire_and_shares_nothing_with_it(plain: set[SampleId]) -> None:
    ours = IdSet(plain)
    wire = msgpack.unpackb(msgpack.packb(ours.to_wire()))
    back = IdSet.from_wire(wire)
    assert back == ours
    twin = ours.copy()
    for id in plain:
        twin.discard(id)
    assert len(twin) == 0
    assert twin == IdSet()
    assert back == ours


def test_ids_trained_nearly_in_order_stay_one_range() -> None:
    ids = IdSet()
    for start in range(0, 4096, 64):
        for offset in range(64):
            ids.add(SampleId(A, 0, 0, start + offset * 37 % 64))
    assert ids.to_wire() == [(A, 0, 0, 0, [4096])]


HOSTILE_RANGES: dict[str, tuple[int, list[int]]] = {
    "none": (0, []),
    "an end that is not in the set": (0, [1, 2]),
    "empty range": (3, [0]),
    "touching": (0, [2, 0, 2]),
    "falling": (5, [-2]),
    "overlapping": (0, [5, -2, 5]),
    "negative": (-1, [6]),
    "beyond any file": (0, [MAX_ORDINALS + 1]),
    "beyond any file in the end": (MAX_ORDINALS - 2, [1, 1, 1]),
    "beyond 64 bits": (0, [2**63 - 1, 2**63 - 1, 2**63 - 1]),
}


@pytest.mark.parametrize(("first", "lengths"), HOSTILE_RANGES.values(), ids=HOSTILE_RANGES.keys())
def test_lengths_that_make_no_ranges_are_refused(first: int, lengths: list[int]) -> None:
    with pytest.raises(MalformedMessage, match="not ranges"):
        IdSet.from_wire([(A, 0, 0, first, lengths)])


def test_one_partition_twice_is_refused_instead_of_losing_its_first_half() -> None:
    with pytest.raises(MalformedMessage, match="come twice"):
        IdSet.from_wire([(A, 0, 0, 0, [5]), (A, 0, 0, 7, [1])])


def test_a_peer_that_claims_a_trillion_ids_costs_no_time() -> None:
    began = time.monotonic()
    claimed = IdSet.from_wire([(A, 0, shard, 0, [MAX_ORDINALS]) for shard in range(1000)])
    known = IdSet([SampleId(A, 0, 3, 7)])
    assert len(claimed) == 1000 * MAX_ORDINALS
    assert "in 1000 partitions" in repr(claimed)
    assert len(claimed - known) == 1000 * MAX_ORDINALS - 1
    assert len(known - claimed) == 0
    assert next(iter(claimed - known)) == SampleId(A, 0, 0, 0)
    claimed.update(known)
    claimed.discard(SampleId(A, 0, 3, 7))
    assert SampleId(A, 0, 3, 7) not in claimed
    assert time.monotonic() - began < 2


@given(ids)
def test_text_of_an_id_is_parsed_back(id: SampleId) -> None:
    assert SampleId.parse(str(id)) == id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"{A}/0/0",
        f"{A}/0/0/1/2",
        f"{A}/0/0/-1",
        f"{A}/0/0/+1",
        f"{A}/0/0/ 1",
        f"{A}/0/0/1\n",
        f"{A}/0/0/1_0",
        f"{A}/0/0/01",
        f"{A}/0/0/\u0661",
        f"{A}/0/0/1.0",
        f"{A}/0/0/{2**40}",
        f"{A}/0/{2**63}/0",
        f"{A.upper()}/0/0/1",
        f"{A[1:]}/0/0/1",
        f"{A}\n/0/0/1",
    ],
)
def test_what_str_would_not_write_is_no_id(text: str) -> None:
    with pytest.raises(ValueError, match="is not a sample id"):
        SampleId.parse(text)


# shards

edges = st.lists(st.integers(0, 12), max_size=6, unique=True).map(sorted)
shards = st.builds(
    lambda dataset, edges: Shards(dataset, 0, tuple(edges[: len(edges) // 2 * 2])),
    st.sampled_from([A, B]),
    edges,
)


def numbers(shards: Shards) -> set[int]:
    """One by one."""
    pairs = zip(shards.ranges[::2], shards.ranges[1::2], strict=True)
    return {number for start, stop in pairs for number in range(start, stop)}


@given(shards, st.sampled_from([A, B]), st.integers(0, 1), st.integers(0, 13))
def test_a_partition_is_in_the_ranges_of_its_own_file_and_epoch(
    shards: Shards, dataset: str, epoch: int, number: int
) -> None:
    own = (dataset, epoch) == (shards.dataset, 0)
    assert ((dataset, epoch, number) in shards) == (own and number in numbers(shards))


@given(shards, shards)
def test_two_owners_of_one_shard_are_found_out(left: Shards, right: Shards) -> None:
    both = left & right
    same = left.dataset == right.dataset
    found = {
        n for start, stop in zip(both[::2], both[1::2], strict=True) for n in range(start, stop)
    }
    assert found == (numbers(left) & numbers(right) if same else set())


@given(sets, shards)
def test_a_set_is_cut_to_the_shards_of_one_owner(plain: set[SampleId], shards: Shards) -> None:
    part = IdSet(plain).within(shards)
    assert set(part) == {id for id in plain if id.partition in shards}
    part.update(plain)
    assert part == IdSet(plain), "and shares nothing with what it was cut from"


@pytest.mark.parametrize("ranges", [(0,), (3, 3), (5, 3), (0, 2, 2, 4)])
def test_shards_that_do_not_rise_are_refused(ranges: tuple[int, ...]) -> None:
    with pytest.raises(MalformedMessage, match="not rising pairs"):
        Shards(A, 0, ranges).check()


def test_an_owner_of_nothing_is_none_the_less_an_owner() -> None:
    nothing = Shards(A, 0, ())
    nothing.check()
    assert (A, 0, 0) not in nothing
    assert nothing & Shards(A, 0, (0, 5)) == []
