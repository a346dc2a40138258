"""What both services say of themselves over HTTP while they run."""

import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from draftfeed_deploy.errors import StatusBindError
from draftfeed_deploy.status import (
    MAX_REQUESTS,
    PATIENCE_SECONDS,
    REQUEST_SECONDS,
    Pages,
    Probe,
    Status,
    StatusConfig,
    loop_probe,
)
from ports import held_port
from processes import SAMPLES, Run
from promtool import needs_prometheus, promtool
from shown import shown
from snapshots import produced
from waiting import eventually

pytestmark = pytest.mark.timeout(120)

Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, rate=0)
    yield run
    run.kill_all()


def get(url: str | urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(port: int) -> Scrape:
    status, text = get(f"http://127.0.0.1:{port}/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Scrape, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def total(found: Scrape, name: str) -> float:
    return sum(value for (one, _), value in found.items() if one == name)


def test_both_services_tell_the_same_story(run: Run) -> None:
    """Bandwidth, samples by where they are, the trainer's progress: figures of one run agree."""
    ports = {"producer": run.port(), "consumer": run.port()}
    options = {name: ["--set", f"status.bind=127.0.0.1:{port}"] for name, port in ports.items()}
    producer = run.start("producer", *options["producer"])
    pause = ["--set", "trainer.options.pause_after=20"]
    consumer = run.start("consumer", *options["consumer"], *pause)
    run.wait_for_lines("consumer/steps.jsonl", 20)
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}

    def sent_is_received() -> bool:
        made, got = scrape(ports["producer"]), scrape(ports["consumer"])
        sent = total(made, "draftfeed_producer_sent_bytes_total")
        received = value(got, "draftfeed_consumer_received_bytes_total", producer=run.address)
        # Pings go on meanwhile.
        return value(made, "draftfeed_producer_samples", state="leased") >= 20 and (
            abs(sent - received) < 100
        )

    eventually(sent_is_received, "what was sent is what was received")
    made, got = scrape(ports["producer"]), scrape(ports["consumer"])
    assert value(made, "draftfeed_producer_generated_samples_total") == SAMPLES
    assert value(made, "draftfeed_producer_prompts") == SAMPLES
    places = ("trained", "leased", "spooled", "rejected", "quarantined", "tail")
    there = [value(made, "draftfeed_producer_samples", state=state) for state in places]
    assert sum(there) == SAMPLES
    assert value(made, "draftfeed_producer_phase", phase="delivering") == 1
    assert value(made, "draftfeed_producer_members") == 1
    assert value(made, "draftfeed_producer_term") == value(got, "draftfeed_consumer_term") == 1
    assert value(made, "draftfeed_producer_swaps_total") == 0
    assert value(made, "draftfeed_producer_commits_total") >= 1
    assert value(made, "draftfeed_producer_oldest_uncommitted_seconds") > 0
    spool = value(made, "draftfeed_producer_spool_bytes")
    assert spool < value(made, "draftfeed_producer_spool_capacity_bytes")
    assert value(made, "draftfeed_producer_asset_bytes_total") == 0
    assert value(made, "draftfeed_producer_quality_gate_closed") == 0
    assert value(made, "draftfeed_producer_loop_age_seconds") < 5
    assert value(got, "draftfeed_consumer_loop_age_seconds") < 5
    logical = value(made, "draftfeed_producer_logical_bytes_total")
    rows = value(made, "draftfeed_producer_fed_tokens_total")
    assert logical == rows * 5 * 64 * 2
    assert value(made, "draftfeed_producer_zero_rows_total", layer="1") == 0
    for one, side, peer in ((made, "producer_sent", "member"), (got, "consumer", "producer")):
        name = {"member": "0", "producer": run.address}[peer]
        assert value(one, f"draftfeed_{side}_logical_bytes_total", **{peer: name}) == logical
    assert value(got, "draftfeed_consumer_due_bytes", producer=run.address) == 0
    assert value(got, "draftfeed_consumer_attached") == 1
    assert value(got, "draftfeed_consumer_link", producer=run.address, state="open") == 1
    trained = value(got, "draftfeed_consumer_trained_samples_total")
    assert trained == value(got, "draftfeed_consumer_step") == 20
    committed = value(made, "draftfeed_producer_samples", state="trained")
    assert value(got, "draftfeed_consumer_commit_lag_samples") == trained - committed
    assert value(got, "draftfeed_consumer_loss") == pytest.approx(1 / 20)
    for url in urls.values():
        assert get(f"{url}/healthz") == (200, "ok\n")
    assert get(f"{urls['producer']}/readyz") == (200, "delivering\n")
    assert get(f"{urls['consumer']}/readyz") == (200, "attached\n")
    run.go_on()
    run.succeeds(consumer)
    run.succeeds(producer)


def test_swap_is_counted_and_ages_begin_with_the_process(run: Run) -> None:
    port = run.port()
    status = ["--set", f"status.bind=127.0.0.1:{port}"]
    producer = run.start("producer", *status)
    first = run.start("consumer", "--set", "trainer.options.pause_after=10")
    run.wait_for_lines("consumer/steps.jsonl", 10)
    pause = ["--set", "trainer.options.pause_after=5"]
    second = run.start("consumer", "--takeover", *pause, run_dir="second")
    assert run.ended(first)[0] == 3

    def swapped() -> bool:
        return value(scrape(port), "draftfeed_producer_swaps_total") == 1

    eventually(swapped, "the swap in the metrics")
    run.go_on()
    run.succeeds(second)
    run.succeeds(producer)


def test_whoever_reads_the_metrics_sees_the_end_and_is_waited_for_no_longer(run: Run) -> None:
    """A service that had finished could not be told from one that had died: each success ended in
    an alert."""
    ports = {name: run.port() for name in ("producer", "consumer")}
    started = {
        name: run.start(name, "--set", f"status.bind=127.0.0.1:{port}")
        for name, port in ports.items()
    }
    last: dict[str, Scrape] = {}

    def ended() -> bool:
        for name, port in ports.items():
            with suppress(OSError):
                last[name] = scrape(port)
        return all(process.poll() is not None for process in started.values())

    eventually(ended, "the end of both")
    for process in started.values():
        run.succeeds(process)
    assert value(last["consumer"], "draftfeed_consumer_done") == 1
    assert value(last["producer"], "draftfeed_producer_phase", phase="done") == 1


def test_nobody_is_waited_for_who_does_not_read_regularly() -> None:
    for reads in (0, 1):
        with Status(StatusConfig(bind="127.0.0.1:0")) as status:
            status.show(pages())
            for _ in range(reads):
                get(f"{status.url}/metrics")
            status.finished()
            began = time.monotonic()
        assert time.monotonic() - began < 2


def test_every_metric_is_explained_and_named_as_prometheus_wants(run: Run) -> None:
    ports = {"producer": run.port(), "consumer": run.port()}
    for name, port in ports.items():
        run.start(name, "--set", f"status.bind=127.0.0.1:{port}")
    for name, port in ports.items():
        eventually(lambda port=port: listening(port), "an answer")
        eventually(
            lambda port=port: "HELP" in get(f"http://127.0.0.1:{port}/metrics")[1], "metrics"
        )
        text = get(f"http://127.0.0.1:{port}/metrics")[1]
        for family in text_string_to_metric_families(text):
            assert family.name.startswith(f"draftfeed_{name}"), family.name
            assert re.fullmatch(r"[a-z_]+", family.name), family.name
            assert family.documentation.endswith("."), family.name
            assert not re.search(r"_(ms|kb|mb|gb|percent)(_|$)", family.name), family.name


@needs_prometheus
def test_promtool_finds_nothing_to_say_of_the_metrics(run: Run) -> None:
    """Of a run in which samples have gone all the way, so that no metric is without a value."""
    ports = {"producer": run.port(), "consumer": run.port()}
    options = {name: ["--set", f"status.bind=127.0.0.1:{port}"] for name, port in ports.items()}
    run.start("producer", *options["producer"])
    run.start("consumer", *options["consumer"], "--set", "trainer.options.pause_after=20")
    run.wait_for_lines("consumer/steps.jsonl", 20)
    for port in ports.values():
        text = get(f"http://127.0.0.1:{port}/metrics")[1]
        assert text.count("# HELP draftfeed_") > 20
        assert promtool("check", "metrics", given=text) == (0, "")


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_taken_port_is_said_before_anything_is_taken_from_anybody(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        for name in ("producer", "consumer"):
            code, output = run.ended(run.start(name, "--set", f"status.bind={bind}"))
            assert code == 2
            assert f"[status] bind: cannot listen at {bind}: address already in use" in output


def pages(**changes: Callable[[], Probe]) -> Pages:
    def ok() -> Probe:
        return Probe(True, "ok")

    return Pages(CollectorRegistry(), ok, ok)._replace(**changes)


def test_services_on_one_machine_take_the_next_free_port() -> None:
    with ExitStack() as stack:
        services = [stack.enter_context(Status(StatusConfig())) for _ in range(3)]
        for service in services:
            service.show(pages())
        assert len({service.url for service in services}) == 3
        assert all(get(f"{service.url}/healthz") == (200, "ok\n") for service in services)


def test_ranks_have_the_ports_behind_the_first() -> None:
    with held_port() as fourth:
        bind = f"127.0.0.1:{fourth - 3}"
        with Status(StatusConfig(bind=bind), rank=3) as status:
            assert status.url == f"http://127.0.0.1:{fourth}"


def test_hung_loop_and_a_service_that_begins_are_told_apart() -> None:
    with Status(StatusConfig(bind="127.0.0.1:0")) as status:
        assert get(f"{status.url}/healthz") == (200, "starting\n")
        assert get(f"{status.url}/readyz") == (503, "starting\n")
        status.show(pages(healthy=lambda: loop_probe("server", 31.0)))
        words = "the server's loop has not come round for 31 s\n"
        assert get(f"{status.url}/healthz") == (503, words)


@pytest.mark.parametrize("bind", ["localhost", "127.0.0.1:", ":80", "127.0.0.1:70000", "a:b"])
def test_bind_that_is_none_is_refused(bind: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        StatusConfig(bind=bind)


def test_host_that_is_not_ours_is_one_line() -> None:
    with pytest.raises(StatusBindError, match=r"cannot listen at 203\.0\.113\.1:9640") as caught:
        Status(StatusConfig(bind="203.0.113.1:9640")).__enter__()
    assert "\n" not in str(caught.value)


def test_silent_clients_do_not_use_up_all_there_is() -> None:
    """More idle connections than it serves: the slowest are ended, and it lives on."""
    with Status(StatusConfig(bind="127.0.0.1:0")) as status, ExitStack() as stack:
        status.show(pages())
        assert status.url is not None
        port = int(status.url.rpartition(":")[2])
        for _ in range(3 * MAX_REQUESTS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        eventually(lambda: answers(status.url), "an answer", 30)


def test_clients_that_send_a_byte_at_a_time_hold_nobody_up() -> None:
    """Each byte came in time, so that sixteen of them shut everybody else out for ever: a healthy
    service seemed dead to whoever restarts it."""
    with Status(StatusConfig(bind="127.0.0.1:0")) as status, ExitStack() as stack:
        status.show(pages())
        assert status.url is not None
        port, over, ended = int(status.url.rpartition(":")[2]), threading.Event(), []

        def drip() -> None:
            client = socket.create_connection(("127.0.0.1", port))
            with client:
                while not over.wait(0.1):
                    try:
                        client.sendall(b"G")
                    except OSError:
                        ended.append(time.monotonic() - began)
                        return

        began = time.monotonic()
        clients = [threading.Thread(target=drip) for _ in range(MAX_REQUESTS)]
        stack.callback(lambda: [client.join() for client in clients])
        stack.callback(over.set)
        for client in clients:
            client.start()
        eventually(lambda: answers(status.url), "an answer", PATIENCE_SECONDS + 2)
        eventually(lambda: len(ended) == len(clients), "they are ended", REQUEST_SECONDS + 4)
        assert max(ended) < REQUEST_SECONDS + 3


def test_who_is_turned_away_is_told_so() -> None:
    with Status(StatusConfig(bind="127.0.0.1:0")) as status, ExitStack() as stack:
        status.show(pages())
        assert status.url is not None
        port = int(status.url.rpartition(":")[2])
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(MAX_REQUESTS + 1)
        ]
        assert clients[-1].recv(100).startswith(b"HTTP/1.0 503 ")


def answers(url: str | None) -> bool:
    try:
        return get(f"{url}/healthz")[0] == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\0" * 100,
        b"GET " + b"a" * 70_000,
        b"POST /metrics HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
    ],
    ids=["zeros", "a long line", "no GET", "no version"],
)
def test_nonsense_is_answered_with_an_error(request_bytes: bytes) -> None:
    with Status(StatusConfig(bind="127.0.0.1:0")) as status:
        status.show(pages())
        assert status.url is not None
        port = int(status.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request_bytes + b"\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            assert b" 200 " not in client.recv(1000)
        assert answers(status.url)


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:1", 200),
        ("localhost", 200),
        ("[::1]:80", 200),
        ("evil.example:9640", 421),
        ("[", 400),
    ],
)
def test_a_page_from_elsewhere_cannot_ask_under_a_name_of_its_own(host: str, code: int) -> None:
    """DNS rebinding: a name that leads to loopback, in the browser of an operator."""
    with Status(StatusConfig(bind="127.0.0.1:0")) as status:
        status.show(pages())
        assert status.url is not None
        request = urllib.request.Request(f"{status.url}/status.json", headers={"Host": host})
        assert get(request)[0] == code


