"""`draftfeed install-units`: the systemd units, and examples of what they read."""

import argparse
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from importlib.resources import files as package_files
from itertools import chain, count
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from rich.console import Console

from draftfeed_deploy import exits
from draftfeed_deploy.errors import ConfigError, OutputError

SYSTEM = Path("etc/systemd/system")
CONFIG = Path("etc/draftfeed")
RECORD = CONFIG / ".installed"
"""SHA-256 and path of every file as it was written last."""
COMMAND = "draftfeed"
PREFIX = "/opt/draftfeed/bin/"
"""Of the command, as the shipped units have it."""
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What ProtectHome= and PrivateTmp= keep from a service."""
UNFIT = set(" \t\n%$\"'\\")
"""Characters that mean something else in a unit."""
FILES = {
    "draftfeed-producer@.service": SYSTEM / "draftfeed-producer@.service",
    "draftfeed-consumer.service": SYSTEM / "draftfeed-consumer.service",
    "draftfeed-producer.target": SYSTEM / "draftfeed-producer.target",
    "draftfeed.slice": SYSTEM / "draftfeed.slice",
    "draftfeed.sysusers": Path("etc/sysusers.d/draftfeed.conf"),
    "producer.toml": CONFIG / "producer.toml",
    "producer.env": CONFIG / "producer.env",
    "consumer.toml": CONFIG / "consumer.toml",
    "consumer.env": CONFIG / "consumer.env",
}
GPU = (
    SYSTEM / "draftfeed-producer@.service.d/gpu.conf",
    SYSTEM / "draftfeed-consumer.service.d/gpu.conf",
)
DIRECTORIES = {CONFIG / "keys": 0o700, CONFIG / "clients": 0o755}
EPILOG = """\
A file that you have edited stays as it is. How that is known: etc/draftfeed/.installed has the
SHA-256 of every file as it was written last; one that differs from that, and from what would be
written now, is yours, and so is its absence when it was written once. With --force it is replaced,
and kept beside as NAME.before.

then, on an inference node:
  systemd-sysusers                                        the group draftfeed
  draftfeed keygen /etc/draftfeed/keys/producers          once for all producers of a run
  cp consumer.pub /etc/draftfeed/clients/train-a.pub      of the training node train-a: each node's
                                                          under a name of its own
  editor /etc/draftfeed/producer.toml /etc/draftfeed/producer.env
  systemctl daemon-reload
  systemctl enable --now draftfeed-producer@{0..3} draftfeed-producer.target
on a training node:
  systemd-sysusers
  draftfeed keygen /etc/draftfeed/keys/consumer           its consumer.pub goes to the producers
  cp producers.pub /etc/draftfeed/
  editor /etc/draftfeed/consumer.toml
  systemctl daemon-reload
  systemctl start draftfeed-consumer
"""


Kind: TypeAlias = Literal["write", "update", "unchanged", "keep", "gone", "replace"]


class Change(NamedTuple):
    """What is to become of one file."""

    path: Path
    """Below the root."""
    kind: Kind
    content: bytes


WORDS = {
    "write": "new",
    "update": "as it was installed, and older",
    "unchanged": "",
    "keep": "edited: left alone; --force replaces it",
    "gone": "removed: left alone; --force writes it",
    "replace": "edited: the old one is kept as NAME.before",
}


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `install-units` to the `draftfeed` command."""
    parser = commands.add_parser(
        "install-units",
        help="systemd units for producers and a consumer, with example configurations",
        description="Write the systemd units and examples of the files that they read.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--root", type=Path, default=Path("/"), metavar="DIR", help="write below DIR (default: /)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written")
    parser.add_argument("--force", action="store_true", help="replace edited files, too")
    parser.add_argument(
        "--no-gpu",
        action="store_true",
        help="leave out the drop-ins that open the sandbox for GPUs",
    )
    parser.add_argument(
        "--bin",
        type=Path,
        default=Path(sys.executable).parent,
        metavar="DIR",
        help="where services find the draftfeed command (default: where this one is)",
    )
    parser.set_defaults(command=_install)


def _install(arguments: argparse.Namespace, _: Console) -> int:
    root = arguments.root.expanduser()
    directory = str(arguments.bin.absolute())
    if UNFIT & set(directory):
        raise ConfigError("--bin", f"systemd cannot be given the path {directory!r}: choose one")
    changes = planned(root, directory, gpu=not arguments.no_gpu, force=arguments.force)
    for change in changes:
        words = f"{change.kind:<10} {root / change.path}  {WORDS[change.kind]}"
        sys.stdout.write(f"{words.rstrip()}\n")
    for warning in _warnings(root, Path(directory), gpu=not arguments.no_gpu):
        sys.stderr.write(f"draftfeed: {warning}\n")
    if not arguments.dry_run:
        install(root, changes)
    return exits.DONE


