"""Ports that are to be listened at and who has them, addresses that are to be reached."""

import contextlib
import errno
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from draftfeed_deploy.doctor_finding import Finding, fail, ok, warn

SECONDS = 5.0
"""For a name to be resolved, and for a connection."""
_TCP = re.compile(r"tcp://(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:]+)):(?P<port>\d+|\*)")
_LISTEN = "0A"
SHOWN_WORDS = 4
"""Of a command line."""


class Address(NamedTuple):
    host: str
    port: int | None
    """None: the system chooses."""


def parsed(address: str) -> Address | None:
    """Of ZeroMQ's form; None for what is not TCP."""
    found = _TCP.fullmatch(address)
    if found is None:
        return None
    port = None if found["port"] == "*" else int(found["port"])
    return Address(found["six"] or found["host"], port)


def can_listen(check: str, address: Address, fix: str) -> Finding:
    """fix: which key to change."""
    where = f"{address.host}:{address.port}"
    if not address.port:
        return ok(check, f"{address.host}: a port of the system's choice")
    if address.host in (name for _, name in socket.if_nameindex()):
        return ok(check, f"{where}: an interface, whose addresses are not tried")
    resolved = _resolved("0.0.0.0" if address.host == "*" else address.host, address.port)
    if not resolved:
        return fail(check, f"{where}: {address.host} is no name here", f"getent hosts; set {fix}")
    family, target = resolved[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
            probe.listen()
        except OSError as error:
            return _cannot_listen(check, address, error, fix)
    return ok(check, f"{where} is free")


def _cannot_listen(check: str, address: Address, error: OSError, fix: str) -> Finding:
    where = f"{address.host}:{address.port}"
    if error.errno == errno.EADDRINUSE:
        assert address.port is not None
        holder = holder_of(address.port)
        found = f"{where} is taken by {holder}"
        if holder.ours:
            return warn(check, found, f"nothing, if that is this very service; else change {fix}")
        return fail(check, found, f"end that one, or change {fix}")
    if error.errno == errno.EADDRNOTAVAIL:
        return fail(check, f"{where}: not an address of this machine", f"ip addr; change {fix}")
    return fail(check, f"{where}: {(error.strerror or '').lower()}", f"change {fix}")


def can_reach(address: str) -> Finding:
    """Whether a name means something from here, and somebody answers there."""
    there = parsed(address)
    if there is None or there.port is None:
        return ok(address, "not TCP: not tried")
    resolved = _resolved(there.host, there.port)
    if not resolved:
        return fail(
            address,
            f"{there.host} cannot be resolved here; names of containers mean something only inside "
            "of their network",
            f"getent hosts {there.host}; use the address of the producer's machine",
        )
    family, target = resolved[0]
    numbers = "" if target[0] == there.host else f"{target[0]}: "
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(SECONDS)
        try:
            probe.connect(target)
        except TimeoutError:
            fix = f"ping {target[0]}; a firewall, or an address from inside of a container"
            return fail(address, f"{numbers}no answer in {SECONDS:g} s", fix)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            fix = "start the producer; on its machine: ss -ltn, and [server] bind"
            return warn(address, f"{numbers}{reason}", fix)
    return ok(address, f"{numbers}answers")


Resolved = list[tuple[socket.AddressFamily, tuple[str, int]]]


def _resolved(host: str, port: int) -> Resolved:
    """Nothing, too, when it takes too long."""
    found: Resolved = []

    def look() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found.append((family, (str(target[0]), int(target[1]))))

    in_time(look)
    return found


def in_time(action: Callable[[], None]) -> None:
    """As long as it takes, or until SECONDS are over."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(SECONDS)


class Holder(NamedTuple):
    """Of a port, as far as this user may know."""

    command: tuple[str, ...] = ()
    pid: int = 0

    @property
    def ours(self) -> bool:
        """A service of draftfeed's."""
        return any(
            Path(word).name == "draftfeed" or word == "draftfeed_deploy.cli"
            for word in self.command
        )

    def __str__(self) -> str:
        if not self.pid:
            return "a process of somebody else"
        return f"{' '.join(self.command[:SHOWN_WORDS])} (pid {self.pid})"


def holder_of(port: int) -> Holder:
    """Who listens at a TCP port."""
    inodes = set(_listening(port))
    for process in Path("/proc").glob("[0-9]*"):
        if inodes & set(_sockets_of(process)):
            return Holder(_command(process), int(process.name))
    return Holder()


def _listening(port: int) -> Iterator[str]:
    """Inodes of sockets."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (Path("/proc/net") / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _sockets_of(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):
                    yield found[1]


def _command(process: Path) -> tuple[str, ...]:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ("a process that has just ended",)
    return tuple(word.decode(errors="replace") for word in words if word)
