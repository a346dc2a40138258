"""What the service manager is told, read from a real NOTIFY_SOCKET."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import pytest
from msgspec import structs

import stuck_child
from draftfeed_deploy import notify
from draftfeed_deploy.conditions import ConsumerLook, ProducerLook
from draftfeed_deploy.errors import RunFailed
from draftfeed_deploy.notify import Condition, Silent
from draftfeed_deploy.records import ConsumerSnapshot, ProducerSnapshot
from processes import Run

pytestmark = pytest.mark.timeout(60)
Announced: TypeAlias = AbstractContextManager[notify.Announcer | Silent]


class Manager:
    """The end that systemd has: every datagram that came, in order."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(30)
        self.seen: list[str] = []

    def wait_for(self, beginning: str) -> str:
        while True:
            text = self._socket.recv(4096).decode()
            self.seen.append(text)
            if text.startswith(beginning):
                return text

    def settle(self, seconds: float) -> None:
        """Take what comes in that time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left)[0]:
                self.seen.append(self._socket.recv(4096).decode())

    def rest(self) -> list[str]:
        self._socket.settimeout(0)
        try:
            while True:
                self.seen.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return self.seen

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setattr(notify, "LOOK_SECONDS", 0.01)
    yield manager
    manager.close()


def announced(look: Callable[[], Condition], end_seconds: float = 60.0) -> Announced:
    return notify.announced(look, end_seconds)


class Service:
    def __init__(self) -> None:
        self.condition = Condition("starting", "loading", 0.0)

    def __call__(self) -> Condition:
        return self.condition

    def now(self, **fields: object) -> None:
        self.condition = self.condition._replace(**fields)  # type: ignore[arg-type]


def test_without_a_manager_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    looked: list[int] = []

    def look() -> Condition:
        looked.append(1)
        return Condition("running", "", 0.0)

    before = threading.active_count()
    with announced(look) as announcer:
        assert isinstance(announcer, Silent)
        assert threading.active_count() == before
        done: list[int] = []
        announcer.reload(lambda: done.append(1))
    assert (looked, done) == ([], [1])


def test_start_is_extended_until_it_is_over(manager: Manager) -> None:
    service = Service()
    with announced(service):
        assert manager.wait_for("EXTEND_TIMEOUT_USEC=") == "EXTEND_TIMEOUT_USEC=30000000"
        manager.wait_for("STATUS=loading")
        service.now(stage="running", words="generating")
        manager.wait_for("READY=1")
        manager.wait_for("WATCHDOG=1")
        service.now(stage="starting")  # an engine that died is started again
        manager.wait_for("WATCHDOG=1")
    assert manager.rest().count("READY=1") == 1
    assert "STOPPING=1" not in manager.seen


def test_children_do_not_inherit_the_socket(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with announced(Service()):
        assert "NOTIFY_SOCKET" not in os.environ


def test_watchdog_starves_when_the_loop_stands_still(manager: Manager) -> None:
    """A side thread that lives must not vouch for a loop that hangs."""
    turned_at = time.monotonic()

    def look() -> Condition:
        now = time.monotonic()
        return Condition("running", f"at {now}", now - turned_at)

    with announced(look):
        manager.wait_for("READY=1")
        turned_at = time.monotonic()
        manager.wait_for("WATCHDOG=1")
        manager.seen.clear()
        for _ in range(20):
            manager.wait_for("STATUS=")
        assert "WATCHDOG=1" not in manager.seen
        turned_at = time.monotonic()
        manager.wait_for("WATCHDOG=1")


def test_stop_is_said_and_extended_while_a_drain_lasts(manager: Manager) -> None:
    service = Service()
    service.now(stage="running")
    with announced(service) as announcer:
        manager.wait_for("READY=1")
        announcer.stopping = True
        manager.wait_for("STOPPING=1")
        manager.wait_for("EXTEND_TIMEOUT_USEC=30000000")
    assert manager.rest().count("STOPPING=1") == 1


def test_stop_that_is_over_at_once_is_said_all_the_same(manager: Manager) -> None:
    with announced(Service()) as announcer:
        announcer.stopping = True
    assert "STOPPING=1" in manager.rest()


@pytest.mark.parametrize("stage", ["starting", "ending"])
def test_extensions_end(manager: Manager, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Or what hangs would never be given up: a start, or a drain whose checkpoint goes to a file
    system that does not answer."""
    monkeypatch.setattr(notify, "MAX_START_SECONDS", 0.05)
    monkeypatch.setattr(notify, "EXTEND_SECONDS", 0.03)
    service = Service()
    if stage == "ending":
        service.now(stage="running")
    with announced(service, end_seconds=0.05) as announcer:
        if stage == "ending":
            manager.wait_for("READY=1")
            announcer.stopping = True
        manager.wait_for("EXTEND_TIMEOUT_USEC=")
        for turn in range(20):  # well beyond the limit
            service.now(words=f"turn {turn}")
            manager.wait_for(f"STATUS=turn {turn}")
        manager.seen.clear()
        for turn in range(20):
            service.now(words=f"later {turn}")
            manager.wait_for(f"STATUS=later {turn}")
    assert not [text for text in manager.rest() if text.startswith("EXTEND")]


