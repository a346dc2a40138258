"""Producer and consumer on one host: samples are read out of the spool's files."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from bare_member import BareMember
from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from draftfeed_deploy.keygen import write_pair
from draftfeed_proto import messages as m
from draftfeed_proto.ids import SampleId
from draftfeed_proto.limits import MAX_LOCAL_FILES, MAX_PLACES
from harness import consuming, producing
from samples import sample
from waiting import eventually


def train(stream: HiddenStateStream, rows: int = 40) -> list[int]:
    """Every sample, compared with what was made; the ordinals in order."""
    seen: list[int] = []
    for item in stream:
        made = sample(item["id"].ordinal, rows)
        assert np.array_equal(item["input_ids"], made.input_ids)
        states = item["hidden_states"].numpy().view(np.uint16)
        assert np.array_equal(states, made.hidden_states.view(np.uint16))
        seen.append(item["id"].ordinal)
        stream.trained([item["id"]], step=len(seen))
    return seen


def test_consumer_on_the_producers_host_reads_files_without_being_told_to(tmp_path: Path) -> None:
    with (
        producing(tmp_path / "spool") as producer,
        consuming(producer.address, same_host=True) as stream,
    ):
        producer.generate(range(20))
        producer.server.finish()
        assert sorted(train(stream)) == list(range(20))
        (link,) = stream.statistics().client.producers
        assert link.same_host


def test_consumer_that_is_told_not_to_gets_its_samples_over_the_connection(tmp_path: Path) -> None:
    with (
        producing(tmp_path / "spool") as producer,
        consuming(producer.address) as stream,
    ):
        producer.generate(range(20))
        producer.server.finish()
        items = iter(stream)
        next(items)
        (link,) = stream.statistics().client.producers
        assert not link.same_host
        assert link.wire_bytes


def test_sample_of_more_chunks_than_a_message_names_is_whole(tmp_path: Path) -> None:
    with (
        producing(tmp_path / "spool", chunk_bytes=4096, codec="raw") as producer,
        consuming(producer.address, same_host=True) as stream,
    ):
        producer.generate(range(5), rows=400)
        producer.server.finish()
        chunks = producer.spool.header_of(sample(0).id).chunks  # type: ignore[union-attr]
        assert chunks > 4 * MAX_PLACES
        assert sorted(train(stream, rows=400)) == list(range(5))
        assert stream.statistics().client.producers[0].same_host


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("codec", ["auto", "packed"])
def test_byte_that_rots_in_a_file_is_refused_and_its_sample_made_again(
    tmp_path: Path, codec: str
) -> None:
    with producing(tmp_path / "spool", segment_bytes=1, codec=codec) as producer:
        producer.spool.prefer_rows(True)
        producer.generate(range(3))
        path = tmp_path / "spool" / "00000002.seg"
        flip(path, path.stat().st_size // 2)
        with consuming(producer.address, same_host=True) as stream:
            items = iter(stream)
            seen = [next(items)["id"].ordinal for _ in range(2)]
            again = producer.server.regenerate.get(timeout=20)
            producer.generate(id.ordinal for id in again)
            seen.append(next(items)["id"].ordinal)
            assert stream.statistics().client.producers[0].same_host
    assert sorted(seen) == [0, 1, 2]
    assert [id.ordinal for id in again] == [1]


def test_file_cut_short_under_a_reader_is_a_damaged_sample_and_no_crash(tmp_path: Path) -> None:
    with producing(tmp_path / "spool", segment_bytes=1) as producer:
        producer.generate(range(3))
        os.truncate(tmp_path / "spool" / "00000001.seg", 2000)
        with consuming(producer.address, same_host=True) as stream:
            items = iter(stream)
            seen = [next(items)["id"].ordinal for _ in range(2)]
            again = producer.server.regenerate.get(timeout=20)
            producer.generate(id.ordinal for id in again)
            seen.append(next(items)["id"].ordinal)
    assert sorted(seen) == [0, 1, 2]


def test_more_segments_than_files_are_held_open(tmp_path: Path) -> None:
    """Each sample in a file of its own: neither side keeps more of them than the protocol says."""
    samples = 3 * MAX_LOCAL_FILES
    with producing(tmp_path / "spool", segment_bytes=1) as producer:
        producer.generate(range(samples))
        producer.server.finish()
        with consuming(producer.address, same_host=True) as stream:
            before = len(os.listdir("/proc/self/fd"))
            assert sorted(train(stream)) == list(range(samples))
            assert stream.statistics().client.producers[0].same_host
            assert len(os.listdir("/proc/self/fd")) <= before + MAX_LOCAL_FILES + 4


def test_freed_segment_takes_no_disk_though_a_member_has_it_open(tmp_path: Path) -> None:
    """A consumer that has nothing to do closed nothing, and the disk stayed full. (The quota leaves
    no room for a spare.)"""
    with (
        producing(
            tmp_path / "spool", segment_bytes=1, keep_checkpoints=1, quota_bytes=1
        ) as producer,
        consuming(producer.address, same_host=True) as stream,
    ):
        producer.generate(range(8))
        items = iter(stream)
        for step in range(1, 9):
            stream.trained([next(items)["id"]], step)
        inodes = {path.stat().st_ino for path in (tmp_path / "spool").glob("*.seg")}
        stream.committed(stream.state_dict())
        assert stream.wait_committed(10)
        eventually(lambda: not list((tmp_path / "spool").glob("0000000[1-7].seg")), "freed")
        held = [one for one in open_files() if one.st_ino in inodes and not one.st_nlink]
        assert held
        assert sum(one.st_blocks for one in held) == 0


def open_files() -> list[os.stat_result]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.fstat(int(name)))
    return found


def test_keys_are_no_hindrance(tmp_path: Path) -> None:
    """The name of the socket is told over the encrypted connection, to who was let in."""
    write_pair(tmp_path / "producer")
    write_pair(tmp_path / "consumer")
    keys = {"key": tmp_path / "producer.secret", "clients": [tmp_path / "consumer.pub"]}
    with producing(tmp_path / "spool", **keys) as producer:
        producer.generate(range(5))
        producer.server.finish()
        client = ClientConfig(
            addresses=(producer.address,),
            key=tmp_path / "consumer.secret",
            server_key=tmp_path / "producer.pub",
        )
        stream = HiddenStateStream(StreamConfig(producer=client))
        with closing(stream):
            assert sorted(train(stream)) == list(range(5))
            assert stream.statistics().client.producers[0].same_host


def test_stranger_who_knows_the_sockets_name_is_handed_nothing(tmp_path: Path) -> None:
    """Any user can read the name in /proc/net/unix."""
    with (
        producing(tmp_path / "spool") as producer,
        consuming(producer.address, same_host=True) as stream,
    ):
        producer.generate(range(3))
        producer.server.finish()
        items = iter(stream)
        next(items)
        name = producer.server._handover.name
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(20)
            stranger.connect(f"\0{name}")
            stranger.send(b"00ff00ff00ff00ff")
            assert stranger.recv(100) == b""
        silent = [patiently_connected(name) for _ in range(40)]
        assert len({item["id"] for item in items}) == 2  # nor do these keep anybody from the rest
        for one in silent:
            one.close()


def patiently_connected(name: str) -> socket.socket:
    """Who says nothing. With a timeout a full queue is an error at once, without one it waits."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(f"\0{name}")
    return link