def test_page_that_cannot_be_made_is_an_error_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connection was closed instead, as if the service were down, and no log had the reason."""

    def broken() -> Probe:
        raise RuntimeError("a fault of ours")

    with Status(StatusConfig(bind="127.0.0.1:0")) as status:
        status.show(pages(healthy=broken))
        for _ in range(2):
            assert get(f"{status.url}/healthz")[0] == 500
        assert get(f"{status.url}/readyz")[0] == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "'/healthz' cannot be shown"
    ]


def test_names_that_are_no_text_are_metrics_all_the_same() -> None:
    with shown(lambda: produced(1.0, sent_bytes={"\udcff": 7})) as url:
        assert 'sent_bytes_total{member="\\\\udcff"} 7.0' in get(f"{url}/metrics")[1]


def test_spool_that_is_full_is_told_of_a_closed_gate_too() -> None:
    both = produced(1.0, alarm="closed; full", spool_paused=True, quality_closed=True)
    with shown(lambda: both) as url:
        found = scrape(int(url.rpartition(":")[2]))
    assert value(found, "draftfeed_producer_spool_paused") == 1
    assert value(found, "draftfeed_producer_quality_gate_closed") == 1


def test_many_scrapes_at_once_are_all_whole() -> None:
    with Status(StatusConfig(bind="127.0.0.1:0")) as status, ThreadPoolExecutor(8) as pool:
        status.show(pages())
        found = list(pool.map(get, [f"{status.url}/metrics"] * 40))
        assert {code for code, _ in found} == {200}
