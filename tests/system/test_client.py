"""What a consumer makes of producers that are down, leave at once, or do not say what they are."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from draftfeed_consumer.actions import Attach
from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.errors import Fenced, StreamClosed, StreamRefused
from draftfeed_consumer.link import Link
from draftfeed_proto import messages as m
from draftfeed_proto.codecs import by_name
from draftfeed_proto.ids import Shards
from draftfeed_proto.sample import Sample, encode_chunks, header_of
from harness import consuming, producing
from samples import DATASET, DESCRIPTOR, sample
from waiting import eventually

HERE: dict[str, Any] = {"term": 1, "session": "s"}


class Peer:
    """A ROUTER that plays a producer by hand."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.setsockopt(zmq.LINGER, 1_000)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._member = b""

    def expect(self, kind: type[m.Message]) -> m.Message:
        """The next message of that type; others are passed over."""
        while True:
            self._member, data = self._socket.recv_multipart()
            message = m.decode_from_member(data)
            if isinstance(message, kind):
                return message

    def say(self, message: m.Message) -> None:
        self._socket.send_multipart([self._member, m.encode(message)])

    def send(self, made: Sample) -> None:
        """One sample that was granted."""
        frames = list(encode_chunks(made, by_name("raw")))
        header = header_of(
            made, chunks=len(frames), encoded_bytes=sum(map(len, frames)), audit=True
        )
        self.say(m.Begin(**HERE, header=header))
        for index, frame in enumerate(frames):
            chunk = m.encode(m.Chunk(**HERE, id=made.id, index=index))
            self._socket.send_multipart([self._member, chunk, frame])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def granted(**changes: object) -> m.Granted:
    fields = {
        **HERE,
        "descriptor": DESCRIPTOR,
        "stream_id": DESCRIPTOR.stream_id(),
        "shards": Shards(DATASET, 0, (0, 64)),
        "committed": [],
        "commit_number": 0,
        **changes,
    }
    return m.Granted(**fields)  # type: ignore[arg-type]


def test_consumer_says_goodbye_when_all_is_terminal_so_that_the_producer_may_leave(
    peer: Peer,
) -> None:
    """A producer that left first could take its last acknowledgement with it, unread."""
    with consuming(peer.address) as stream:
        peer.expect(m.Fence)
        peer.say(granted())
        iterator = iter(stream)
        state = stream.state_dict()
        stream.committed(state)
        peer.say(m.EndOfSamples(**HERE))
        assert next(iterator, None) is None
        peer.expect(m.Commit)
        peer.say(m.Committed(**HERE, number=state["number"]))
        peer.say(m.AllTerminal(**HERE))
        peer.expect(m.Bye)
        assert stream.wait_committed(10)


@pytest.mark.parametrize(
    "changes",
    [
        {"stream_id": "0" * 32},
        {"version": (9, 0)},
        {"descriptor": msgspec.structs.replace(DESCRIPTOR, vocab_size=9)},
    ],
)
def test_producer_that_serves_something_else_is_left_for_good(
    peer: Peer, changes: dict[str, object]
) -> None:
    """And not attached to again and again."""
    with consuming(peer.address) as stream:
        peer.expect(m.Fence)
        peer.say(granted(**changes))
        with pytest.raises(StreamRefused):
            _ = stream.descriptor


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that takes connections and never says a word: a host that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_producer_that_hangs_does_not_hold_up_the_others(tmp_path: Path, nobody: str) -> None:
    """While it is tried again and again, the samples of the other one arrive."""
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(30))
        attach = Attach(without=(nobody,))
        with consuming(nobody, producer.address, attach=attach) as stream:
            iterator = iter(stream)
            for step in range(30):
                stream.trained([next(iterator)["id"]], step)
            assert stream.statistics().buffer.empty_seconds < 2.0
            states = {p.address: p.state for p in stream.statistics().client.producers}
            assert states == {nobody: "down", producer.address: "open"}


def test_without_must_name_configured_producers_and_not_all() -> None:
    here = "tcp://localhost:1"
    for without, words in (("tcp://x:1", "not one of"), (here, "names every producer")):
        with (
            pytest.raises(ValueError, match=words),
            consuming(here, attach=Attach(without=(without,))),
        ):
            pass


def test_consumer_that_is_replaced_stops_with_an_error_of_its_own(peer: Peer) -> None:
    with consuming(peer.address) as stream:
        peer.expect(m.Fence)
        peer.say(granted())
        assert stream.descriptor == DESCRIPTOR
        peer.say(m.Refused(code="fenced", reason="term 2 was granted to another", term=2))
        with pytest.raises(Fenced, match="term 2 was granted"):
            next(iter(stream))


def test_checkpoint_that_would_hold_nothing_new_waits_for_the_samples_that_are_here(
    peer: Peer,
) -> None:
    """A full spool asks after each commit: a trainer whose window fills would make several a
    second."""
    window = BufferConfig(window_samples=2, stall_seconds=3600)
    with consuming(peer.address, buffer=window) as stream:
        peer.expect(m.Fence)
        peer.say(granted())
        items = iter(stream)
        trainer = threading.Thread(target=lambda: stream.trained([next(items)["id"]], 1))
        trainer.start()
        peer.expect(m.Open)
        peer.say(m.CheckpointWanted(**HERE))
        eventually(lambda: stream.checkpoint_wanted, "nothing is here to be trained first")
        for ordinal in range(2):
            peer.say(m.Offer(**HERE, samples=[(sample(ordinal).id, 15_565)]))
            peer.expect(m.Grant)
            peer.send(sample(ordinal))
            if ordinal == 0:
                eventually(lambda: stream.statistics().buffer.ready == 1, "one is here")
                assert not stream.checkpoint_wanted
        trainer.join(20)
        assert not trainer.is_alive()
        assert stream.checkpoint_wanted


