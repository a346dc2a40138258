"""The keys with which a consumer connects: its own, and the producers'."""

import os
from pathlib import Path
from typing import NamedTuple

import zmq

from draftfeed_consumer.errors import KeyFileError
from draftfeed_proto import keys
from draftfeed_proto.errors import BadKey
from draftfeed_proto.keys import KeyPair


class Credentials(NamedTuple):
    own: KeyPair
    server: bytes
    """The producers' public key, as Z85."""

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)


def read(key: Path, server_key: Path) -> Credentials:
    """key: a secret file; server_key: the producers' public one. Raises KeyFileError, also when
    others may read the secret."""
    own, mode = _opened(key)
    if not _given_by_systemd(key) and (fault := keys.secret_mode_fault(mode)):
        raise KeyFileError(key, fault)
    try:
        pair = keys.key_pair(own)
    except BadKey as error:
        raise KeyFileError(key, str(error)) from None
    try:
        return Credentials(pair, keys.public_key(_opened(server_key)[0]))
    except BadKey as error:
        raise KeyFileError(server_key, str(error)) from None


def _opened(path: Path) -> tuple[bytes, int]:
    """(contents, mode)"""
    try:
        with path.open("rb") as file:
            return file.read(keys.MAX_FILE_BYTES), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise KeyFileError(path, f"cannot be read: {error.strerror}") from None


def _given_by_systemd(path: Path) -> bool:
    """It guards what it hands to a service, and shows an access list's mask as permissions of the
    group."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return directory is not None and path.resolve().is_relative_to(Path(directory).resolve())
