"""The target's files at a producer's socket, asked for by peers that are polite and by others."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from asset_targets import make_plain
from draftfeed_producer import listener
from draftfeed_producer.asset_desk import MAX_ALL_UNSENT_PIECES, MAX_REQUESTS, MAX_UNSENT_PIECES
from draftfeed_proto import messages as m
from draftfeed_proto.limits import MAX_ASSET_PIECE_BYTES
from harness import Producer, consuming, producing
from samples import DESCRIPTOR
from waiting import eventually

pytestmark = pytest.mark.timeout(120)
PIECE = MAX_ASSET_PIECE_BYTES
SAMPLES = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("target"))


@pytest.fixture
def producer(tmp_path: Path, target: Path) -> Iterator[Producer]:
    with producing(tmp_path / "spool", target=target) as made:
        yield made


class Peer:
    """A DEALER that reads only when it is told to."""

    def __init__(self, address: str, unread_messages: int = 1000) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.RCVTIMEO, 20_000),
            (zmq.LINGER, 0),
            (zmq.RCVHWM, unread_messages),
        ):
            self.socket.setsockopt(option, value)
        self.socket.connect(address)

    def close(self) -> None:
        self.socket.close()
        self._context.term()

    def ask(self, message: m.Message) -> m.FromProducer:
        self.socket.send(m.encode(message))
        return self.answer()[0]

    def answer(self) -> tuple[m.FromProducer, bytes]:
        message, *rest = self.socket.recv_multipart()
        return m.decode_from_producer(message), rest[0] if rest else b""

    def listing(self) -> m.Assets:
        while True:
            answer = self.ask(m.ListAssets())
            if isinstance(answer, m.Assets):
                return answer
            assert isinstance(answer, m.Refused)
            assert answer.code == "preparing"

    def fetch(self, file: m.AssetFile) -> bytes:
        data = b""
        while len(data) < file.bytes:
            size = min(PIECE, file.bytes - len(data))
            request = m.FetchAsset(name=file.name, offset=len(data), bytes=size)
            self.socket.send(m.encode(request))
            answer, piece = self.answer()
            assert answer == m.AssetPiece(name=file.name, offset=len(data))
            assert len(piece) == size
            data += piece
        return data


@contextmanager
def peer_of(producer: Producer, unread_messages: int = 1000) -> Iterator[Peer]:
    peer = Peer(producer.address, unread_messages)
    try:
        yield peer
    finally:
        peer.close()


def trains_everything(producer: Producer) -> bool:
    with consuming(producer.address) as stream:
        seen = []
        for item in stream:
            seen.append(item["id"].ordinal)
            stream.trained([item["id"]], step=len(seen))
    return sorted(seen) == list(range(SAMPLES))


def test_what_is_fetched_is_what_was_listed(producer: Producer, target: Path) -> None:
    with peer_of(producer) as peer:
        listing = peer.listing()
        assert listing.stream_id == DESCRIPTOR.stream_id()
        assert [file.name for file in listing.files] == ["config.json", "model.safetensors"]
        for file in listing.files:
            data = peer.fetch(file)
            assert hashlib.sha256(data).hexdigest() == file.digest
    assert (target / "config.json").stat().st_size == listing.files[0].bytes


@pytest.mark.parametrize(
    ("request_for", "code"),
    [
        (lambda size: {"name": "config.json", "offset": 0, "bytes": 0}, "malformed"),
        (lambda size: {"name": "config.json", "offset": 0, "bytes": PIECE + 1}, "malformed"),
        (lambda size: {"name": "config.json", "offset": -1, "bytes": 1}, "malformed"),
        (lambda size: {"name": "config.json", "offset": size, "bytes": 1}, "asset"),
        (lambda size: {"name": "config.json", "offset": 0, "bytes": size + 1}, "asset"),
        (lambda size: {"name": "config.json", "offset": 2**63 - 1, "bytes": PIECE}, "asset"),
        (lambda size: {"name": "../config.json", "offset": 0, "bytes": 1}, "asset"),
        (lambda size: {"name": "/etc/passwd", "offset": 0, "bytes": 1}, "asset"),
        (lambda size: {"name": "x" * 1024, "offset": 0, "bytes": 1}, "asset"),
        (lambda size: {"name": "", "offset": 0, "bytes": 1}, "asset"),
    ],
)
def test_what_is_not_there_is_refused(
    producer: Producer, request_for: Callable[[int], dict[str, object]], code: str
) -> None:
    with peer_of(producer) as peer:
        size = peer.listing().files[0].bytes
        packed = msgpack.packb({"type": "FetchAsset", **request_for(size)})
        assert packed is not None
        peer.socket.send(packed)
        answer, _ = peer.answer()
        assert isinstance(answer, m.Refused)
        assert answer.code == code
        assert peer.fetch(peer.listing().files[0])


def test_who_asks_and_reads_as_fast_as_it_can_is_always_answered(producer: Producer) -> None:
    """Symptom: an answer in many thousands is missing, and the peer waits for ever."""
    with peer_of(producer) as peer:
        for _ in range(3000):
            assert isinstance(peer.ask(m.ListAssets()), m.Assets | m.Refused)


def test_a_producer_without_a_target_says_why(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as made, peer_of(made) as peer:
        listing = peer.listing()
        assert not listing.files
        assert "has no target" in listing.reason
        answer = peer.ask(m.FetchAsset(name="config.json", offset=0, bytes=1))
        assert isinstance(answer, m.Refused)


def test_a_target_that_cannot_be_served_does_not_end_the_producer(tmp_path: Path) -> None:
    target = make_plain(tmp_path / "target", vocab=100)
    (target / "model.safetensors").write_bytes(b"no tensors")
    with producing(tmp_path / "spool", target=target) as made, peer_of(made) as peer:
        assert "is not a safetensors file" in peer.listing().reason
        made.generate(range(SAMPLES))
        made.server.finish()
        assert trains_everything(made)


def test_a_file_that_is_cut_while_it_is_served_is_a_refusal(tmp_path: Path) -> None:
    target = make_plain(tmp_path / "target", vocab=100)
    with producing(tmp_path / "spool", target=target) as made, peer_of(made) as peer:
        weights = peer.listing().files[1]
        path = target / "model.safetensors"
        path.write_bytes(path.read_bytes()[:200])
        answer = peer.ask(m.FetchAsset(name=weights.name, offset=0, bytes=weights.bytes))
        assert isinstance(answer, m.Refused)
        assert answer.code == "asset"
        assert peer.listing()


def ask_for_much(peer: Peer, weights: m.AssetFile, count: int) -> None:
    for _ in range(count):
        peer.socket.send(m.encode(m.FetchAsset(name=weights.name, offset=0, bytes=PIECE)))


def test_who_asks_without_end_and_reads_nothing_costs_little_and_holds_nobody_up(
    producer: Producer, record_property: Callable[[str, object], None]
) -> None:
    """Symptoms: gigabytes in the producer's memory; samples and others that wait."""
    producer.generate(range(SAMPLES))
    producer.server.finish()
    with peer_of(producer, unread_messages=1) as greedy, peer_of(producer) as polite:
        weights = polite.listing().files[1]
        ask_for_much(greedy, weights, 2000)
        assert hashlib.sha256(polite.fetch(weights)).hexdigest() == weights.digest
        assert trains_everything(producer)
        sent = producer.server.statistics().asset_bytes - weights.bytes
        record_property("MiB sent to who does not read", sent >> 20)
        assert sent <= MAX_REQUESTS * PIECE


