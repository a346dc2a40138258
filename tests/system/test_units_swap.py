"""The training node is swapped while generation goes on: two hosts with systemd, and a third with
the producer, which is not to notice."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

import sdbox
from unit_hosts import Hosts, audit, consumer
from waiting import eventually

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.skipif(bool(sdbox.missing()), reason=f"no systemd of our own: {sdbox.missing()}"),
]
PRODUCER, CONSUMER = "draftfeed-producer@0", "draftfeed-consumer"
HELD = "is attached; wait until it leaves, or take its place with --takeover"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


class Watch:
    """The longest time in which the producer's counter of captured rows stood still."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self.longest_seconds, self.rows = hosts, 0.0, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        moved_at = time.monotonic()
        while not self._over.wait(0.05):
            rows = self._hosts.value("inf", 9640, "draftfeed_producer_captured_rows_total")
            now = time.monotonic()
            self.longest_seconds = max(self.longest_seconds, now - moved_at)
            if rows != self.rows:
                moved_at, self.rows = now, rows


def move_checkpoints(hosts: Hosts, source: str, to: str) -> None:
    """As an operator would who has no shared directory."""
    box, name = hosts.boxes[source], "checkpoints.tar"
    path = f"/var/lib/private/{CONSUMER}"
    text = box.run("sh", "-c", f"cd {path} && tar cf - checkpoints | base64").stdout
    hosts.put(to, f"/root/{name}", text)
    into = f"mkdir -p {path} && base64 -d /root/{name} | tar xf - -C {path}"
    hosts.boxes[to].run("sh", "-c", f"{into} && chown -R root:root {path}")
    place = f"/var/lib/{CONSUMER}"  # as systemd makes it when the unit is started first
    hosts.boxes[to].run("sh", "-c", f"[ -e {place} ] || ln -sn private/{CONSUMER} {place}")


def by_hand(hosts: Hosts, host: str, *options: str, seconds: int = 15) -> tuple[int, str]:
    """A consumer that a person starts in a shell, and ends after so long."""
    done = hosts.boxes[host].run(
        *("env", "LD_LIBRARY_PATH=/opt/python/lib", "PYTHONPATH=/opt/source/tests/system"),
        *("timeout", "--preserve-status", str(seconds), "/opt/draftfeed/bin/draftfeed", "consumer"),
        *("-c", "/etc/draftfeed/consumer.toml", "--set", "status.enabled=false", *options),
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_swap_goes_unnoticed_by_the_producer(
    hosts: Hosts, record_property: Callable[[str, object], None]
) -> None:
    hosts.fresh(2400, rate=1600, steps=10)
    hosts.inf.systemctl("start", PRODUCER)
    hosts.start_consumer("tr1")
    hosts.wait_trained("tr1", 20)
    with Watch(hosts) as control:
        hosts.wait_trained("tr1", int(hosts.trained_now("tr1")) + 250)
    same = ("MainPID", "NRestarts")
    before = hosts.inf.show(PRODUCER, *same)
    with Watch(hosts) as swap:
        hosts.boxes["tr1"].systemctl("stop", CONSUMER)
        first = len(hosts.trained("tr1"))
        move_checkpoints(hosts, "tr1", "tr2")
        hosts.start_consumer("tr2")
        hosts.wait_trained("tr2", 100)
    assert hosts.inf.show(PRODUCER, *same) == before
    record_property(
        "longest pause of the token counter, control and swap",
        f"{control.longest_seconds:.2f} s, {swap.longest_seconds:.2f} s",
    )
    # One reading may be late by so much, on two cores with everything else.
    assert swap.longest_seconds < control.longest_seconds + 0.5
    audit(hosts)

    hosts.start_consumer("tr1")  # by mistake, or by a boot
    hosts.boxes["tr1"].wait_journal(CONSUMER, HELD)
    code, words = by_hand(hosts, "tr1", "--set", "trainer.output_dir=/root/elsewhere")
    assert code == 0, words
    assert HELD in words
    assert "nothing was trained" in words
    state = hosts.boxes["tr1"].show(CONSUMER, "ActiveState", "NRestarts", "StatusText")
    assert (state["ActiveState"], state["NRestarts"]) == ("active", "0")
    assert state["StatusText"].startswith("waiting for the producer")
    hosts.boxes["tr1"].systemctl("stop", CONSUMER)
    assert hosts.boxes["tr1"].show(CONSUMER, "Result")["Result"] == "success"

    hosts.finished("tr2")
    assert first >= 250
    assert "Traceback" not in hosts.inf.journal(PRODUCER)


def test_node_whose_place_is_taken_stays_down(hosts: Hosts) -> None:
    """Or the two would take over from each other for ever."""
    hosts.fresh(3000, rate=1000)
    text = consumer(5).replace("checkpoint_steps = 5", "checkpoint_steps = 5, pause_after = 40")
    hosts.put("tr1", "/etc/draftfeed/consumer.toml", text)  # so that its checkpoint can be copied
    hosts.inf.systemctl("start", PRODUCER)
    hosts.start_consumer("tr1")
    trained = 'draftfeed_producer_samples{state="trained"}'
    eventually(lambda: hosts.metrics("inf", 9640)[trained] == 40, "the commit of step 40")
    move_checkpoints(hosts, "tr1", "tr2")
    code, words = by_hand(hosts, "tr2", "--takeover", seconds=20)
    assert "attached to tcp://10.77.0.1:5550, term 2" in words, words
    assert code == 0, words
    state = hosts.boxes["tr1"].show(CONSUMER, "ActiveState", "ExecMainStatus", "NRestarts")
    assert state == {"ActiveState": "failed", "ExecMainStatus": "3", "NRestarts": "0"}
    assert "another consumer took over" in hosts.boxes["tr1"].journal(CONSUMER)
    assert set(hosts.trained("tr2").values()) == {1}
    audit(hosts)
