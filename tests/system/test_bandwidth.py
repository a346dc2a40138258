"""Bandwidth on a link of known speed: what is shown, wherever it is shown, and what the network
interface counted meanwhile."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from draftfeed_deploy.board import Document, decoded
from draftfeed_deploy.errors import ServiceUnreachable
from draftfeed_deploy.scrapes import Scrape, fetch, scrape
from draftfeed_deploy.top_watch import totals
from netns import ADDRESSES, Network
from processes import CONSUMER, PRODUCER
from unit_hosts import inside
from waiting import eventually

MISSING = "" if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc") else "root, ip, tc"
pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(bool(MISSING), reason=f"a network of our own needs {MISSING}"),
]
SAMPLES = 250
"""Of 1.3 MB."""
PORT = 9640
URL = f"http://127.0.0.1:{PORT}"
SENT, RECEIVED = "draftfeed_producer_sent_bytes_total", "draftfeed_consumer_received_bytes_total"
MEASURED_BYTES = 80e6
INTERVALS = 3
"""Of the page's, which lie in what is measured."""


class Machines:
    """A producer and a consumer, each on a host of its own."""

    def __init__(self, directory: Path, network: Network, stack: ExitStack) -> None:
        self.network, self._directory, self._stack = network, directory, stack
        address = f"tcp://{ADDRESSES['inf']}:5550"
        producer = PRODUCER.format(samples=SAMPLES, rate=0, epochs=1, address=address)
        (directory / "producer.toml").write_text(
            producer.replace("hidden_size = 64", "hidden_size = 4096").replace(
                "segment_bytes = 100_000", "segment_bytes = 100_000_000"
            )
            + "insecure = true\n"
        )
        consumer = CONSUMER.format(address=address)
        (directory / "consumer.toml").write_text(
            consumer.replace("4_000_000", "64_000_000").replace(
                "[buffer]", "insecure = true\n[buffer]"
            )
        )

    def start(self, host: str, service: str) -> None:
        enter = ("ip", "netns", "exec", self.network.netns(host))
        command = (Path(sys.executable).with_name("draftfeed"), service, "-c", f"{service}.toml")
        output = self._stack.enter_context((self._directory / f"{service}.log").open("wb"))
        process = subprocess.Popen(
            [*enter, *command, "--set", f"status.bind=127.0.0.1:{PORT}"],
            cwd=self._directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def metrics(self, host: str) -> Scrape:
        with inside(self.network.netns(host)):
            return scrape(URL)

    def total(self, host: str, name: str) -> float:
        try:
            return sum(self.metrics(host).by(name, LABELS[name]).values())
        except ServiceUnreachable:  # it has not begun
            return 0.0

    def document(self, host: str) -> Document:
        with inside(self.network.netns(host)):
            return decoded(fetch(f"{URL}/status.json"))

    def interface_bytes(self, host: str, column: int) -> int:
        """column: of /proc/net/dev; 0 = received, 8 = sent."""
        with inside(self.network.netns(host)):
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        [counters] = [line.partition(":")[2].split() for line in lines if "eth0:" in line]
        return int(counters[column])


LABELS = {SENT: "member", RECEIVED: "producer"}


class Reading(NamedTuple):
    sent: float
    received: float
    interface_sent: int
    interface_received: int
    seconds: float


def reading(machines: Machines) -> Reading:
    """When what is reported of the producer has just been brought up to date: five times a second
    it is."""
    before = machines.total("inf", SENT)
    eventually(lambda: machines.total("inf", SENT) != before, "the counter moves", 20)
    return Reading(
        machines.total("inf", SENT),
        machines.total("tr1", RECEIVED),
        machines.interface_bytes("inf", 8),
        machines.interface_bytes("tr1", 0),
        time.monotonic(),
    )


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Network() as network, ExitStack() as stack:
        yield Machines(tmp_path, network, stack)


def test_bandwidth_is_that_of_the_interface_wherever_it_is_shown(
    machines: Machines, record_property: Callable[[str, object], None]
) -> None:
    """In the metrics of both ends, on both pages, and in the sum that `draftfeed top` draws."""
    machines.start("inf", "producer")
    eventually(lambda: made(machines) == SAMPLES, "all are made")
    machines.network.limit("inf", "100mbit")
    machines.start("tr1", "consumer")
    eventually(lambda: machines.total("inf", SENT) > 20e6, "the stream flows")
    first = reading(machines)
    eventually(lambda: machines.total("inf", SENT) > first.sent + MEASURED_BYTES, "more of it")
    last = reading(machines)
    pages = {host: machines.document(host) for host in ("inf", "tr1")}
    seconds = last.seconds - first.seconds
    assert seconds > 2 * INTERVALS
    sent = (last.interface_sent - first.interface_sent) / seconds
    received = (last.interface_received - first.interface_received) / seconds
    shown = {
        "the producer's metrics": (last.sent - first.sent) / seconds / sent,
        "the consumer's metrics": (last.received - first.received) / seconds / received,
        "the producer's page": mean(pages["inf"].rates.wire_bytes) / sent,
        "the consumer's page": mean(pages["tr1"].rates.wire_bytes) / received,
        "top": mean(totals(list(pages.values())).wire_bytes) / sent,
    }
    record_property(
        f"at {8e-6 * sent:.0f} Mbit/s, of what the interface counts",
        ", ".join(f"{where} {ratio:.3f}" for where, ratio in shown.items()),
    )
    assert {where: ratio for where, ratio in shown.items() if not 0.95 < ratio < 1.05} == {}


def made(machines: Machines) -> float:
    try:
        return machines.metrics("inf").value("draftfeed_producer_generated_samples_total")
    except ServiceUnreachable:  # it has not begun
        return 0.0


def mean(rates: list[float]) -> float:
    return sum(rates[-INTERVALS:]) / INTERVALS
