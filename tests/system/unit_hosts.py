"""Hosts with systemd on which draftfeed is installed the way `draftfeed install-units` does it."""

import ctypes
import json
import os
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from draftfeed_deploy.install_units import install, planned
from draftfeed_deploy.keygen import write_pair
from netns import ADDRESSES, Network
from sdbox import Box
from waiting import eventually

CLONE_NEWNET = 0x40000000
ROOT = Path(__file__).parents[2]
COMMAND = """#!/opt/python/bin/python{version}
import sys
sys.path[:0] = {path!r}
from draftfeed_deploy.cli import main
sys.exit(main())
"""
PRODUCER = """
[engine]
name = "synthetic"
samples = {samples}
shard_size = {shard_size}
num_layers = 8
hidden_size = {hidden}
vocab_size = 512
prompt_tokens = 8
response_tokens = 24
max_tokens = 64
tokens_per_second = {rate}
[spool]
dir = "spool"
segment_bytes = 4_000_000
fsync = "never"
min_free_bytes = 10_000_000
[server]
session_timeout_seconds = 1.0
key = "/etc/draftfeed/keys/producers.secret"
clients = ["/etc/draftfeed/clients"]
"""
CONSUMER = """
[producer]
addresses = ["tcp://10.77.0.1:5550"]
group = "run"
key = "/etc/draftfeed/keys/consumer.secret"
server_key = "/etc/draftfeed/producers.pub"
[status]
bind = "127.0.0.1:9660"
[buffer]
capacity_bytes = 64_000_000
window_samples = 4
stall_seconds = 0.2
[trainer]
function = "stub_trainer:train"
output_dir = "{output}"
options = {{ checkpoint_steps = {steps} }}
[trainer.assets]
fetch = false
"""
OUTPUT = "/var/lib/draftfeed-consumer/checkpoints"
BINDS = {
    Path(sys.base_prefix): "/opt/python",
    Path(sys.prefix, "lib"): "/opt/draftfeed/lib",
    ROOT: "/opt/source",
}


