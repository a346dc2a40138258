"""Producers and consumers as systemd starts, watches, restarts and stops them, on three hosts."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

import sdbox
from unit_hosts import Hosts, consumer
from waiting import eventually

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.skipif(bool(sdbox.missing()), reason=f"no systemd of our own: {sdbox.missing()}"),
]
PRODUCER, CONSUMER = "draftfeed-producer@0", "draftfeed-consumer"
BINARY = "/opt/draftfeed/bin/draftfeed"
SENT = "draftfeed_producer_sent_bytes_total"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def restarts(hosts: Hosts, host: str, unit: str) -> int:
    return int(hosts.boxes[host].show(unit, "NRestarts")["NRestarts"])


def committed(hosts: Hosts) -> float:
    return hosts.metrics("inf", 9640)['draftfeed_producer_samples{state="trained"}']


def test_from_start_to_end(hosts: Hosts) -> None:
    hosts.fresh(700, rate=2000)  # it is still being made when the consumer is there
    hosts.inf.systemctl("start", PRODUCER)
    state = hosts.inf.show(PRODUCER, "ActiveState", "StatusText", "User")
    assert state["ActiveState"] == "active"
    assert "generating; 0.0 MB/s to members, nobody attached" in state["StatusText"]
    hosts.start_consumer("tr1")
    hosts.boxes["tr1"].wait(CONSUMER, StatusText=lambda text: "attached, term 1, " in text)
    hosts.finished("tr1")
    hosts.inf.wait(PRODUCER, ActiveState="inactive", Result="success", ExecMainStatus="0")
    assert "secret" not in hosts.inf.journal(PRODUCER)


def test_stop_drains_and_loses_nothing(hosts: Hosts) -> None:
    hosts.fresh(400, rate=3000, steps=1000)
    hosts.inf.systemctl("start", PRODUCER)
    hosts.start_consumer("tr1")
    hosts.wait_trained("tr1", 30)
    hosts.boxes["tr1"].systemctl("stop", CONSUMER)
    state = hosts.boxes["tr1"].show(CONSUMER, "Result", "ExecMainStatus")
    assert state == {"Result": "success", "ExecMainStatus": "0"}
    counts = hosts.trained("tr1")
    assert set(counts.values()) == {1}
    assert committed(hosts) == len(counts) >= 30
    hosts.inf.systemctl("stop", PRODUCER)
    assert hosts.inf.show(PRODUCER, "ActiveState")["ActiveState"] == "inactive", "130 is no failure"
    assert "stopped: what is generated is in the spool" in hosts.inf.journal(PRODUCER)
    hosts.inf.systemctl("start", PRODUCER)
    hosts.start_consumer("tr1")
    hosts.finished("tr1")


SLOW_START = """
import os, time
from draftfeed_producer.engines.synthetic import SyntheticEngine
begin = SyntheticEngine.__init__
def slowly(self, config):
    while not os.path.exists("/run/weights-are-read"):
        time.sleep(0.05)
    begin(self, config)