def test_end_is_extended_for_as_long_as_a_drain_may_take(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beyond what a start may take."""
    monkeypatch.setattr(notify, "MAX_START_SECONDS", 0.0)
    monkeypatch.setattr(notify, "EXTEND_SECONDS", 0.03)
    service = Service()
    service.now(stage="running")
    with announced(service, end_seconds=60.0) as announcer:
        manager.wait_for("READY=1")
        announcer.stopping = True
        for _ in range(5):
            manager.wait_for("EXTEND_TIMEOUT_USEC=")


def test_reload_is_bracketed_also_when_it_fails(manager: Manager) -> None:
    service = Service()
    service.now(stage="running")

    def fail() -> None:
        raise RunFailed("no")

    with announced(service) as announcer:
        manager.wait_for("WATCHDOG=1")
        with pytest.raises(RunFailed):
            announcer.reload(fail)
        said = manager.wait_for("RELOADING=1")
        assert int(said.partition("MONOTONIC_USEC=")[2]) <= time.monotonic_ns() // 1000
        manager.wait_for("READY=1")


def test_reload_before_the_start_is_over_does_not_end_it(manager: Manager) -> None:
    with announced(Service()) as announcer:
        manager.wait_for("STATUS=")
        done: list[int] = []
        announcer.reload(lambda: done.append(1))
    assert done == [1]
    assert "READY=1" not in manager.rest()


def test_error_is_the_last_status_in_one_short_line(manager: Manager) -> None:
    with pytest.raises(RunFailed), announced(Service()):
        raise RunFailed("two\nlines " + "é" * 5000)
    last = manager.rest()[-1]
    assert last.startswith("STATUS=two lines é")
    assert "\n" not in last
    assert len(last.encode()) <= notify.MAX_STATUS_BYTES + len("STATUS=")


def test_manager_that_is_gone_hurts_nobody(manager: Manager) -> None:
    service = Service()
    with announced(service) as announcer:
        manager.wait_for("STATUS=")
        manager.close()
        announcer.reload(lambda: None)


def test_words_of_a_producer_have_rate_lag_and_state() -> None:
    def snapshot() -> ProducerSnapshot:
        return ProducerSnapshot(
            time_seconds=1.0,
            phase="generating",
            prompts=9,
            samples=5,
            tokens=1,
            response_tokens=1,
            logical_bytes=1,
            wire_bytes=1,
            members=["0"],
            spooled=2,
            leased=1,
            oldest_uncommitted_seconds=7.4,
            alarm="the disk is full",
        )

    look = ProducerLook(snapshot, lambda: 0.5)
    assert look().stage == "starting"  # an engine may only now begin to load
    assert look() == Condition(
        "running",
        "generating; 0.0 MB/s to members, 1 attached; 3 of 9 prompts, 0 tokens/s; "
        "3 samples not committed, the oldest for 7 s; PAUSED: the disk is full",
        0.5,
    )


def test_consumer_runs_while_it_waits_and_ends_when_nobody_needs_it() -> None:
    now = ConsumerSnapshot(
        time_seconds=1.0,
        samples=0,
        tokens=0,
        logical_bytes=0,
        wire_bytes=0,
        producers={"a": "down"},
    )
    waiting = ConsumerLook()(now, 0.0)
    assert waiting.stage == "running"
    assert waiting.words.startswith("waiting for the producer, 0.0 MB/s")
    ended = ConsumerLook()(structs.replace(now, producers={"a": "done", "b": "out"}), 0.0)
    assert ended.stage == "ending"


def test_services_say_it_all_from_start_to_end(tmp_path: Path) -> None:
    """Both processes, each with a manager of its own; the producer gets a hangup on the way."""
    directory = tmp_path / "run"
    directory.mkdir()
    run = Run(directory, rate=0)
    managers = {name: Manager(tmp_path / name) for name in ("producer", "consumer")}
    try:
        producer = run.start("producer", NOTIFY_SOCKET=managers["producer"].address)
        managers["producer"].wait_for("READY=1")
        managers["producer"].wait_for("WATCHDOG=1")
        producer.send_signal(signal.SIGHUP)
        managers["producer"].wait_for("RELOADING=1")
        managers["producer"].wait_for("READY=1")
        consumer = run.start(
            "consumer",
            *("--set", "trainer.options.pause_after=5"),
            NOTIFY_SOCKET=managers["consumer"].address,
        )
        managers["consumer"].wait_for("READY=1")
        managers["consumer"].wait_for("WATCHDOG=1")
        run.wait_for_lines("consumer/steps.jsonl", 5)
        consumer.send_signal(signal.SIGHUP)  # as one may send it to all services
        run.wait_for(consumer, "a consumer has nothing to reload")
        consumer.terminate()
        managers["consumer"].wait_for("STOPPING=1")
        run.succeeds(consumer)
        producer.terminate()
        managers["producer"].wait_for("STOPPING=1")
        assert run.ended(producer)[0] == 130
        assert any("nobody attached" in text for text in managers["producer"].seen)
    finally:
        run.kill_all()
        for manager in managers.values():
            manager.close()


@pytest.mark.parametrize("name", ["producer", "consumer"])
def test_watchdog_of_a_service_is_fed_by_the_loop_that_moves_data(
    tmp_path: Path, name: str
) -> None:
    """And not by the thread that feeds it, which goes on when that loop hangs."""
    directory = tmp_path / "run"
    directory.mkdir()
    run, manager = Run(directory, rate=400, samples=5000), Manager(tmp_path / "notify")
    if name == "consumer":
        run.start("producer")
    child = subprocess.Popen(
        [sys.executable, stuck_child.__file__, name, "-c", f"{name}.toml"],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "NOTIFY_SOCKET": manager.address,
        },
        stderr=subprocess.DEVNULL,
    )
    try:
        manager.wait_for("READY=1")
        manager.wait_for("WATCHDOG=1")
        (directory / stuck_child.STUCK).touch()
        manager.settle(5 * notify.LOOK_SECONDS)
        assert child.poll() is None
        manager.seen.clear()
        manager.settle(4 * notify.LOOK_SECONDS)
        assert "WATCHDOG=1" not in manager.seen
    finally:
        child.kill()
        child.wait()
        run.kill_all()
        manager.close()
