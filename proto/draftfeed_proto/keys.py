"""CURVE keys in files, and which addresses need them.

A key file is what ZeroMQ's own tools write, so that they can be used as well:

    curve
        public-key = "<40 characters of Z85>"
        secret-key = "<40 characters of Z85>"        in secret files only

http://rfc.zeromq.org/spec:26 describes CurveZMQ, http://rfc.zeromq.org/spec:32 Z85.
"""

import ipaddress
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from draftfeed_proto.errors import KeyFileError

KEY_CHARACTERS = 40
MAX_FILE_BYTES = 1 << 16
_LINE = r'^\s*{name}-key\s*=\s*"(.*)"\s*$'
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_PORT = re.compile(r"tcp://.*:([^:\]]*)$")
MAX_PORT = 65535
_HOST = re.compile(r"tcp://(?:\[(?P<six>[^\]]*)\]|(?P<name>[^:]*))(?::|$)")


class KeyPair(NamedTuple):
    """Z85 text, as ZeroMQ takes it."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        """Without the secret: pairs end up in tracebacks."""
        return f"KeyPair({self.public.decode()})"


def read_public(path: Path) -> bytes:
    """Raises KeyFileError, also for a secret file: it should not be here."""
    data, _ = _opened(path)
    if b"secret-key" in data:
        reason = "it holds a secret, which stays where it was made: take the *.pub file"
        raise KeyFileError(path, reason)
    return _key(path, data, "public")


def read_secret(path: Path, public_of: Callable[[bytes], bytes]) -> KeyPair:
    """public_of: ZeroMQ's, from a secret key. Raises KeyFileError, also when others may read the
    file, and when its two keys are not a pair."""
    data, mode = _opened(path)
    if mode & 0o077 and not _given_by_systemd(path):
        reason = f"others may read it (mode {mode & 0o777:04o}): chmod 600"
        raise KeyFileError(path, reason)
    found = KeyPair(_key(path, data, "public"), _key(path, data, "secret"))
    if public_of(found.secret) != found.public:
        raise KeyFileError(path, "its public-key is not that of its secret-key")
    return found


def file_text(keys: KeyPair, *, secret: bool) -> str:
    lines = ["curve", f'    public-key = "{keys.public.decode()}"']
    if secret:
        lines.append(f'    secret-key = "{keys.secret.decode()}"')
    return "\n".join(lines) + "\n"


def _opened(path: Path) -> tuple[bytes, int]:
    """(contents, mode)"""
    try:
        # Without waiting: a FIFO of that name would hold the reload up for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise KeyFileError(path, "it is no regular file")
            return file.read(MAX_FILE_BYTES), mode
    except OSError as error:
        raise KeyFileError(path, f"cannot be read: {error.strerror}") from None


def _given_by_systemd(path: Path) -> bool:
    """It guards what it hands to a service, and shows an access list's mask as permissions of the
    group."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return directory is not None and path.resolve().is_relative_to(Path(directory).resolve())


def _key(path: Path, data: bytes, name: str) -> bytes:
    text = data.decode("utf-8", "replace")
    found = re.search(_LINE.format(name=name), text, re.MULTILINE)
    if found is None:
        hint = "; it is the public one" if name == "secret" and "public-key" in text else ""
        raise KeyFileError(path, f"it has no {name}-key{hint}")
    if not _Z85.fullmatch(found[1]):
        raise KeyFileError(path, f"its {name}-key is not {KEY_CHARACTERS} characters of Z85")
    return found[1].encode()


def check_port(address: str) -> None:
    """Raises ValueError for what is no port: ZeroMQ would take it for another one."""
    found = _PORT.match(address)
    if found is None or found[1] == "*":
        return
    if not re.fullmatch(r"[0-9]{1,5}", found[1]) or int(found[1]) > MAX_PORT:
        raise ValueError(f"{address}: {found[1]!r} is no port; they are 1 to {MAX_PORT}")


def is_ipv6(address: str) -> bool:
    """Whether a socket has to be told so before it may use it."""
    return address.startswith("tcp://[")


def local(address: str) -> bool:
    """Whether nobody on another machine can be at the other end of a ZeroMQ address.

    A name counts as local only if it is "localhost": another one may mean anything tomorrow.
    """
    if address.startswith(("ipc://", "inproc://")) or "://" not in address:  # which ZeroMQ refuses
        return True
    found = _HOST.match(address)
    if found is None or ";" in address:  # "source;destination"
        return False
    host = found["six"] or found["name"]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