def test_requests_beyond_those_that_wait_are_told_so(producer: Producer) -> None:
    with peer_of(producer) as peer:
        weights = peer.listing().files[1]
        asked = threading.Event()

        def wait_for_all() -> list[Any]:
            """Meanwhile the server serves nobody: it might keep up."""
            asked.wait(60)
            return []

        producer.server._tell(wait_for_all)
        ask_for_much(peer, weights, 200)
        asked.set()
        busy = pieces = 0
        while not (busy and pieces):  # it did not read meanwhile, so some of each were not kept
            answer, _ = peer.answer()
            pieces += isinstance(answer, m.AssetPiece)
            busy += isinstance(answer, m.Refused) and answer.code == "busy"


def test_what_was_meant_for_peers_that_left_is_no_burden(producer: Producer) -> None:
    """Symptom: after some cut downloads nobody is served any more."""
    with peer_of(producer) as polite:
        weights = polite.listing().files[1]
        for _ in range(MAX_ALL_UNSENT_PIECES // MAX_UNSENT_PIECES + 4):
            with peer_of(producer, unread_messages=1) as gone:
                gone.listing()
                ask_for_much(gone, weights, MAX_REQUESTS)
                gone.answer()
        assert hashlib.sha256(polite.fetch(weights)).hexdigest() == weights.digest
    desk = producer.server._assets
    eventually(lambda: not desk.waiting, "nobody is waited for")


def test_who_reads_nothing_is_cut_off_in_the_end(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what lies in memory for him would do so for as long as he likes."""
    monkeypatch.setattr(listener, "UNREAD_MS", 1500)
    with (
        producing(tmp_path / "spool", target=target) as made,
        peer_of(made, unread_messages=1) as deaf,
    ):
        weights = deaf.listing().files[1]
        ask_for_much(deaf, weights, MAX_REQUESTS)
        peers = made.server._assets._peers
        eventually(lambda: any(peer.unsent for peer in list(peers.values())), "it lies here")
        eventually(lambda: not peers, "it does not any more", 45)


def test_samples_flow_while_files_are_fetched(producer: Producer) -> None:
    producer.generate(range(SAMPLES))
    producer.server.finish()
    stop, fetched = threading.Event(), []

    def fetch_again_and_again() -> None:
        with peer_of(producer) as peer:
            weights = peer.listing().files[1]
            while not stop.is_set():
                fetched.append(len(peer.fetch(weights)))

    thread = threading.Thread(target=fetch_again_and_again)
    thread.start()
    try:
        eventually(lambda: bool(fetched), "one download")
        before = len(fetched)
        assert trains_everything(producer)
        eventually(lambda: len(fetched) > before, "downloads go on, too")
    finally:
        stop.set()
        thread.join()
