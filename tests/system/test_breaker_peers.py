"""Peers that ask without end, vanish all at once or say what they may not: samples still arrive."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from draftfeed_proto import messages as m
from harness import Producer, consuming, producing
from waiting import eventually

SAMPLES = 6
RANKS = 250


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[Producer]:
    with producing(tmp_path / "spool") as made:
        made.generate(range(SAMPLES))
        made.server.finish()
        yield made


@contextmanager
def asking_without_end(address: str) -> Iterator[None]:
    """Somebody who never reads an answer."""
    over = threading.Event()

    def ask() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        question = m.encode(m.Inquire())
        while not over.is_set():
            with suppress(zmq.Again):
                socket.send(question, zmq.NOBLOCK)
        socket.close()
        context.term()

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    over.set()
    thread.join()


def test_somebody_who_asks_without_end_keeps_no_samples_from_the_trainer(
    producer: Producer,
) -> None:
    with asking_without_end(producer.address), consuming(producer.address) as stream:
        seen = 0
        for item in stream:
            seen += 1
            stream.trained([item["id"]], step=seen)
    assert seen == SAMPLES


def test_hundreds_of_ranks_that_vanish_at_once_do_not_end_the_producer(producer: Producer) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ranks = []
    for rank in range(RANKS):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(producer.address)
        fence = m.Fence(
            group="g",
            member=str(rank),
            members=RANKS,
            leader=rank == 0,
            incarnation="1",
            process=str(rank),
            term=1,
        )
        socket.send(m.encode(fence))
        granted = m.decode_from_producer(socket.recv())
        assert isinstance(granted, m.Granted)
        opening = m.Open(term=1, session=granted.session, trained=[])
        socket.send(m.encode(opening))
        ranks.append(socket)
    eventually(lambda: len(producer.server.statistics().members) == RANKS, "all are attached")
    for socket in ranks:
        socket.close()
    context.term()
    eventually(lambda: not producer.server.statistics().members, "all are found gone")
    assert producer.server.failure is None
