"""Disks: what is free, and how fast they take what is written, by a short test of real writes."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from draftfeed_deploy.doctor_finding import Finding, fail, ok, warn
from draftfeed_deploy.progress import readable_bytes

TEST_BYTES = 96 << 20
BLOCK_BYTES = 4 << 20
TEST_SECONDS = 10.0
RATIO = 1.4
"""Of the codec, at least, for states that were bf16; others shrink by 1.16."""


class Written(NamedTuple):
    bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / max(self.seconds, 1e-6)


def disk(
    check: str, directory: Path, needed_bytes: int, floor_bytes: int, *, have_bytes: int = 0
) -> Finding:
    """needed_bytes: what it may come to hold; have_bytes: of which it has already; floor_bytes:
    what is to stay free."""
    there = existing(directory)
    if (finding := _no_directory(check, there)) is not None:
        return finding
    try:
        status = os.statvfs(there)
    except OSError as error:
        return fail(check, f"{there}: {error.strerror}", f"ls -ld {there}")
    if not os.access(there, os.W_OK | os.X_OK):
        return fail(check, f"{there} cannot be written", f"ls -ld {there}; chown")
    free = status.f_bavail * status.f_frsize
    found = f"{readable_bytes(free)} free in {there}"
    wanted = max(0, needed_bytes - have_bytes) + floor_bytes
    if free <= floor_bytes:
        return fail(
            check, f"{found}, {readable_bytes(floor_bytes)} must stay free", f"df -h {there}"
        )
    if free < wanted:
        found += f", {readable_bytes(wanted)} may be wanted"
        return warn(check, found, f"df -h {there}; a larger disk, or a smaller [spool] quota_bytes")
    return ok(check, found)


def _no_directory(check: str, there: Path) -> Finding | None:
    if there.is_dir():
        return None
    return fail(check, f"{there} is a file, and no directory", f"ls -l {there}; choose another")


def write_speed(check: str, directory: Path, planned_bytes_per_second: float) -> Finding:
    """Writes, forces to disk, and leaves nothing: the file has no name."""
    there = existing(directory)
    if (finding := _no_directory(check, there)) is not None:
        return finding
    try:
        written = write_test(there)
    except OSError as error:
        return fail(check, f"{there}: {error.strerror}", f"df -h {there}; ls -ld {there}")
    speed, planned = written.bytes_per_second, planned_bytes_per_second
    found = (
        f"{readable_bytes(speed)}/s, {readable_bytes(written.bytes)} written and forced to disk; "
        f"{readable_bytes(planned)}/s are planned"
    )
    if speed < planned:
        return fail(check, found, "a faster disk for [spool] dir; --tokens-per-second if less")
    if speed < 2 * planned:  # it is read from as fast
        return warn(check, found, "a faster disk for [spool] dir: samples are read from it, too")
    return ok(check, found)


def write_test(directory: Path) -> Written:
    """At most TEST_BYTES, and none that would fill the disk. Raises OSError."""
    status = os.statvfs(directory)
    most = min(TEST_BYTES, status.f_bavail * status.f_frsize // 4)
    block = os.urandom(BLOCK_BYTES)  # some disks and file systems compress
    written, began = 0, time.monotonic()
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        while written < most and time.monotonic() - began < TEST_SECONDS:
            written += file.write(block[: most - written])
        os.fsync(file.fileno())
        return Written(written, time.monotonic() - began)


def existing(directory: Path) -> Path:
    """The directory, the one in which it would be made, or a file that is in its place."""
    absolute = directory.expanduser().absolute()
    return next(one for one in _upwards(absolute) if os.path.lexists(one))


def _upwards(path: Path) -> Iterator[Path]:
    yield path
    yield from path.parents


def bytes_in(directory: Path) -> int:
    """Of its files; 0 when there is none. A running producer's come and go."""
    total = 0
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(OSError):
                total += path.stat().st_size
    return total


def capacity_of(directory: Path) -> int | None:
    """Of its file system; None when there is none."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize
