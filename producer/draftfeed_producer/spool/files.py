"""What the spool asks of the file system beyond reading and writing."""

import ctypes
import os
from pathlib import Path

_KEEP_SIZE = 0x01
_libc = ctypes.CDLL(None, use_errno=True)


def sync_directory(path: Path) -> None:
    """Make names created, renamed or unlinked in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """With its parents, durably. Raises OSError."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)  # what is in it is what people wrote
    sync_directory(path.parent)


def preallocate(fd: int, size_bytes: int) -> None:
    """Ask for blocks up to `size_bytes` while the file's size stays what it is.

    It spares the file system an allocation at every append; where it cannot be done (the disk is
    nearly full, the file system or libc does not know how) nothing depends on it.
    """
    fallocate = getattr(_libc, "fallocate", None)
    if fallocate is None:
        return
    refused = fallocate(fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes))
    if refused:  # some file systems keep what they got before the disk was full
        os.ftruncate(fd, os.fstat(fd).st_size)


def same_drive(one: Path, other: Path) -> bool:
    """Whether what is written to one leaves less for the other. Raises OSError."""
    return one.stat().st_dev == other.stat().st_dev


def free_bytes(directory: Path) -> int:
    """What an unprivileged process may still write to the file system of a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