SyntheticEngine.__init__ = slowly
sys.exit(main())
"""


def test_start_that_loads_for_longer_than_the_limit_is_given_the_time(hosts: Hosts) -> None:
    """As one of 55 GB does: its start would be given up after TimeoutStartSec=."""
    hosts.fresh(60)
    usual = hosts.inf.run("cat", BINARY).stdout
    hosts.put("inf", BINARY, usual.replace("sys.exit(main())", SLOW_START), "755")
    hosts.drop_in("inf", "draftfeed-producer@.service", "[Service]\nTimeoutStartSec=6\n")
    try:
        began = time.monotonic()
        hosts.inf.systemctl("start", "--no-block", PRODUCER)
        hosts.inf.wait(PRODUCER, StatusText=lambda text: text.startswith("loading; "))
        threading.Event().wait(began + 7 - time.monotonic())  # so long its engine loads
        state = hosts.inf.show(PRODUCER, "ActiveState", "NRestarts")
        assert state == {"ActiveState": "activating", "NRestarts": "0"}
        hosts.inf.run("touch", "/run/weights-are-read")
        hosts.inf.wait(PRODUCER, ActiveState="active", NRestarts="0")
    finally:
        hosts.put("inf", BINARY, usual, "755")
        hosts.inf.run("rm", "-f", "/run/weights-are-read")


def test_drain_that_waits_for_a_checkpoint_is_given_the_time(hosts: Hosts) -> None:
    """It would be killed after TimeoutStopSec=, if it did not ask for more."""
    hosts.fresh(2000, rate=1600)
    text = (
        consumer(5).replace("stub_trainer", "slow_trainer").replace("checkpoint_steps", "seconds")
    )
    hosts.put("tr1", "/etc/draftfeed/consumer.toml", text.replace("seconds = 5", "seconds = 7"))
    hosts.drop_in("tr1", f"{CONSUMER}.service", "[Service]\nTimeoutStopSec=2\n")
    hosts.inf.systemctl("start", PRODUCER)
    hosts.start_consumer("tr1")
    hosts.wait_trained("tr1", 20)
    began = time.monotonic()
    hosts.boxes["tr1"].systemctl("stop", CONSUMER)
    assert time.monotonic() - began > 6
    state = hosts.boxes["tr1"].show(CONSUMER, "Result", "ExecMainStatus")
    assert state == {"Result": "success", "ExecMainStatus": "0"}
    assert committed(hosts) == len(hosts.trained("tr1")) >= 20


def test_crashes_are_answered_by_a_restart_and_the_stream_goes_on(hosts: Hosts) -> None:
    hosts.fresh(1000, rate=1600)
    for host, unit in (("inf", "draftfeed-producer@"), ("tr1", CONSUMER)):
        hosts.drop_in(host, f"{unit}.service", "[Service]\nRestartSec=100ms\n")
    hosts.inf.systemctl("start", PRODUCER)
    hosts.start_consumer("tr1")
    hosts.wait_trained("tr1", 20)
    hosts.inf.systemctl("kill", "-s", "KILL", PRODUCER)
    hosts.inf.wait(PRODUCER, NRestarts="1", ActiveState="active")
    hosts.boxes["tr1"].systemctl("kill", "-s", "KILL", CONSUMER)
    hosts.boxes["tr1"].wait(CONSUMER, NRestarts="1", ActiveState="active")
    hosts.wait_trained("tr1", 1)
    assert restarts(hosts, "inf", PRODUCER) == 1
    hosts.finished("tr1")


def test_frozen_services_are_found_by_the_watchdog(hosts: Hosts) -> None:
    hosts.fresh(1300, rate=1600)
    for host, unit in (("inf", "draftfeed-producer@"), ("tr1", CONSUMER)):
        hosts.drop_in(host, f"{unit}.service", "[Service]\nWatchdogSec=3\nRestartSec=100ms\n")
    hosts.inf.systemctl("start", PRODUCER)
    hosts.start_consumer("tr1")
    hosts.wait_trained("tr1", 20)
    for host, unit in (("inf", PRODUCER), ("tr1", CONSUMER)):
        hosts.boxes[host].systemctl("kill", "-s", "STOP", unit)
        hosts.boxes[host].wait(unit, NRestarts="1", ActiveState="active")
        assert "Watchdog timeout" in hosts.boxes[host].journal(unit)
    hosts.wait_trained("tr1", 1)
    assert restarts(hosts, "inf", PRODUCER) == 1, "a service that works was restarted"
    hosts.finished("tr1")


@pytest.mark.parametrize(("rate", "samples"), [("200mbit", 450), ("1gbit", 600)])
def test_reported_bandwidth_is_that_of_the_interface(
    hosts: Hosts, rate: str, samples: int, record_property: Callable[[str, object], None]
) -> None:
    """On a link that is slower than the services, and on one that need not be."""
    hosts.fresh(samples, hidden=4096, steps=1000)
    hosts.inf.systemctl("start", PRODUCER)
    spooled = 'draftfeed_producer_samples{state="spooled"}'
    eventually(lambda: hosts.metrics("inf", 9640).get(spooled, 0) == samples, "all are made")
    hosts.network.limit("inf", rate)
    try:
        hosts.start_consumer("tr1")
        eventually(lambda: hosts.value("inf", 9640, SENT) > 20e6, "the stream flows")
        first = reading(hosts)
        eventually(lambda: hosts.value("inf", 9640, SENT) > first.reported + 100e6, "more of it")
        last = reading(hosts)
    finally:
        hosts.network.unlimit("inf")
    reported, counted = last.reported - first.reported, last.counted - first.counted
    record_property(
        f"{rate}: reported, counted by the interface",
        f"{reported / 1e6:.1f} MB, {counted / 1e6:.1f} MB: {reported / counted:.3f}; "
        f"{8e-6 * counted / (last.seconds - first.seconds):.0f} Mbit/s",
    )
    assert 0.95 < reported / counted < 1.05
    hosts.boxes["tr1"].systemctl("stop", CONSUMER)


class Reading(NamedTuple):
    reported: float
    counted: int
    seconds: float


def reading(hosts: Hosts) -> Reading:
    """At a moment when what is reported has just been brought up to date: that is done five times
    a second."""
    before = hosts.value("inf", 9640, SENT)
    now = before

    def changed() -> bool:
        nonlocal now
        now = hosts.value("inf", 9640, SENT)
        return now != before

    eventually(changed, "the metric moves", 10)
    return Reading(now, hosts.sent_bytes("inf"), time.monotonic())


def test_cut_of_five_seconds_is_no_reason_to_restart(hosts: Hosts) -> None:
    hosts.fresh(400, rate=2500)
    hosts.inf.systemctl("start", PRODUCER)
    hosts.start_consumer("tr1")
    hosts.wait_trained("tr1", 20)
    hosts.network.cut("tr1")
    threading.Event().wait(5)  # so long it is cut
    hosts.network.heal("tr1")
    hosts.finished("tr1")
    assert restarts(hosts, "inf", PRODUCER) == restarts(hosts, "tr1", CONSUMER) == 0


def test_wrong_key_is_refused_until_it_is_known(hosts: Hosts) -> None:
    hosts.fresh(60)
    tr2, stranger = hosts.boxes["tr2"], (hosts.keys / "stranger.secret").read_text()
    own = (hosts.keys / "tr2.secret").read_text()
    hosts.put("tr2", "/etc/draftfeed/keys/consumer.secret", stranger, "600")
    try:
        hosts.inf.systemctl("start", PRODUCER)
        hosts.start_consumer("tr2")
        tr2.wait_journal(CONSUMER, "it does not know our key")
        hosts.inf.wait_journal(PRODUCER, "refused a client with the unknown public key")
        assert hosts.trained_now("tr2") == 0
        known = (hosts.keys / "stranger.pub").read_text()
        hosts.put("inf", "/etc/draftfeed/clients/stranger.pub", known)
        hosts.inf.systemctl("reload", PRODUCER)
        hosts.inf.wait_journal(PRODUCER, "3 clients are known")
        assert hosts.inf.show(PRODUCER, "ActiveState")["ActiveState"] == "active"
        hosts.finished("tr2")
        assert restarts(hosts, "tr2", CONSUMER) == 0
    finally:
        hosts.put("tr2", "/etc/draftfeed/keys/consumer.secret", own, "600")
        hosts.inf.run("rm", "-f", "/etc/draftfeed/clients/stranger.pub")


def test_instances_are_independent(hosts: Hosts) -> None:
    hosts.fresh(1500, rate=1600, shard_size=500)
    shards = "".join(f"SHARDS_{i}=--set spool.shards={i}-{i}\n" for i in range(3))
    before = hosts.inf.run("cat", "/etc/draftfeed/producer.env").stdout
    units = [f"draftfeed-producer@{i}" for i in range(3)]
    hosts.drop_in("inf", "draftfeed-producer@.service", "[Service]\nRestartSec=100ms\n")
    addresses = json.dumps([f"tcp://10.77.0.1:555{i}" for i in range(3)])
    text = consumer(5).replace('["tcp://10.77.0.1:5550"]', addresses)
    hosts.put("tr1", "/etc/draftfeed/consumer.toml", text)
    hosts.put("inf", "/etc/draftfeed/producer.env", before + shards)
    try:
        hosts.inf.systemctl("enable", "--now", *units, "draftfeed-producer.target")
        hosts.start_consumer("tr1")
        hosts.wait_trained("tr1", 30)
        for port in range(9640, 9643):  # it is ready before it has counted its prompts
            eventually(
                lambda port=port: hosts.value("inf", port, "draftfeed_producer_prompts") == 500,
                f"the prompts of the producer behind {port}",
            )
        others = (units[0], units[2])  # which may end by themselves, when all is trained
        pids = [hosts.inf.show(unit, "ExecMainPID", "NRestarts") for unit in others]
        hosts.inf.systemctl("kill", "-s", "KILL", units[1])
        hosts.inf.wait(units[1], NRestarts="1", ActiveState="active")
        assert [hosts.inf.show(unit, "ExecMainPID", "NRestarts") for unit in others] == pids
        hosts.finished("tr1")
    finally:
        hosts.inf.systemctl("disable", "--now", *units, "draftfeed-producer.target")
        hosts.put("inf", "/etc/draftfeed/producer.env", before)


def test_target_stops_all_instances(hosts: Hosts) -> None:
    hosts.fresh(5000, rate=500, shard_size=2500)
    before = hosts.inf.run("cat", "/etc/draftfeed/producer.env").stdout
    shards = "SHARDS_0=--set spool.shards=0-0\nSHARDS_1=--set spool.shards=1-1\n"
    hosts.put("inf", "/etc/draftfeed/producer.env", before + shards)
    units = ("draftfeed-producer@0", "draftfeed-producer@1")
    try:
        hosts.inf.systemctl("start", "draftfeed-producer.target", *units)
        hosts.inf.systemctl("stop", "draftfeed-producer.target")
        for unit in units:
            hosts.inf.wait(unit, ActiveState="inactive", MainPID="0")
            assert "stopped: what is generated is in the spool" in hosts.inf.journal(unit)
    finally:
        hosts.put("inf", "/etc/draftfeed/producer.env", before)


MODEL = """
[engine]
name = "sglang"
[target]
path = "/srv/model"
[prompts]
path = "/srv/prompts.jsonl"
[spool]
dir = "spool"
[server]
key = "/etc/draftfeed/keys/producers.secret"
clients = ["/etc/draftfeed/clients"]
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("", "cannot be read by this user: Permission denied"),
        ("/config.json", "has a file that this user cannot read: config.json"),
    ],
)
def test_model_that_a_service_may_not_read_is_one_line_and_no_loop(
    hosts: Hosts, what: str, words: str
) -> None:
    hosts.fresh(1)
    hosts.put("inf", "/etc/draftfeed/producer.toml", MODEL)
    hosts.put("inf", "/srv/prompts.jsonl", '{"prompt": "once"}\n')
    hosts.inf.run("install", "-d", "-m", "755", "/srv/model")
    hosts.put("inf", "/srv/model/config.json", '{"model_type": "qwen3"}')
    hosts.inf.run("chmod", "go-rwx", f"/srv/model{what}")
    assert hosts.inf.systemctl("start", PRODUCER, check=False).returncode != 0
    state = hosts.inf.show(PRODUCER, "ActiveState", "ExecMainStatus", "NRestarts", "StatusText")
    assert state == {
        "ActiveState": "failed",
        "ExecMainStatus": "2",
        "NRestarts": "0",
        "StatusText": f"/srv/model: {words}",
    }
    journal = hosts.inf.journal(PRODUCER)
    assert journal.count("/srv/model") == 1
    assert "Traceback" not in journal


def test_missing_key_is_said_before_anything_starts(hosts: Hosts) -> None:
    hosts.fresh(1)
    hosts.boxes["tr1"].run("mv", "/etc/draftfeed/keys/consumer.secret", "/root/kept")
    try:
        start = hosts.boxes["tr1"].systemctl("start", CONSUMER, check=False)
        assert start.returncode != 0
        assert "Assertion failed" in start.stderr
    finally:
        hosts.boxes["tr1"].run("mv", "/root/kept", "/etc/draftfeed/keys/consumer.secret")
