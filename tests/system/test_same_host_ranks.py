"""Two members of one group: one reads the spool's files, the other is sent its samples."""

import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from bare_member import BareMember
from draftfeed_producer.server import Server
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId
from harness import Producer, producing
from test_same_host import flip, patiently_connected
from waiting import eventually


class Rank(BareMember):
    """It grants nothing by itself."""

    def __init__(self, address: str, rank: int) -> None:
        self._rank = rank
        super().__init__(address)

    def _fence(self, name: str, term: int) -> m.Fence:
        return m.Fence(
            group="g",
            member=str(self._rank),
            members=2,
            leader=self._rank == 0,
            incarnation=name,
            process=str(self._rank),
            term=term,
        )

    def _take(self, message: m.FromProducer) -> None:
        if not isinstance(message, m.Offer):
            super()._take(message)

    def grant_one(self) -> SampleId:
        id, _ = self.until(m.Offer).samples[0]
        self.say(m.Grant, ids=[id])
        return id


class Pipes:
    """That take no more chunks, nor where they lie, for as long as it is so."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = threading.Event()
        self._send = server._send
        monkeypatch.setattr(server, "_send", self._take)

    def _take(
        self, sender: bytes, frames: Sequence[bytes | memoryview], read_bytes: int = 0
    ) -> bool:
        message = m.decode_from_producer(frames[0])
        if self.full.is_set() and isinstance(message, m.Chunk | m.ChunksAt):
            raise zmq.Again
        return self._send(sender, list(frames), read_bytes)


def waiting(producer: Producer) -> set[type]:
    backlogs = list(producer.server._backlogs.values())
    return {type(one.message) for backlog in backlogs for one in list(backlog)}


def test_sample_that_is_made_again_while_its_places_wait_does_not_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: "the server stopped", unhashable type, when another member's link was full, too."""
    with producing(tmp_path / "spool", segment_bytes=1) as producer:
        pipes = Pipes(producer.server, monkeypatch)
        with (
            closing(Rank(producer.address, 0)) as far,
            closing(Rank(producer.address, 1)) as near,
            closing(patiently_connected(near.granted.local)) as link,
        ):
            session = near.granted.session
            link.send(session.encode())
            eventually(lambda: session in producer.server._handover, "let in")
            far.open()
            near.open()
            producer.generate(range(8))
            pipes.full.set()
            far.grant_one()
            id = near.grant_one()
            eventually(lambda: waiting(producer) == {m.Chunk, m.ChunksAt}, "both links are full")
            places = producer.spool.places(id, 0, 1)
            assert places is not None
            flip(places.path, places.frames[0][0] + 50)
            near.say(m.Nack, id=id, reason="checksum")
            assert producer.server.regenerate.get(timeout=20) == [id]
            server = producer.server
            eventually(
                lambda: server.failure is not None or waiting(producer) == {m.Chunk},
                "it is dropped",
            )
            assert server.failure is None
            pipes.full.clear()
            far.receive(1)