def _warnings(root: Path, directory: Path, *, gpu: bool) -> Iterator[str]:
    """What would be installed and is not as it should be."""
    seen = (directory, directory.resolve())
    if any(path.is_relative_to(hidden) for path in seen for hidden in HIDDEN):
        yield (
            f"{directory} is hidden from services (ProtectHome=, PrivateTmp=): install draftfeed "
            "elsewhere, such as /opt/draftfeed, or name it with --bin"
        )
    elif not (directory / COMMAND).exists():
        yield f"there is no {directory / COMMAND} yet, which the units start"
    for path in () if gpu else GPU:
        if (root / path).exists():
            yield f"{root / path} is there and opens the sandbox; remove it"


def planned(root: Path, directory: str, *, gpu: bool, force: bool) -> list[Change]:
    """directory: of the draftfeed command. Raises OutputError."""
    record = _record(root)
    return [
        Change(path, _kind(root / path, content, record.get(str(path)), force=force), content)
        for path, content in contents(directory, gpu=gpu).items()
    ]


def contents(directory: str, *, gpu: bool) -> dict[Path, bytes]:
    """Every file, by its path below the root."""
    shipped = package_files("draftfeed_deploy") / "units"
    found = {path: (shipped / name).read_bytes() for name, path in FILES.items()}
    if gpu:
        found |= dict.fromkeys(GPU, (shipped / "gpu.conf").read_bytes())
    place = f"{directory}/".encode()
    return {path: content.replace(PREFIX.encode(), place) for path, content in found.items()}


def _kind(path: Path, content: bytes, installed: str | None, *, force: bool) -> Kind:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return "write" if installed is None or force else "gone"
    except OSError as error:
        raise OutputError(path, error, "choose another --root") from None
    if found == content:
        return "unchanged"
    if _digest(found) == installed:
        return "update"
    return "replace" if force else "keep"


def install(root: Path, changes: list[Change]) -> None:
    """Raises OutputError; what was written until then stays and counts as installed."""
    record = _record(root)
    try:
        for directory, mode in DIRECTORIES.items():
            _make_directory(root / directory, mode)
        for change in changes:
            if change.kind in ("keep", "gone"):
                continue
            path = root / change.path
            mode = _mode_of(path)
            if change.kind == "replace":
                _keep(path)
            if change.kind != "unchanged":
                _write(path, change.content, mode)
            record[str(change.path)] = _digest(change.content)
            lines = [f"{digest}  {name}\n" for name, digest in sorted(record.items())]
            _write(root / RECORD, "".join(lines).encode())
    except OSError as error:
        where = Path(error.filename or root)
        raise OutputError(where, error, "run it as root, or choose another --root") from None


def _mode_of(path: Path) -> int:
    """To keep: never one that lets others write. That of a link, to /dev/null of a masked unit, is
    another file's."""
    if not os.path.lexists(path) or not stat.S_ISREG(path.lstat().st_mode):
        return 0o644
    return path.lstat().st_mode & 0o755


def _keep(path: Path) -> None:
    """Under another name beside its own, which is never without a file."""
    before = _free_name(path)
    try:
        os.link(path, before, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(path, before, follow_symlinks=False)


def _free_name(path: Path) -> Path:
    """NAME.before, or the first of NAME.before.2 and so on that nothing has."""
    before = path.with_name(f"{path.name}.before")
    names = chain([before], (before.with_name(f"{before.name}.{n}") for n in count(2)))
    return next(name for name in names if not os.path.lexists(name))


def _make_directory(path: Path, mode: int = 0o755) -> None:
    """With that mode if it is new, whatever the umask is: services have to look into it."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir()
    path.chmod(mode)


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Whole or not at all."""
    _make_directory(path.parent)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    part.replace(path)


def _record(root: Path) -> dict[str, str]:
    """Digest by path below the root; what cannot be read counts as not installed by us."""
    try:
        text = (root / RECORD).read_text()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise OutputError(root / RECORD, OSError(0, "it is not text"), "remove it") from None
        raise OutputError(root / RECORD, error, "choose another --root") from None
    pairs = (line.split("  ", 1) for line in text.splitlines() if "  " in line)
    return {name: digest for digest, name in pairs}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
