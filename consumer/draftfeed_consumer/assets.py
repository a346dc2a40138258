"""The target's files on a training node: which are taken, where they lie, when they are whole.

CACHE/IDENTITY/                 one target; usable when it has its manifest
CACHE/IDENTITY/NAME.part        what has come of a file
CACHE/.IDENTITY.lock            flock(2): one process on this node fetches, the others wait
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from draftfeed_consumer.errors import AssetError, StreamClosed
from draftfeed_proto.assets import TARGET_MANIFEST, identity, is_digest, is_plain_name
from draftfeed_proto.limits import MAX_ASSET_FILES
from draftfeed_proto.messages import AssetFile

_READ_AT_ONCE = 8 << 20
_LOCK_POLL_SECONDS = 0.2

Stopped = Callable[[], bool]


class AssetsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fetch: bool = True
    """Without a `target` its embedding, head, config and tokenizer come from the producers."""
    cache_dir: Path | None = None
    """Where they are kept. None: draftfeed/targets in $XDG_CACHE_HOME, or in ~/.cache."""
    max_bytes: int = 16 << 30
    """A target that is larger is refused."""
    stall_seconds: float = 30.0
    """A producer that sends nothing for so long is asked anew, or another one."""

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes is {self.max_bytes}, it must be at least 1")
        if not self.stall_seconds > 0:
            raise ValueError(f"stall_seconds is {self.stall_seconds}, it must be above 0")

    @property
    def root(self) -> Path:
        if self.cache_dir is not None:
            return self.cache_dir
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "draftfeed" / "targets"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    identity: str
    files: list[AssetFile]


def check_files(address: str, files: Sequence[AssetFile], max_bytes: int) -> None:
    """Whether what a producer lists may be written to the disk here. Raises AssetError."""
    fault = next(_faults(files, max_bytes), None)
    if fault is not None:
        raise AssetError(f"{address} lists files of its target that are not taken: {fault}")


def _faults(files: Sequence[AssetFile], max_bytes: int) -> Iterator[str]:
    if len(files) > MAX_ASSET_FILES:
        yield f"{len(files)} of them, at most {MAX_ASSET_FILES} are"
    seen = {TARGET_MANIFEST}
    for file in files:
        if not is_plain_name(file.name):
            yield f"{file.name[:100]!r} is not the plain name of a data file"
        if file.name.lower() in seen:
            yield f"{file.name!r} twice, or a name of ours"
        if not is_digest(file.digest):
            yield f"the digest of {file.name} is not 64 hex digits"
        seen.add(file.name.lower())
    total = sum(file.bytes for file in files)
    if total > max_bytes:
        yield f"{total} bytes, and [trainer.assets] max_bytes is {max_bytes}"
    if "config.json" not in seen:
        yield "there is no config.json"


def is_partial(target: Path) -> bool:
    """Whether a model directory has come from a producer: without the target's blocks."""
    return (target / TARGET_MANIFEST).is_file()


