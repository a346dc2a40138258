"""Two versions of the protocol on one stream: a relay between real ends plays the other one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import msgpack
import msgspec
import pytest
import zmq

from draftfeed_consumer.errors import StreamRefused
from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_proto import messages as m
from draftfeed_proto.descriptor import Expectation
from harness import consuming, producing
from samples import DESCRIPTOR

KINDS = {kind.__name__: kind for kind in get_args(m.FromMember | m.FromProducer)}
FREE_KEYS = ("sampling", "terminal")
"""Maps in which every key means something."""
MAJOR, MINOR = m.VERSION
POLL_MS = 20

Translate = Callable[[dict[str, Any]], dict[str, Any]]
Direction = Literal["up", "down"]


class Translator:
    """Passes messages on as another version would have written them."""

    def __init__(self, producer: str, up: Translate, down: Translate) -> None:
        self._producer, self._up, self._down = producer, up, down
        self.translated: set[str] = set()
        """Types of the messages that were changed."""
        self._context = zmq.Context()
        self._near = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._near.bind_to_random_port('tcp://127.0.0.1')}"
        self._far: dict[bytes, zmq.Socket[bytes]] = {}
        """A connection of its own for each of the member's."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for one in (self._near, *self._far.values()):
            one.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._near, zmq.POLLIN)
        while not self._stopped.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._near in ready:
                sender, message = self._near.recv_multipart()
                if sender not in self._far:
                    self._far[sender] = self._context.socket(zmq.DEALER)
                    self._far[sender].connect(self._producer)
                    poller.register(self._far[sender], zmq.POLLIN)
                self._far[sender].send(self._translated(message, self._up))
            for sender, far in self._far.items():
                if far in ready:
                    message, *frame = far.recv_multipart()
                    answer = self._translated(message, self._down)
                    self._near.send_multipart([sender, answer, *frame])

    def _translated(self, message: bytes, translate: Translate) -> bytes:
        before = msgpack.unpackb(message)
        after = translate(before)
        if after != before:
            self.translated.add(before["type"])
        packed = msgpack.packb(after)
        assert packed is not None
        return packed


def unchanged(message: dict[str, Any]) -> dict[str, Any]:
    return message


def newer(message: dict[str, Any]) -> dict[str, Any]:
    """By a minor version that has more fields, in every map."""
    grown: dict[str, Any] = _grown(message)
    if "version" in grown:
        grown["version"] = [MAJOR, MINOR + 1]
    return grown


def _grown(value: Any) -> Any:
    if isinstance(value, list):
        return [_grown(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: value[key] if key in FREE_KEYS else _grown(value[key]) for key in value}
    return {**inner, "from_the_future": {"a": [1, None], "b": {"c": "d"}}}


def older(message: dict[str, Any]) -> dict[str, Any]:
    """By one that knows none of the fields that may be absent, and says so."""
    stripped = _stripped(message, KINDS[message["type"]])
    if "version" in message:
        stripped["version"] = [MAJOR, 0]
    return {"type": message["type"], **stripped}


def _stripped(value: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    required = {field.name: field for field in msgspec.structs.fields(kind) if field.required}
    return {
        name: _stripped(value[name], field.type) if isinstance(value[name], dict) else value[name]
        for name, field in required.items()
    }


def claiming_newer(message: dict[str, Any]) -> dict[str, Any]:
    """What the other end of an older one is: it says a higher minor version."""
    return {**message, **({"version": [MAJOR, MINOR + 1]} if "version" in message else {})}


def other_major(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, **({"version": [MAJOR + 1, 0]} if "version" in message else {})}


@contextmanager
def translating(producer: str, up: Translate, down: Translate) -> Iterator[Translator]:
    translator = Translator(producer, up, down)
    try:
        yield translator
    finally:
        translator.close()


def use_up(stream: HiddenStateStream) -> list[int]:
    """Train on everything but one sample that is rejected, with a checkpoint on the way; the
    ordinals."""
    seen: list[int] = []
    for item in stream:
        seen.append(item["id"].ordinal)
        if len(seen) == 2:
            stream.reject(item["id"], "policy")
        else:
            stream.trained([item["id"]], step=len(seen))
        if len(seen) == 10:
            stream.committed(stream.state_dict())
            assert stream.wait_committed(20)
    stream.committed(stream.state_dict())
    assert stream.wait_committed(20)
    return seen


PAIRS: dict[str, tuple[Translate, Translate]] = {
    "member is newer": (newer, unchanged),
    "producer is newer": (unchanged, newer),
    "member is older": (older, claiming_newer),
    "producer is older": (claiming_newer, older),
    "both know fields that the other does not": (newer, newer),
}


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_another_minor_version_is_served_to_the_end(
    pair: tuple[Translate, Translate], same_host: bool, tmp_path: Path
) -> None:
    with (
        producing(tmp_path / "spool") as producer,
        translating(producer.address, *pair) as translator,
        consuming(translator.address, same_host=same_host) as stream,
    ):
        producer.generate(range(20))
        producer.server.finish()
        assert sorted(use_up(stream)) == list(range(20))
        assert producer.server.all_terminal.wait(20)
        assert len(producer.spool.committed) == 19
        assert len(producer.spool.tombstones) == 1
    assert {"Fence", "Granted"} & translator.translated


@pytest.mark.parametrize(("same_host", "chunk"), [(True, "ChunksAt"), (False, "Chunk")])
def test_every_message_of_a_stream_was_translated(
    same_host: bool, chunk: str, tmp_path: Path
) -> None:
    """Or the test above would show less than it says."""
    with (
        producing(tmp_path / "spool") as producer,
        translating(producer.address, newer, newer) as translator,
        consuming(translator.address, same_host=same_host) as stream,
    ):
        producer.generate(range(20))
        producer.server.finish()
        use_up(stream)
    common = {"Fence", "Granted", "Open", "Opened", "Offer", "Grant", "Credit", "Begin", chunk}
    ends = {"Reject", "Commit", "Committed", "EndOfSamples", "AllTerminal"}
    assert not (common | ends) - translator.translated


@pytest.mark.parametrize("direction", get_args(Direction))
def test_another_major_version_is_refused_with_both(direction: Direction, tmp_path: Path) -> None:
    pair = (other_major, unchanged) if direction == "up" else (unchanged, other_major)
    with (
        producing(tmp_path / "spool") as producer,
        translating(producer.address, *pair) as translator,
        consuming(translator.address) as stream,
        pytest.raises(StreamRefused, match=rf"{MAJOR + 1}\.0 .*{MAJOR}\.{MINOR}"),
    ):
        _ = stream.descriptor


def test_an_expectation_that_an_older_producer_ignored_is_checked_by_the_member(
    tmp_path: Path,
) -> None:
    """It never saw it, and granted the stream."""
    expect = Expectation(layer_ids=(0, 1))
    with (
        producing(tmp_path / "spool") as producer,
        translating(producer.address, older, unchanged) as translator,
        consuming(translator.address, expect=expect) as stream,
        pytest.raises(StreamRefused, match="layer_ids") as refused,
    ):
        _ = stream.descriptor
    assert str(DESCRIPTOR.layer_ids) in str(refused.value)
