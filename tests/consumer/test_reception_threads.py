"""Chunks are decoded by threads: what a member says is the same, and nothing outlives a sample."""

from collections.abc import Iterator

import pytest

from draftfeed_consumer.actions import Deliver
from draftfeed_proto import messages as m
from draftfeed_proto.codecs import by_name
from draftfeed_proto.sample import Sample, decoded_bytes, encode_chunks
from draftfeed_proto.workers import Workers
from member_bench import A, Bench
from samples import HIDDEN, LAYERS, sample

ROWS = 24
SIZE = decoded_bytes(ROWS, LAYERS, HIDDEN)
CHUNKS = 1 + ROWS


@pytest.fixture(params=[1, 2, 4])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    workers = Workers(request.param)
    made = Bench(A, workers=workers)
    made.begin()
    yield made
    workers.close()


def begin(bench: Bench, ordinal: int) -> tuple[Sample, list[bytes]]:
    """Offered, granted and begun: the sample and its frames, a row each."""
    made = sample(ordinal, ROWS)
    frames = list(encode_chunks(made, by_name("packed"), chunk_bytes=1))
    assert len(frames) == CHUNKS
    bench.tell(A, m.Offer, samples=[(made.id, SIZE)])
    bench.start(A, made, frames)
    return made, frames


def send(bench: Bench, ordinal: int, damaged: int | None = None) -> None:
    made, frames = begin(bench, ordinal)
    if damaged is not None:
        frames[damaged] = frames[damaged][:-1] + bytes([frames[damaged][-1] ^ 1])
    for index, frame in enumerate(frames):
        bench.chunk(A, made.id, index, frame)


def test_samples_arrive_whole_and_in_order(bench: Bench) -> None:
    for ordinal in range(5):
        send(bench, ordinal)
    arrived = [action.sample for action in bench.actions if isinstance(action, Deliver)]
    assert [one.digest() for one in arrived] == [sample(k, ROWS).digest() for k in range(5)]


@pytest.mark.parametrize("at", [1, 2, CHUNKS // 2, CHUNKS - 2, CHUNKS - 1])
def test_damage_in_any_chunk_is_one_nack_and_the_sample_comes_again(bench: Bench, at: int) -> None:
    """The last chunks may be undecoded when the last one is received: a sample must not be handed
    on before they are found to be bad, and its room must not be given back twice."""
    before = bench.room.left_bytes
    send(bench, 0, damaged=at)
    assert [nack.id.ordinal for nack in bench.said(A, m.Nack)] == [0]
    assert bench.delivered == []
    assert bench.room.left_bytes == before
    send(bench, 0)
    assert bench.delivered == [0]
    assert bench.room.left_bytes == before - SIZE


def test_a_link_that_is_cut_in_mid_sample_leaves_nothing_under_way(bench: Bench) -> None:
    before = bench.room.left_bytes
    made, frames = begin(bench, 0)
    kept = [bytearray(frame) for frame in frames]
    for index in range(CHUNKS - 3):
        bench.chunk(A, made.id, index, kept[index])
    bench.cut(A)
    bench.actions.clear()  # credits and grants hold no frames, and errors would
    for frame in kept:
        frame.append(0)  # BufferError while a thread reads it
    assert bench.room.left_bytes == before
    bench.link()
    bench.grant(A)
    bench.do(bench.member.open())
    send(bench, 0)
    assert bench.delivered == [0]


def test_what_is_under_way_when_a_member_drains_is_given_back(bench: Bench) -> None:
    before = bench.room.left_bytes
    made, frames = begin(bench, 0)
    for index in range(CHUNKS - 3):
        bench.chunk(A, made.id, index, frames[index])
    bench.do(bench.member.drain())
    assert [release.ids for release in bench.said(A, m.Release)] == [[made.id]]
    assert bench.room.left_bytes == before
    for index in range(CHUNKS - 3, CHUNKS):
        bench.chunk(A, made.id, index, frames[index])
    assert bench.delivered == []
