"""Two hosts and a cable of a given rate between them: network namespaces, a veth pair, and a token
bucket at each end. Root only."""

import os
import shutil
import subprocess
from types import TracebackType

ADDRESSES = {"producer": "10.78.0.1", "consumer": "10.78.0.2"}
QUEUE = "20ms"


class NoNetwork(Exception):
    """Why there can be no such hosts here."""


class Network:
    """Exists while it is entered. Names have our process id in them, so that several may."""

    def __init__(self) -> None:
        """Raises NoNetwork."""
        if os.geteuid() != 0:
            raise NoNetwork("network namespaces take root")
        if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
            raise NoNetwork(f"{' and '.join(missing)} of iproute2 is not there")

    def enter(self, role: str) -> tuple[str, ...]:
        """The command that runs another one on a host."""
        return ("ip", "netns", "exec", self._name(role))

    def _name(self, role: str) -> str:
        return f"draftfeed-link-{os.getpid()}-{role}"

    def __enter__(self) -> "Network":
        """Raises NoNetwork when the kernel says no."""
        producer, consumer = (self._name(role) for role in ADDRESSES)
        try:
            for role in ADDRESSES:
                _run("ip", "netns", "add", self._name(role))
            peer = ("peer", "name", "eth0", "netns", consumer)
            _run("ip", "link", "add", "eth0", "netns", producer, "type", "veth", *peer)
            for role, address in ADDRESSES.items():
                name = self._name(role)
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", "eth0", "up")
        except NoNetwork:
            self.close()
            raise
        return self

    def limit(self, gbit: float) -> None:
        """Both ways. The bucket holds what goes out in 3 ms, and a few of the largest packets."""
        burst = max(256 * 1024, round(gbit * 1e9 / 8 * 0.003))
        words = ("tbf", "rate", f"{gbit}gbit", "burst", str(burst), "latency", QUEUE)
        self._replace(*words)

    def impair(self, gbit: float, delay_ms: float, loss_percent: float) -> None:
        """One way each. Raises NoNetwork when the kernel has no netem."""
        delay, loss = f"{delay_ms}ms", f"{loss_percent}%"
        words = ("netem", "delay", delay, "loss", loss, "rate", f"{gbit}gbit", "limit", "20000")
        self._replace(*words)

    def _replace(self, *words: str) -> None:
        for role in ADDRESSES:
            name = self._name(role)
            _run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *words)

    def close(self) -> None:
        for role in ADDRESSES:
            subprocess.run(["ip", "netns", "del", self._name(role)], capture_output=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