class TargetDirectory:
    """One target in the cache. Who changes it holds the `lock`."""

    def __init__(self, root: Path, files: Sequence[AssetFile]) -> None:
        self.files = tuple(files)
        self.identity = identity(files)
        self.path = root / self.identity
        self._lock_path = root / f".{self.identity}.lock"

    @property
    def complete(self) -> bool:
        """It has its manifest, and every file has its length: they were verified before."""
        try:
            manifest = msgspec.json.decode(
                (self.path / TARGET_MANIFEST).read_bytes(), type=Manifest
            )
        except (OSError, msgspec.DecodeError):
            return False
        return identity(manifest.files) == self.identity and not self.missing()

    def missing(self) -> list[AssetFile]:
        return [file for file in self.files if _size(self.path / file.name) != file.bytes]

    def missing_bytes(self) -> int:
        """What is still to come."""
        there = (_size(self.part_path(file)) or 0 for file in self.missing())
        total = sum(file.bytes for file in self.missing())
        return max(0, total - sum(there))

    def part_path(self, file: AssetFile) -> Path:
        return self.path / f"{file.name}.part"

    @contextmanager
    def lock(self, stopped: Stopped, waiting: Callable[[], None]) -> Iterator[None]:
        """waiting: called again and again while another process has it. Raises AssetError, and
        StreamClosed when stopped."""
        with _ours(self._lock_path.parent):
            self.path.mkdir(parents=True, exist_ok=True)
            file = self._lock_path.open("a+b", buffering=0)
        with file:
            while not self._try(file):
                if stopped():
                    raise StreamClosed
                waiting()
                time.sleep(_LOCK_POLL_SECONDS)
            yield

    def _try(self, file: BinaryIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise AssetError(
                f"{self._lock_path} cannot be locked: {error.strerror}; set [trainer.assets] "
                "cache_dir to a local directory"
            ) from None
        return True

    def check_space(self) -> None:
        """Before gigabytes travel. Raises AssetError."""
        with _ours(self.path):
            free = shutil.disk_usage(self.path).free
        needed = self.missing_bytes()
        if needed > free:
            raise AssetError(
                f"{self.path} has {free} bytes free, and the target's files need {needed}; make "
                "room, or set [trainer.assets] cache_dir to another disk"
            )

    def finish(self) -> None:
        """All files are there and verified. Raises AssetError."""
        manifest = Manifest(identity=self.identity, files=list(self.files))
        data = msgspec.json.format(msgspec.json.encode(manifest))
        with _ours(self.path):
            _fsync_directory(self.path)
            part = self.path / f"{TARGET_MANIFEST}.part"
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path / TARGET_MANIFEST)
            _fsync_directory(self.path)
            _fsync_directory(self.path.parent)


class PartFile:
    """A file that is still coming; what is there of it is kept when we are killed."""

    def __init__(self, directory: TargetDirectory, file: AssetFile) -> None:
        """Raises AssetError."""
        self.file = file
        self.size = 0
        """Bytes that are written and hashed."""
        self._path, self._final = directory.part_path(file), directory.path / file.name
        with _ours(self._path):
            # Reading and writing, from the start, without cutting off what is there.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._stream = os.fdopen(descriptor, "r+b", buffering=0)
        self._digest = hashlib.sha256()

    def __enter__(self) -> "PartFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def resume(self, stopped: Stopped) -> int:
        """Hashes what is there; how much that is. Raises AssetError, and StreamClosed when
        stopped."""
        with _ours(self._path):
            if os.fstat(self._stream.fileno()).st_size > self.file.bytes:
                self._stream.truncate(0)
            while data := self._stream.read(_READ_AT_ONCE):
                if stopped():
                    raise StreamClosed
                self._digest.update(data)
                self.size += len(data)
        return self.size

    def write(self, data: memoryview | bytes) -> None:
        """Raises AssetError."""
        view = memoryview(data)
        with _ours(self._path, f"; {self.file.bytes - self.size} bytes of it are still to come"):
            at = 0
            while at < len(view):
                at += self._stream.write(view[at:]) or 0
        self._digest.update(view)
        self.size += len(view)

    def finish(self) -> bool:
        """Whether it is the file that was promised: then it has its name now, and otherwise it is
        empty again. Raises AssetError."""
        good = self._digest.hexdigest() == self.file.digest
        with _ours(self._path):
            if good:
                os.fsync(self._stream.fileno())
                self._path.replace(self._final)
            else:
                self._stream.seek(0)
                self._stream.truncate(0)
        if not good:
            self.size, self._digest = 0, hashlib.sha256()
        return good


@contextmanager
def _ours(path: Path, more: str = "") -> Iterator[None]:
    """Raises AssetError for what the disk says."""
    try:
        yield
    except OSError as error:
        raise AssetError(
            f"{path} cannot be written: {error.strerror}{more}; make room or set [trainer.assets] "
            "cache_dir to another directory"
        ) from None


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