class HelplessMember(BareMember):
    """It is let in, and can read no file."""

    def __init__(self, address: str, term: int) -> None:
        super().__init__(address, term)
        self.told = set[SampleId]()
        """Where these lie."""
        self._link = patiently_connected(self.granted.local)
        self._link.send(self.granted.session.encode())

    def _take(self, message: m.FromProducer) -> None:
        if isinstance(message, m.ChunksAt):
            self.told.add(message.id)
            if message.index == 0:
                self.say(m.Nack, id=message.id, reason="out of reach")
        super()._take(message)

    def close(self) -> None:
        self._link.close()
        super().close()


def test_sample_is_not_given_up_for_members_that_cannot_read_its_file(tmp_path: Path) -> None:
    """Five starts of a trainer without descriptors made healthy samples `quarantined`."""
    with producing(tmp_path / "spool") as producer:
        producer.generate(range(3))
        ids = {sample(ordinal).id for ordinal in range(3)}
        for term in range(1, 8):
            with closing(HelplessMember(producer.address, term)) as member:
                session = member.granted.session
                eventually(lambda name=session: name in producer.server._handover, "let in")
                member.open()
                assert set(member.receive(3)) == ids
                assert member.told == ids
        assert not producer.spool.tombstones


@contextmanager
def no_files() -> Iterator[None]:
    """This process can open none. The limit is of their numbers: none below it may be free."""
    while (number := os.open(os.devnull, os.O_RDONLY)) < 3:
        pass
    os.close(number)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_host_that_can_open_no_more_files_goes_on_over_the_connection(tmp_path: Path) -> None:
    """And out of files as soon as it can: that was taken for the member's own trouble."""
    one_at_a_time = BufferConfig(capacity_bytes=20_000, window_samples=1)
    with (
        producing(tmp_path / "spool", segment_bytes=1) as producer,
        consuming(producer.address, buffer=one_at_a_time, same_host=True) as stream,
    ):
        eventually(lambda: producer.server.statistics().same_host != (), "let in")
        producer.generate(range(6))
        producer.server.finish()
        items = iter(stream)
        seen = [next(items)["id"]]
        with no_files():
            for _ in range(2):
                stream.release(seen)
                seen.append(next(items)["id"])
        stream.release(seen)
        for item in items:
            seen.append(item["id"])
            stream.release([item["id"]])
        assert stream.statistics().client.producers[0].same_host
    assert sorted(id.ordinal for id in seen) == list(range(6))


def test_host_that_can_open_no_more_files_waits_for_its_producer(tmp_path: Path) -> None:
    """A producer's restart ended the trainer, whose link took descriptors that the spool's files
    had used up: "the client stopped: Too many open files"."""
    with producing(tmp_path / "spool", segment_bytes=1) as producer:
        producer.generate(range(6))
        with consuming(producer.address, same_host=True) as stream:
            items = iter(stream)
            seen = [next(items)["id"].ordinal]
            producer.close()
            (line,) = stream._client._lines.values()
            eventually(lambda: line.link is None, "the link is down")
            with no_files():
                eventually(lambda: "many open files" in line.reason, "it is tried")
            producer.restart()
            producer.server.finish()
            seen += [item["id"].ordinal for item in items]
    assert sorted(seen) == list(range(6))
