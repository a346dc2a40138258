"""Files that a producer on the same host hands over, through a real socket."""

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftfeed_consumer import local
from draftfeed_consumer.local import FrameAt, HandoverLost, LocalFiles
from draftfeed_proto import messages as m
from draftfeed_proto.errors import MalformedChunk
from draftfeed_proto.ids import SampleId, Shards
from draftfeed_proto.limits import MAX_LOCAL_FILES
from samples import DATASET, DESCRIPTOR

ID = SampleId(DATASET, 0, 0, 0)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, LocalFiles]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    far.setblocking(False)
    files = LocalFiles(far)
    yield near, files
    files.close()
    near.close()


def at(files: LocalFiles, file: int, offset: int = 0, size: int = 4) -> FrameAt:
    places = ((offset, size),)
    message = m.ChunksAt(term=1, session="s", id=ID, index=0, file=file, places=places)
    (frame,) = files.at(message)
    return frame


def hand_over(near: socket.socket, number: int, path: Path | str) -> None:
    fd = os.open(path, os.O_RDONLY)
    socket.send_fds(near, [number.to_bytes(8, "little")], [fd])
    os.close(fd)


def content(frame: FrameAt) -> bytes:
    buffer = bytearray(len(frame))
    frame.read(0, memoryview(buffer))
    return bytes(buffer)


Ends = tuple[socket.socket, LocalFiles]


def test_each_frame_is_read_from_its_own_file(ends: Ends, tmp_path: Path) -> None:
    near, files = ends
    for number in range(3):
        (tmp_path / str(number)).write_bytes(b"....%04d...." % number)
        hand_over(near, number, tmp_path / str(number))
    assert [content(at(files, number, 4)) for number in (2, 0, 1)] == [b"0002", b"0000", b"0001"]


def test_programs_that_a_trainer_starts_do_not_get_the_files(ends: Ends, tmp_path: Path) -> None:
    """They kept segments and drives busy, and could read the prompts."""
    near, files = ends
    (tmp_path / "file").write_bytes(b"here")
    hand_over(near, 0, tmp_path / "file")
    assert not os.get_inheritable(at(files, 0)._file.fd)


def test_frame_that_is_being_read_outlives_its_file_in_the_session(
    ends: Ends, tmp_path: Path
) -> None:
    near, files = ends
    (tmp_path / "file").write_bytes(b"here")
    hand_over(near, 0, tmp_path / "file")
    first = at(files, 0)
    for number in range(1, MAX_LOCAL_FILES + 1):
        hand_over(near, number, tmp_path / "file")
        at(files, number)
    assert content(first) == b"here"
    with pytest.raises(HandoverLost):  # and was closed here all the same
        at(files, 0)
    files.close()
    assert content(first) == b"here"


def test_frame_beyond_the_end_of_its_file_is_damaged(ends: Ends, tmp_path: Path) -> None:
    near, files = ends
    (tmp_path / "file").write_bytes(b"short")
    hand_over(near, 0, tmp_path / "file")
    with pytest.raises(MalformedChunk, match="ends at byte 5"):
        content(at(files, 0, offset=3))


def test_file_that_was_never_handed_over_ends_the_handover(ends: Ends) -> None:
    with pytest.raises(HandoverLost, match="no file came"):
        at(ends[1], 0)


def test_files_that_nobody_names_are_not_kept(ends: Ends, tmp_path: Path) -> None:
    """They used up the descriptors of the trainer; the limit held only when one was named."""
    near, files = ends
    (tmp_path / "file").write_bytes(b"here")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(2 * MAX_LOCAL_FILES):
        hand_over(near, number, tmp_path / "file")
    with pytest.raises(HandoverLost, match="no file came"):
        at(files, 1 << 62)
    assert len(os.listdir("/proc/self/fd")) <= before + MAX_LOCAL_FILES


def test_files_without_end_do_not_keep_the_client(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who hands over faster than they are taken would have it for ever."""
    monkeypatch.setattr(local, "MAX_AT_ONCE", 3)
    near, files = ends
    (tmp_path / "file").write_bytes(b"here")
    for _ in range(4):
        hand_over(near, 0, tmp_path / "file")
    with pytest.raises(HandoverLost, match="without end"):
        at(files, 1)


@pytest.mark.parametrize("what", ["/dev/zero", "/", "pipe"])
def test_what_is_no_file_is_not_read(ends: Ends, tmp_path: Path, what: str) -> None:
    """A pipe would keep whoever reads it waiting."""
    near, files = ends
    if what == "pipe":
        read, write = os.pipe()
        socket.send_fds(near, [bytes(8)], [read])
        os.close(read)
        os.close(write)
    else:
        hand_over(near, 0, what)
    with pytest.raises(HandoverLost, match="no file"):
        at(files, 0)


def test_limit_of_open_files_ends_the_handover_and_says_so(ends: Ends, tmp_path: Path) -> None:
    near, files = ends
    (tmp_path / "file").write_bytes(b"here")
    hand_over(near, 0, tmp_path / "file")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(HandoverLost, match="limit of open files"):
            at(files, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def granted(local: str) -> m.Granted:
    return m.Granted(
        term=1,
        session="s",
        descriptor=DESCRIPTOR,
        stream_id=DESCRIPTOR.stream_id(),
        shards=Shards(DATASET, 0, (0, 1)),
        local=local,
        committed=[],
        commit_number=0,
    )


@pytest.mark.parametrize("local", ["", "draftfeed-nobody-listens-here", "x" * 1000, "a\0b", "é"])
def test_name_that_nobody_has_here_means_the_connection(
    local: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says so, of a producer that hands files over."""
    with caplog.at_level("INFO"):
        assert LocalFiles.of(granted(local)) is None
    assert ("samples are sent" in caplog.text) == bool(local)
