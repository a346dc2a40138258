"""The keys with which a consumer connects: its own, and the producers'."""

from pathlib import Path
from typing import NamedTuple

import zmq

from draftfeed_proto import keys
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
    return Credentials(keys.read_secret(key, zmq.curve_public), keys.read_public(server_key))
