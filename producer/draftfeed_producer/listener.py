"""The socket that consumers connect to, and its configuration."""

import errno
from pathlib import Path

import msgspec
import zmq

from draftfeed_producer.access import Access
from draftfeed_producer.errors import BindError
from draftfeed_producer.handover import Handover
from draftfeed_proto.errors import KeyFileError
from draftfeed_proto.keys import check_port, is_ipv6, local
from draftfeed_proto.limits import MAX_MESSAGE_BYTES

HIGH_WATER_MESSAGES = 8
"""Only a backstop: it counts messages, not bytes. Credits bound the bytes."""
HIGH_WATER_REQUESTS = 10_000
"""More than a member says while we are frozen, or it might end us: see `Listener`. That is a few
messages for each sample it has."""
UNREAD_MS = 60_000
"""Who reads nothing for so long is cut off: what lies here for him is memory."""
LINGER_MS = 2_000
KEEPALIVE_SECONDS = 10
KEEPALIVE_PROBES = 3


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bind: str = "tcp://127.0.0.1:5550"
    """ZeroMQ address the consumer connects to."""
    session_timeout_seconds: float = 10.0
    """A group that was cut off may come back for this long before another process gets the stream
    without --takeover. One that said goodbye leaves it free at once."""
    quarantine_after_terms: int = 3
    """A sample that the trainer was at work on when it died, this many times in a row, is given
    to nobody any more."""
    same_host: bool = True
    """Consumers on this host read samples out of the spool's files, and not from a connection."""
    key: Path | None = None
    """Secret key file of this producer: the stream is encrypted, and only `clients` get it."""
    clients: tuple[Path, ...] = ()
    """Public key files of consumers, or directories of them."""
    insecure: bool = False
    """Listen where other machines can reach us, without keys."""

    def __post_init__(self) -> None:
        if self.session_timeout_seconds < 0:
            found = self.session_timeout_seconds
            raise ValueError(f"session_timeout_seconds is {found}, it must not be negative")
        if self.quarantine_after_terms < 1:
            raise ValueError(
                f"quarantine_after_terms is {self.quarantine_after_terms}, it must be at least 1"
            )
        check_port(self.bind)
        self._check_access()

    def _check_access(self) -> None:
        if self.key is not None and not self.clients:
            raise ValueError("clients is empty: nobody could attach; name their public key files")
        if self.clients and self.key is None:
            raise ValueError("clients are given, and no key: make one with `draftfeed keygen`")
        if self.key is None and not self.insecure and not local(self.bind):
            raise ValueError(
                f"bind is {self.bind}, where other machines can read the stream and take it over; "
                "set key and clients (`draftfeed keygen` makes them), or insecure = true"
            )


class Listener:
    """The bound socket, made before anything slow so that a taken port is known at once."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises BindError, KeyFileError."""
        self.context = zmq.Context()
        self.access = self._access(config)
        self.socket = self.context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, HIGH_WATER_MESSAGES),
            (zmq.RCVHWM, HIGH_WATER_REQUESTS),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            # No heartbeats of ours: libzmq 4.3.5 aborts the process when one is due on a link that
            # was cut while more than RCVHWM messages of it were unread. It does so, too, when one
            # of theirs lies behind those. Members send them all the same: they are how we learn
            # that one is frozen. For others there is TCP's.
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS),
            (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS),
            (zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES),
            (zmq.TCP_MAXRT, UNREAD_MS),
            (zmq.LINGER, LINGER_MS),
            (zmq.IPV6, is_ipv6(config.bind)),
        ):
            self.socket.setsockopt(option, value)
        if self.access is not None:
            self.access.secure(self.socket)
        try:
            self.socket.bind(config.bind)
        except zmq.ZMQError as error:
            self._close_sockets()
            absent = error.errno == errno.EADDRNOTAVAIL
            raise BindError(config.bind, str(error).lower(), absent=absent) from error
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.handover = Handover(on=config.same_host)

    def close(self) -> None:
        self.handover.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self.socket.close()
        if self.access is not None:
            self.access.close()
        self.context.term()

    def _access(self, config: ServerConfig) -> Access | None:
        if config.key is None:
            return None
        try:
            return Access(self.context, config.key, config.clients)
        except KeyFileError:
            self.context.term()
            raise