def test_trainer_that_waits_at_a_full_spool_makes_a_checkpoint(peer: Peer) -> None:
    """The producer waits for a commit to free space, the trainer for a sample: neither moves."""
    saved: list[dict[str, Any]] = []
    with consuming(peer.address) as stream:

        def save() -> None:
            saved.append(stream.state_dict())
            stream.committed(saved[-1])

        stream.on_idle_checkpoint(save)
        trained = threading.Event()

        def train() -> None:
            for item in stream:
                stream.trained([item["id"]], 1)
                trained.set()

        trainer = threading.Thread(target=train)
        trainer.start()
        peer.expect(m.Fence)
        peer.say(granted())
        peer.expect(m.Open)
        made = sample(0)
        peer.say(m.Offer(**HERE, samples=[(made.id, 15_565)]))
        peer.expect(m.Grant)
        peer.send(made)
        assert trained.wait(20)
        peer.say(m.CheckpointWanted(**HERE))
        commit = peer.expect(m.Commit)
        assert isinstance(commit, m.Commit)
        assert commit.trained == [(DATASET, 0, 0, 0, [1])]
        stream.drain()
        trainer.join(20)
        assert not trainer.is_alive()
    assert len(saved) == 1


@pytest.mark.parametrize("failed", [False, True])
def test_trainer_that_dies_over_a_sample_says_so_as_it_leaves(peer: Peer, failed: bool) -> None:
    """A sample that is there whenever a trainer dies could not be told from others."""
    with consuming(peer.address) as stream:
        peer.expect(m.Fence)
        peer.say(granted())
        assert stream.descriptor == DESCRIPTOR
        stream.close(failed=failed)
        bye = peer.expect(m.Bye)
        assert isinstance(bye, m.Bye)
        assert bye.failed is failed


def test_end_of_a_run_is_no_warning(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "draftfeed_consumer"), consuming(peer.address) as stream:
        peer.expect(m.Fence)
        peer.say(granted())
        assert stream.descriptor == DESCRIPTOR
        peer.say(m.EndOfSamples(**HERE))
        peer.say(m.AllTerminal(**HERE))
        assert stream.wait_committed(10)
        peer.expect(m.Bye)
    messages = {record.levelname: record.getMessage() for record in caplog.records}
    assert messages["INFO"].startswith("left tcp:")
    assert "WARNING" not in messages


def test_drained_stream_ends_and_gives_back_what_was_not_seen(tmp_path: Path) -> None:
    with producing(tmp_path / "spool", session_timeout_seconds=60) as producer:
        producer.generate(range(12))
        producer.server.finish()
        with consuming(producer.address) as first:
            seen = []
            for item in first:
                seen.append(item["id"].ordinal)
                first.trained([item["id"]], len(seen))
                if len(seen) == 3:
                    first.drain()
            assert first.draining
            assert len(seen) == 3
            checkpoint = first.state_dict()
            first.committed(checkpoint)
            assert first.wait_committed(20)
        with consuming(producer.address) as second:
            second.load_state_dict(checkpoint)
            rest = [item["id"].ordinal for item in second]
    assert sorted(seen + rest) == list(range(12))


def test_signal_handler_may_drain_while_the_trainer_waits(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer, consuming(producer.address) as stream:
        before = signal.signal(signal.SIGUSR1, lambda *_: stream.drain())
        try:
            assert stream.descriptor == DESCRIPTOR
            killer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
            killer.start()
            assert list(stream) == []  # there is nothing: it would wait for ever
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_consumer_that_waits_for_its_producer_can_be_stopped() -> None:
    with consuming("tcp://127.0.0.1:1") as stream:
        stream.drain()
        with pytest.raises(StreamClosed):
            next(iter(stream))


def test_tail_of_a_run_is_reported_and_not_trained(tmp_path: Path) -> None:
    with producing(tmp_path / "spool") as producer, consuming(producer.address) as stream:
        producer.generate(range(3))
        producer.server.finish()
        items = list(stream)
        stream.trained([item["id"] for item in items[:2]], 1)
        stream.tail([items[2]["id"]])
        stream.committed(stream.state_dict())
        assert stream.wait_committed(20)
        eventually(lambda: len(producer.spool.tombstones) == 1, "the tail is stored")
        (state,) = (tombstone.state for tombstone in producer.spool.tombstones.values())
        assert state == "tail"


def test_socket_of_one_thread_is_not_touched_by_another(peer: Peer) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = Link(context, peer.address)
    caught: list[BaseException] = []

    def touch() -> None:
        for use in (link.receive, link.check, link.close):
            try:
                use()
            except AssertionError as error:
                caught.append(error)

    thread = threading.Thread(target=touch)
    thread.start()
    thread.join(20)
    link.close()
    context.term()
    assert len(caught) == 3


def test_trainer_of_many_threads_never_touches_a_socket(tmp_path: Path) -> None:
    """Every link asserts whose it is: the client would stop with that error."""
    with producing(tmp_path / "spool") as producer, consuming(producer.address) as stream:
        producer.generate(range(60))
        producer.server.finish()
        lock, steps = threading.Lock(), iter(range(1000))

        def work(items: list[dict[str, Any]]) -> None:
            for item in items:
                with lock:
                    step = next(steps)
                if step % 7 == 3:
                    stream.reject(item["id"], "every seventh")
                else:
                    stream.trained([item["id"]], step)
                stream.statistics()
                if step % 10 == 0:
                    with lock:
                        stream.committed(stream.state_dict())

        items = list(stream)
        threads = [threading.Thread(target=work, args=(items[at::4],)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stream.committed(stream.state_dict())
        assert stream.wait_committed(20)
        assert producer.server.all_terminal.wait(20)
