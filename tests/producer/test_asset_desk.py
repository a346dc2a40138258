"""Whose turn it is at the desk, and what is kept for peers that take nothing."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from asset_targets import make_plain
from draftfeed_producer.asset_desk import (
    MAX_ALL_REQUESTS,
    MAX_ALL_UNSENT_PIECES,
    MAX_PEERS,
    MAX_REQUESTS,
    MAX_UNSENT_PIECES,
    SLOW_SECONDS,
    STALL_SECONDS,
    AssetDesk,
    Piece,
)
from draftfeed_proto import messages as m
from waiting import eventually

REQUEST = m.FetchAsset(name="config.json", offset=0, bytes=2)


class Desk:
    """A desk with a clock of the test's, and sockets whose pipes the test empties."""

    def __init__(self, target: Path) -> None:
        self.now = 100.0
        self._read = threading.Semaphore(0)
        self.desk = AssetDesk("stream", target)
        self.desk.start(self._read.release)
        eventually(lambda: isinstance(self.ask(b"first"), m.Assets), "the files are listed")
        self.held: dict[bytes, list[threading.Event]] = {}

    def ask(self, sender: bytes) -> m.FromProducer | None:
        return self.desk.answer(sender, m.ListAssets(), self.now)

    def fetch(self, sender: bytes) -> m.FromProducer | None:
        return self.desk.answer(sender, REQUEST, self.now)

    def turn(self) -> Piece | None:
        """One of the server's, once what is read has been read."""
        piece = self.desk.next_piece(self.now)
        if piece is None and self.desk._reading:
            assert self._read.acquire(timeout=20)
            piece = self.desk.next_piece(self.now)
        if piece is not None:
            event = threading.Event()
            self.held.setdefault(piece.sender, []).append(event)
            self.desk.sent(piece, zmq.MessageTracker(event))
        return piece

    def turns(self) -> list[bytes]:
        """Who gets the next pieces, until nobody does."""
        senders = []
        while (piece := self.turn()) is not None:
            senders.append(piece.sender)
        return senders

    def taken(self, sender: bytes) -> None:
        """The network has all that was sent."""
        for event in self.held.pop(sender, []):
            event.set()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("target"), vocab=10)


@pytest.fixture
def desk(target: Path) -> Iterator[Desk]:
    made = Desk(target)
    yield made
    made.desk.close()


def test_peers_take_turns(desk: Desk) -> None:
    for sender in (b"a", b"a", b"a", b"b", b"c"):
        assert desk.fetch(sender) is None
    assert desk.turns() == [b"a", b"b", b"c", b"a"]
    desk.taken(b"a")
    assert desk.turns() == [b"a"]
    assert not desk.desk.waiting


def test_who_takes_nothing_gets_no_more_and_is_forgotten_in_the_end(desk: Desk) -> None:
    for _ in range(MAX_REQUESTS):
        assert desk.fetch(b"deaf") is None
    assert desk.turns() == [b"deaf"] * MAX_UNSENT_PIECES
    assert desk.fetch(b"polite") is None
    assert desk.turns() == [b"polite"]
    assert desk.desk.waiting, "the deaf one is waited for"
    desk.now += STALL_SECONDS + 1
    assert desk.turns() == []
    assert not desk.desk.waiting


def test_requests_that_wait_have_a_limit(desk: Desk) -> None:
    told = [desk.fetch(f"{n // MAX_REQUESTS}".encode()) for n in range(MAX_ALL_REQUESTS)]
    assert told == [None] * MAX_ALL_REQUESTS
    for sender in (b"0", b"new"):
        answer = desk.fetch(sender)
        assert isinstance(answer, m.Refused)
        assert answer.code == "busy"


def test_what_lies_in_memory_for_all_peers_has_a_limit(desk: Desk) -> None:
    senders = [f"{n}".encode() for n in range(MAX_ALL_UNSENT_PIECES)]
    for sender in senders:
        assert desk.fetch(sender) is None
    assert len(desk.turns()) == MAX_ALL_UNSENT_PIECES
    assert desk.fetch(b"late") is None
    assert desk.turns() == []
    desk.taken(senders[0])
    assert desk.turns() == [b"late"]


def test_peers_that_take_nothing_hold_up_nobody_for_long(desk: Desk) -> None:
    """Symptom: sixteen connections that read nothing, and no training node gets the files."""
    for n in range(MAX_ALL_UNSENT_PIECES):
        for _ in range(2):
            assert desk.fetch(b"deaf %d" % n) is None
    assert len(desk.turns()) == MAX_ALL_UNSENT_PIECES
    assert desk.fetch(b"polite") is None
    assert desk.turns() == []
    desk.now += SLOW_SECONDS + 1
    assert b"polite" in desk.turns()


def test_peers_that_take_nothing_have_a_limit(desk: Desk) -> None:
    for n in range(MAX_PEERS):
        assert desk.fetch(b"deaf %d" % n) is None
        desk.turns()
        desk.now += SLOW_SECONDS / 8
    answer = desk.fetch(b"one more")
    assert isinstance(answer, m.Refused)
    assert answer.code == "busy"
    desk.taken(b"deaf 0")
    assert desk.fetch(b"one more") is None


def test_what_a_lost_peer_asked_for_is_void(desk: Desk) -> None:
    for _ in range(3):
        assert desk.fetch(b"gone") is None
    assert desk.desk.next_piece(desk.now) is None  # it is being read
    assert desk._read.acquire(timeout=20)
    piece = desk.desk.next_piece(desk.now)
    assert piece is not None
    desk.desk.dropped(piece)
    assert desk.fetch(b"polite") is None
    # One more was being read when it was lost; the third is not.
    assert sorted(desk.turns()) == [b"gone", b"polite"]


def test_a_desk_that_is_closed_while_it_hashes_ends(tmp_path: Path) -> None:
    desk = AssetDesk("stream", make_plain(tmp_path / "target"))
    desk.start(lambda: None)
    desk.close()
    assert not desk._thread.is_alive()