def command() -> str:
    """The `draftfeed` command for places that services may look at."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    rooms = [f"/opt/source/{room}" for room in ("proto", "producer", "consumer", "deploy")]
    path = [*rooms, f"/opt/draftfeed/lib/python{version}/site-packages"]
    return COMMAND.format(version=version, path=path)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def tree(directory: Path, *, gpu: bool = False) -> Path:
    """What `install-units` writes, and the command that its units start."""
    install(directory, planned(directory, "/opt/draftfeed/bin", gpu=gpu, force=False))
    write(directory / "opt/draftfeed/bin/draftfeed", command(), 0o755)
    library = "LD_LIBRARY_PATH=/opt/python/lib\n"
    trainer = "PYTHONPATH=/opt/source/tests/system:/opt/source/tests\n"
    write(directory / "etc/draftfeed/consumer.env", library + trainer)
    write(directory / "etc/draftfeed/producer.env", f"{library}BIND_HOST=10.77.0.1\nENGINE=\n")
    return directory


class Hosts:
    """`inf` has producers, `tr1` and `tr2` may have a consumer; keys are shared out."""

    def __init__(self, directory: Path, names: Iterable[str] = ADDRESSES) -> None:
        """names: of the hosts that are needed."""
        self._directory, self._stack, self._names = directory, ExitStack(), tuple(names)
        self.keys = directory / "keys"
        self.samples = 0

    def __enter__(self) -> "Hosts":
        self.network = self._stack.enter_context(Network())
        for name in ("producers", "tr1", "tr2", "stranger"):
            write_pair(self.keys / name)
        self.boxes = {host: self._box(host) for host in self._names}
        for box in self.boxes.values():
            self._stack.enter_context(box)
            box.run("systemd-sysusers")
        return self

    def _box(self, host: str) -> Box:
        root = tree(self._directory / host)
        etc = root / "etc/draftfeed"
        if host == "inf":
            self._give("producers.secret", etc / "keys/producers.secret", 0o600)
            for node in ("tr1", "tr2"):
                self._give(f"{node}.pub", etc / f"clients/{node}.pub")
        else:
            self._give(f"{host}.secret", etc / "keys/consumer.secret", 0o600)
            self._give("producers.pub", etc / "producers.pub")
        return Box(host, netns=self.network.netns(host), tree=root, binds=BINDS)

    def _give(self, name: str, path: Path, mode: int = 0o644) -> None:
        write(path, (self.keys / name).read_text(), mode)

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def inf(self) -> Box:
        return self.boxes["inf"]

    def put(self, host: str, path: str, text: str, mode: str = "644") -> None:
        """A file on a host that is up."""
        self.boxes[host].run("install", "-D", "-m", mode, "/dev/stdin", path, text=text)

    def fresh(
        self,
        samples: int,
        rate: int = 0,
        hidden: int = 64,
        steps: int = 5,
        shard_size: int = 4096,
    ) -> None:
        """Nothing runs, nothing is left; the configurations of another run."""
        for box in self.boxes.values():
            box.systemctl("kill", "-s", "KILL", "draftfeed*", check=False)
            box.systemctl("stop", "draftfeed*", check=False)
            box.systemctl("reset-failed", check=False)
            box.run("sh", "-c", "rm -rf /var/lib/private/draftfeed* /var/cache/private/draftfeed*")
            box.run("sh", "-c", "rm -rf /run/systemd/system/draftfeed*; systemctl daemon-reload")
            box.run("journalctl", "--rotate", "-q")
            box.run("journalctl", "--vacuum-time=1s", "-q", check=False)
        self.samples = samples
        text = PRODUCER.format(samples=samples, rate=rate, hidden=hidden, shard_size=shard_size)
        self.put("inf", "/etc/draftfeed/producer.toml", text)
        for host in self.boxes.keys() - {"inf"}:
            self.put(host, "/etc/draftfeed/consumer.toml", consumer(steps))

    def drop_in(self, host: str, unit: str, text: str) -> None:
        """Until the next run."""
        self.put(host, f"/run/systemd/system/{unit}.d/test.conf", text)
        self.boxes[host].systemctl("daemon-reload")

    def start_consumer(self, host: str) -> None:
        self.boxes[host].systemctl("start", "draftfeed-consumer")

    def metrics(self, host: str, port: int) -> dict[str, float]:
        """Every series of a service's page, by its name with labels."""
        text = self.fetch(host, f"http://127.0.0.1:{port}/metrics")
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def value(self, host: str, port: int, name: str) -> float:
        """Of a metric, all its series together; 0 while there is none."""
        try:
            found = self.metrics(host, port)
        except OSError:  # it is not up
            return 0.0
        return sum(number for series, number in found.items() if series.partition("{")[0] == name)

    def trained_now(self, host: str) -> float:
        return self.value(host, 9660, "draftfeed_consumer_trained_samples_total")

    def wait_trained(self, host: str, count: int) -> None:
        box = self.boxes[host]
        try:
            eventually(lambda: self.trained_now(host) >= count, f"{count} trained on {host}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{box.journal('draftfeed-consumer')}") from None

    def finished(self, host: str) -> None:
        """Until the consumer has trained everything and both ends know it."""
        self.boxes[host].wait("draftfeed-consumer", ActiveState="inactive", Result="success")
        assert self.all_once(host), "a sample was lost, or trained twice"

    def fetch(self, host: str, url: str) -> str:
        """From inside of the host's network."""
        with inside(self.network.netns(host)), urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())

    def trained(self, host: str) -> dict[str, int]:
        """How often the newest checkpoint says each sample was trained."""
        names = self.boxes[host].run("sh", "-c", f"ls {OUTPUT}/checkpoint-*.json").stdout.split()
        counts: dict[str, int] = json.loads(self.boxes[host].run("cat", max(names)).stdout)[
            "counts"
        ]
        return counts

    def all_once(self, host: str) -> bool:
        counts = self.trained(host)
        return len(counts) == self.samples and set(counts.values()) == {1}

    def sent_bytes(self, host: str) -> int:
        """By the interface itself; at once, and not by a process that may have to wait its turn."""
        with inside(self.network.netns(host)):
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        [counters] = [line.partition(":")[2].split() for line in lines if "eth0:" in line]
        return int(counters[8])


def audit(hosts: Hosts) -> str:
    """Nothing lost, nothing doubled, by the command that operators use; what it said."""
    said = hosts.inf.run(
        *("env", "LD_LIBRARY_PATH=/opt/python/lib", "/opt/draftfeed/bin/draftfeed", "audit"),
        *("-c", "/etc/draftfeed/producer.toml", "--set", "server.bind=tcp://10.77.0.1:5550"),
    ).stdout
    assert "the sums agree with the prompt list" in said
    assert "(running, " in said
    return said


def consumer(steps: int, output: str = OUTPUT) -> str:
    return CONSUMER.format(steps=steps, output=output)


@contextmanager
def inside(netns: str) -> Iterator[None]:
    """This thread is in that network while it is entered."""
    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    try:
        _set_network(there)
        yield
    finally:
        _set_network(back)
        os.close(there)
        os.close(back)


def _set_network(descriptor: int) -> None:
    """setns(2), which Python has from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
