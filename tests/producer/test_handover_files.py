"""Files that are handed to members of this host, and who else comes to that door."""

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from draftfeed_consumer.local import LocalFiles
from draftfeed_producer import handover
from draftfeed_producer.handover import WAITING, Handover
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId, Shards
from draftfeed_proto.limits import MAX_LOCAL_FILES
from samples import DATASET, DESCRIPTOR


@pytest.fixture
def door() -> Iterator[Handover]:
    with closing(Handover()) as made:
        yield made


def member(door: Handover) -> LocalFiles:
    granted = m.Granted(
        term=1,
        session="s",
        descriptor=DESCRIPTOR,
        stream_id=DESCRIPTOR.stream_id(),
        shards=Shards(DATASET, 0, (0, 1)),
        local=door.name,
        committed=[],
        commit_number=0,
    )
    files = LocalFiles.of(granted)
    assert files is not None
    door.look(["s"])
    return files


def stranger(door: Handover) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(20)
    link.connect(f"\0{door.name}")
    return link


def test_file_that_was_handed_over_for_nothing_does_not_part_the_ends(
    door: Handover, tmp_path: Path
) -> None:
    """Its chunk was never sent, and the member then closed a file that the producer still named."""
    paths = [tmp_path / f"{number}" for number in range(3 * MAX_LOCAL_FILES)]
    for path in paths:
        path.write_bytes(path.name.encode().rjust(4))
    with closing(member(door)) as files:

        def read(path: Path) -> bytes:
            number = door.number("s", path)
            assert number is not None
            id = SampleId(DATASET, 0, 0, 0)
            places = ((0, 4),)
            buffer = bytearray(4)
            (frame,) = files.at(
                m.ChunksAt(term=1, session="s", id=id, index=0, file=number, places=places)
            )
            frame.read(0, memoryview(buffer))
            return bytes(buffer)

        first, *others = paths
        for path in (first, *others[: MAX_LOCAL_FILES - 2]):
            read(path)
        door.number("s", others[-1])
        for path in (first, *others[MAX_LOCAL_FILES:-1], first):
            assert read(path) == path.read_bytes()
            assert read(first) == first.read_bytes()


def test_door_is_looked_at_when_somebody_comes_or_goes(door: Handover, tmp_path: Path) -> None:
    """It was looked at in every turn of the server, a quarter of what a chunk cost there."""
    poller = zmq.Poller()
    door.register(poller)

    def to_look() -> bool:
        return door.to_look(dict(poller.poll(0)))

    path = tmp_path / "file"
    path.write_bytes(b"data")
    assert not to_look()
    with stranger(door) as one:
        assert to_look()
        door.look(["s"])
        assert to_look()  # it has not said yet who it is
        one.send(b"s")
        door.look(["s"])
        assert not to_look()
        assert door.number("s", path) == 0
    assert door.number("s", path) is None
    assert to_look()  # nobody else notices that it has gone
    door.look(["s"])
    assert not to_look()


def test_who_keeps_connecting_does_not_keep_the_server(door: Handover) -> None:
    """It let in whoever came until nobody did, and served nobody meanwhile."""
    assert door._listener is not None
    door._listener.listen(4 * WAITING)
    many = [stranger(door) for _ in range(2 * WAITING)]
    door.look([])
    with door._listener.accept()[0]:  # the others are still in the queue
        pass
    for one in many:
        one.close()


def test_silent_stranger_is_sent_away(door: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked in every turn of the server, for as long as it liked."""
    with stranger(door) as silent:
        door.look([])
        monkeypatch.setattr(handover, "SILENT_SECONDS", 0.0)
        with stranger(door) as late:
            door.look([])
            assert late.recv(1) == b""
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # its second is not over
            silent.recv(1)
