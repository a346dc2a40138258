"""What the file system and the link give by themselves, and sealing."""

import mmap
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from draftfeed_producer.archive.sealed import seal, verified

BLOCK_BYTES = 4 << 20
ALIGNMENT = 4096
SENDER = """
import os, socket, sys
block = os.urandom({block})
with socket.create_connection(("127.0.0.1", {port})) as link:
    left = {size}
    while left > 0:
        link.sendall(block[:left])
        left -= len(block)
"""


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def forget(paths: Iterable[Path]) -> None:
    """Out of the page cache: the next read is the drive's. No root is needed for one's own files
    (posix_fadvise(2)), once nothing of them is dirty."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def direct_possible(directory: Path) -> bool:
    """Whether the file system takes O_DIRECT; tmpfs did not for long."""
    probe = directory / "direct"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def read_all(paths: Iterable[Path], *, direct: bool) -> None:
    """As dd does: one block after the other into the same memory. direct: past the page cache."""
    block = mmap.mmap(-1, BLOCK_BYTES)
    for path in paths:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            while os.readv(fd, [block]):
                pass
        finally:
            os.close(fd)


def write_all(paths: Iterable[Path], directory: Path, *, direct: bool) -> None:
    """Copies of what is in memory already, each on the drive when it returns. What does not fill a
    block of the drive's is left out where the page cache is."""
    directory.mkdir()
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            _write(content, directory / path.name, direct=direct)
    shutil.rmtree(directory)


def _write(content: mmap.mmap, path: Path, *, direct: bool) -> None:
    block = mmap.mmap(-1, BLOCK_BYTES)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    try:
        for start in range(0, len(content), BLOCK_BYTES):
            part = memoryview(content)[start : start + BLOCK_BYTES]
            size = len(part) - len(part) % ALIGNMENT if direct else len(part)
            block[:size] = part[:size]
            part.release()
            with memoryview(block) as view, view[:size] as out:
                os.write(fd, out)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def seal_all(segments: Iterable[Path], root: Path, stream_id: str, *, link: bool) -> None:
    """As the archiver does: every record verified, durable, indexed."""
    root.mkdir()
    for segment in segments:
        records = verified(segment, lambda _: True, bool)
        seal(segment, root, stream_id, records, bool, link=link)
    shutil.rmtree(root)


def through_loopback(size_bytes: int) -> float:
    """Seconds that so many bytes take from another process through one TCP connection."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        port = listener.getsockname()[1]
        text = SENDER.format(block=BLOCK_BYTES, port=port, size=size_bytes)
        sender = subprocess.Popen([sys.executable, "-c", text])
        try:
            link, _ = listener.accept()
            with link:
                began = time.perf_counter()
                while link.recv_into(buffer):
                    pass
                return time.perf_counter() - began
        finally:
            sender.kill()
            sender.wait()
