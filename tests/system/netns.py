"""Three hosts on a switch, each with an address of its own; links that can be slow, or cut."""

import os
import subprocess
from types import TracebackType

ADDRESSES = {"inf": "10.77.0.1", "tr1": "10.77.0.11", "tr2": "10.77.0.12"}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Network:
    """Exists while it is entered. Names have our process id in them, so that several may."""

    def __init__(self) -> None:
        self._switch = self.netns("sw")

    def netns(self, host: str) -> str:
        return f"draftfeed-{os.getpid()}-{host}"

    def __enter__(self) -> "Network":
        switch = self._switch
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for host, address in ADDRESSES.items():
            name = self.netns(host)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", f"to-{host}", "netns", switch)
            _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", f"to-{host}", "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
        return self

    def limit(self, host: str, rate: str) -> None:
        """Of what the host sends, such as "200mbit"."""
        words = ("tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
        _run("tc", "-n", self.netns(host), "qdisc", "replace", "dev", "eth0", "root", *words)

    def unlimit(self, host: str) -> None:
        _run("tc", "-n", self.netns(host), "qdisc", "del", "dev", "eth0", "root")

    def cut(self, host: str) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"to-{host}", "down")

    def heal(self, host: str) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"to-{host}", "up")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in ("sw", *ADDRESSES):
            subprocess.run(["ip", "netns", "del", self.netns(host)], capture_output=True)
