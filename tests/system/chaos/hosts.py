"""Three hosts on a bridge. Everything here dies with the process, however it ends.

The whole harness runs in namespaces of its own (`shelter`): mounts, network and process ids. Its
named network namespaces are mounts in there too. So nothing of the machine is changed, runs do
not see each other, and killing `unshare` kills every process and undoes every mount.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000
SUBNET = "10.77.0"
PRODUCERS, TRAINERS = "inf", ("tr1", "tr2")
ADDRESSES = {PRODUCERS: f"{SUBNET}.1", "tr1": f"{SUBNET}.11", "tr2": f"{SUBNET}.12"}
SWITCH = "sw"
_SHELTER = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
_TRIAL = (
    "mount -t tmpfs none /run && ip link add name br0 type bridge && ip link add name a type veth"
)

T = TypeVar("T")


def shelter(command: Sequence[str]) -> list[str]:
    """The same command in namespaces of its own."""
    return [*_SHELTER, *command]


def missing() -> str:
    """Why this machine cannot run it; empty when it can."""
    if os.geteuid() != 0:
        return "needs root: network namespaces and a small tmpfs"
    absent = [tool for tool in ("unshare", "nsenter", "ip", "mount") if not shutil.which(tool)]
    if absent:
        return f"needs {', '.join(absent)} (util-linux, iproute2)"
    trial = subprocess.run(shelter(["sh", "-c", _TRIAL]), capture_output=True, text=True)
    if trial.returncode:
        return f"this kernel or container refuses namespaces: {trial.stderr.strip()}"
    return ""


class Hosts:
    """To be made inside `shelter`, one at a time."""

    def __init__(self) -> None:
        _run("mount", "-t", "tmpfs", "hosts", "/run")
        for name in (SWITCH, *ADDRESSES):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", SWITCH, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", SWITCH, "link", "set", "br0", "up")
        for name, address in ADDRESSES.items():
            peer = ("peer", "name", name, "netns", SWITCH)
            _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
            _run("ip", "-n", SWITCH, "link", "set", name, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")

    def cut(self, host: str) -> None:
        """What is on its way is lost, and nobody is told: no RST, no FIN."""
        _run("ip", "-n", SWITCH, "link", "set", host, "down")

    def heal(self, host: str) -> None:
        _run("ip", "-n", SWITCH, "link", "set", host, "up")

    def close(self) -> None:
        for name in (SWITCH, *ADDRESSES):
            _run("ip", "netns", "del", name)
        _run("umount", "--recursive", "/run")


def on(host: str, command: Sequence[str]) -> list[str]:
    """The same command on a host; its process id stays that of what is started."""
    return ["nsenter", f"--net=/run/netns/{host}", *command]


def listen(host: str, port: int) -> socket.socket:
    return _inside(host, lambda: socket.create_server((ADDRESSES[host], port)))


def connect(host: str, port: int) -> socket.socket:
    """To the host's own loopback."""
    return _inside(host, lambda: socket.create_connection(("127.0.0.1", port)))


def small_disk(path: Path, size_bytes: int) -> None:
    path.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "spool", str(path))


def take_out(disk: Path) -> None:
    _run("umount", "--lazy", str(disk))


def _inside(host: str, make: Callable[[], T]) -> T:
    """A namespace belongs to a thread: sockets made by one in there stay in there."""
    made: list[T | OSError] = []

    def enter() -> None:
        try:
            fd = os.open(f"/run/netns/{host}", os.O_RDONLY)
            libc = ctypes.CDLL(None, use_errno=True)
            code = libc.setns(fd, CLONE_NEWNET)
            os.close(fd)
            if code:
                raise OSError(ctypes.get_errno(), f"setns {host}")
            made.append(make())
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
