"""Producer and consumer as services of one host, each in its sandbox and as a user of its own."""

from collections.abc import Iterator

import pytest

import sdbox
from unit_hosts import Hosts, consumer
from waiting import eventually

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.skipif(bool(sdbox.missing()), reason=f"no systemd of our own: {sdbox.missing()}"),
]
PRODUCER, CONSUMER = "draftfeed-producer@0", "draftfeed-consumer"
MEMBERS = "draftfeed_producer_same_host_members"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), ["inf"]) as hosts:
        for name, path, mode in (
            ("tr1.secret", "keys/consumer.secret", "600"),
            ("producers.pub", "producers.pub", "644"),
        ):
            hosts.put("inf", f"/etc/draftfeed/{path}", (hosts.keys / name).read_text(), mode)
        yield hosts


def wait_local(hosts: Hosts) -> None:
    """Until the producer has a member that reads its files."""
    eventually(lambda: hosts.value("inf", 9640, MEMBERS) == 1, hosts.inf.journal(CONSUMER))


def test_services_that_are_killed_read_files_again_and_lose_nothing(hosts: Hosts) -> None:
    """What is told of and not read yet when an end is killed takes no credit: it may be all that
    the buffer has room for."""
    hosts.fresh(2500, rate=6000)
    hosts.put("inf", "/etc/draftfeed/consumer.toml", consumer(5))
    hosts.inf.systemctl("start", PRODUCER, CONSUMER)
    hosts.wait_trained("inf", 30)
    wait_local(hosts)
    for unit in (PRODUCER, CONSUMER, PRODUCER):
        before = hosts.inf.show(unit, "MainPID")["MainPID"]
        hosts.inf.systemctl("kill", "-s", "KILL", unit)
        hosts.inf.wait(unit, ActiveState="active", MainPID=lambda pid, was=before: pid != was)
        trained = hosts.trained_now("inf")
        eventually(lambda more=trained: hosts.trained_now("inf") > more, "training goes on")
        wait_local(hosts)
    hosts.finished("inf")
    hosts.inf.wait(PRODUCER, ActiveState="inactive", Result="success")
