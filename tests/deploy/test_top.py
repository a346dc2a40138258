"""`draftfeed top`: one screen of what running services do."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from draftfeed_deploy import top_watch
from draftfeed_deploy.board import Document, LogLine, Outcome, Rates, decoded, encoded
from draftfeed_deploy.cli import main
from draftfeed_deploy.drift import Drift
from draftfeed_deploy.errors import StatusBindError
from draftfeed_deploy.records import ConsumerSnapshot, ProducerSnapshot
from draftfeed_deploy.top import Top
from draftfeed_deploy.top_view import graph, picture
from draftfeed_deploy.top_watch import Service, Watch, totals
from ports import held_port
from shown import served, shown
from snapshots import consumed, produced

SECONDS = 30.0


def made(**values: Any) -> ProducerSnapshot:
    settings = {"samples": 7, "spooled": 5, "leased": 2, "members": ["0", "1"], "term": 3}
    return produced(time.monotonic(), **{**settings, **values})


def trained(**values: Any) -> ConsumerSnapshot:
    return consumed(time.monotonic(), **{"trained": 41, "step": 41, "term": 3, **values})


class Screen:
    """A `Top` that runs without a terminal."""

    def __init__(self, top: Top, pilot: Any) -> None:
        self.top, self.pilot = top, pilot

    @property
    def text(self) -> str:
        return self.top.picture.shown.plain

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not on the screen: {what}\n{self.text}"
            await self.pilot.pause(0.02)


def on_screen(
    urls: list[str], act: Callable[[Screen], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> None:
    async def run() -> None:
        with Watch(urls, every_seconds=0.05) as watch:
            top = Top(watch, draw_seconds=0.05)
            async with top.run_test(size=size) as pilot:
                await act(Screen(top, pilot))

    asyncio.run(run())


@pytest.fixture
def bind() -> Iterator[str]:
    with held_port() as number:
        yield f"127.0.0.1:{number}"


def test_producers_and_consumers_on_one_screen() -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(shown(lambda: made(spooled=6))) for _ in range(2)]
        urls.append(stack.enter_context(shown(trained)))

        async def act(screen: Screen) -> None:
            await screen.until(lambda: "consumer  " in screen.text, "the services")
            lines = screen.text.splitlines()
            assert lines[0].startswith("draftfeed top   2 producers, 1 consumer")
            assert "too early to say" in lines[1]
            for url in urls[:2]:
                (row,) = [line for line in lines if url[7:] in line]
                assert row.split()[1:3] == ["generating", "8/200"]
            assert "  term 3, commit 0 s ago, members 0 1" in screen.text
            (row,) = [line for line in lines if urls[2][7:] in line]
            assert row.split()[2] == "41"
            await screen.pilot.press("q")
            await screen.until(lambda: not screen.top.is_running, "the end")

        on_screen(urls, act)


def test_service_that_goes_away_is_shown_as_gone_and_comes_back(bind: str) -> None:
    async def act(screen: Screen) -> None:
        with shown(made, bind):
            await screen.until(lambda: "7/200" in screen.text, "the producer")
            assert "gone" not in screen.text
        await screen.until(lambda: "connection refused" in screen.text, "that it is gone")
        assert "gone for " in screen.text
        assert "1 producer, 1 gone" in screen.text
        assert "7/200" in screen.text  # what was last known stays
        with shown(lambda: made(spooled=9), bind):
            await screen.until(lambda: "11/200" in screen.text, "the new one")
            assert "gone" not in screen.text

    on_screen([f"http://{bind}"], act)


def test_service_that_hangs_does_not_hold_up_the_keys() -> None:
    """It accepts, and says nothing: another one is shown meanwhile, and q ends it at once."""
    with socket.socket() as silent, shown(made) as url:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hung = f"http://127.0.0.1:{silent.getsockname()[1]}"

        async def act(screen: Screen) -> None:
            await screen.until(lambda: "7/200" in screen.text, "the other one")
            await screen.until(lambda: "no answer within 2 s" in screen.text, "that it hangs")
            began = time.monotonic()
            await screen.pilot.press("q")
            await screen.until(lambda: not screen.top.is_running, "the end")
            assert time.monotonic() - began < 1

        on_screen([hung, url], act)


@pytest.mark.parametrize("size", [(80, 24), (60, 10), (200, 60), (20, 3)])
def test_screen_of_any_size(size: tuple[int, int]) -> None:
    with shown(lambda: made(alarm="the disk is full; " * 20)) as url:

        async def act(screen: Screen) -> None:
            await screen.until(lambda: "alarm" in screen.text, "the alarm")
            width = max(60, size[0])
            assert max(cell_len(line) for line in screen.text.splitlines()) <= width
            await screen.pilot.resize_terminal(100, 30)
            await screen.until(
                lambda: max(map(cell_len, screen.text.splitlines())) > 80, "the new width"
            )

        on_screen([url], act, size)


def test_narrow_terminal_shows_the_left_of_each_line() -> None:
    """Wrapped, each line took two rows, and graphs were torn apart."""
    with shown(made) as url:

        async def act(screen: Screen) -> None:
            await screen.until(lambda: "7/200" in screen.text, "the producer")
            rows = len(screen.text.splitlines())
            await screen.until(lambda: screen.top.picture.size.height == rows, f"{rows} rows")

        on_screen([url], act, (40, 10))


def test_loss_that_is_no_number_is_told() -> None:
    """It was left out, as if the trainer said none."""
    lines = lines_of(document(service="consumer", consumer=trained(loss_lost=True)))
    assert any(line.startswith("  term 3, step 41, loss is no number, ") for line in lines)


def test_loss_of_any_size_is_shown() -> None:
    """What it said of itself was refused as no status, just when training diverged."""
    said = encoded(document(service="consumer", consumer=trained(loss=1e300)))
    assert any(
        line.startswith("  term 3, step 41, loss 1.00e+300, ") for line in lines_of(decoded(said))
    )


def test_names_from_the_network_cannot_move_the_cursor_or_style_the_text() -> None:
    evil = "\x1b[2J[bold red]x[/]\r\n\u202e"
    with shown(lambda: made(phase=evil, members=[evil], alarm=evil)) as url:

        async def act(screen: Screen) -> None:
            await screen.until(lambda: "members" in screen.text, "the producer")
            assert "[bold red]x[/]" in screen.text
            assert not set("\x1b\r\u202e") & set(screen.text)

        on_screen([url], act)


COUNTERS = (
    b'"time_seconds": 1, "samples": 1, "tokens": 1, "response_tokens": 1, "logical_bytes": 1, '
    b'"wire_bytes": 1'
)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[]",
        b'{"producer": 3}',
        b'{"rates": {"tokens": [1e308, 1e308]}}',
        b'{"rates": {"wire_bytes": [-1]}}',
        b'{"forecast": {"seconds": 1e300}}',
        b'{"log": [{"time_seconds": 1e300}]}',
        b'{"producer": {%s, "spool_bytes": %s}}' % (COUNTERS, b"9" * 400),
        b'{"producer": {%s, "leased": -1}}' % COUNTERS,
        b'{"producer": {%s, "stall_seconds": {"x": 1e300}}}' % COUNTERS,
        b'{"stalls": {"x": 1e300}}',
        b"[" * 100_000,
        b" " * (5 << 20),
    ],
)
def test_service_that_says_nonsense_is_shown_as_such(body: bytes) -> None:
    with served(body) as url:
        found = top_watch.asked(Service(url))
    assert found.document is None
    assert found.gone_since is not None
    assert "is no status of a service" in found.why or "more than" in found.why
    assert url[7:] in "\n".join(line.plain for line in picture([found], 80, time.time()))


def test_service_that_sends_a_byte_at_a_time_is_gone() -> None:
    """Each byte came in time, so that it was shown with its last picture for hours."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            client, _ = server.accept()
            with client, suppress(OSError):
                client.sendall(b"HTTP/1.1 200 OK\r\n")
                while not over.wait(0.1):
                    client.sendall(b"X")

        dripping = threading.Thread(target=drip)
        dripping.start()
        began = time.monotonic()
        found = top_watch.asked(Service(f"http://127.0.0.1:{server.getsockname()[1]}"))
        took = time.monotonic() - began
        over.set()
        dripping.join()
    assert found.why == "no answer within 2 s"
    assert took < top_watch.ASK_SECONDS + 1


def test_service_that_says_a_lot_is_cut() -> None:
    """Four megabytes of names must not take seconds to draw, every second."""
    names = ["m" * 100 for _ in range(10_000)]
    drift = [Drift(name, 0.1) for name in names]
    state = made(members=names, alarm="a" * 1_000_000, phase="p" * 1_000_000)
    began = time.process_time()
    lines = lines_of(document(producer=state, drifting=drift, too_early="b" * 1_000_000))
    assert time.process_time() - began < 1
    assert len(lines) < 80
    assert max(map(cell_len, lines)) <= 80


def test_services_of_this_machine_are_found() -> None:
    """Others may run here, too, and take ports of that range."""
    with ExitStack() as stack:
        url = None
        for port in range(top_watch.FIRST_PORT, top_watch.FIRST_PORT + top_watch.PORTS):
            try:
                url = stack.enter_context(shown(lambda: made(prompts=8765), f"127.0.0.1:{port}"))
                break
            except StatusBindError:
                continue
        assert url is not None
        watch = stack.enter_context(Watch())
        watch.wait()
        (mine,) = [one for one in watch.services() if one.url == url]
        assert mine.document is not None
        assert mine.document.producer is not None
        assert mine.document.producer.prompts == 8765


def test_service_of_this_machine_that_hangs_is_found_as_such() -> None:
    """It was left out, just when one looks for it; and each held up the search for two seconds."""
    with ExitStack() as stack:
        silent: list[str] = []
        for port in range(top_watch.FIRST_PORT, top_watch.FIRST_PORT + top_watch.PORTS):
            with suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                silent.append(f"http://127.0.0.1:{port}")
            if len(silent) == 6:
                break
        other = stack.enter_context(served(b"<html>"))
        watch = stack.enter_context(Watch())
        watch.wait()
        found = {one.url: one for one in watch.services()}
        assert {found[url].why for url in silent} == {"no answer within 2 s"}
        assert other not in found


def test_no_service_is_said_and_waited_for() -> None:
    lines = picture([], 80, time.time())
    assert "no service answers yet" in lines[1].plain


def document(**values: Any) -> Document:
    return Document(**{"service": "producer", "version": "1", "ready": True, **values})


def lines_of(*documents: Document) -> list[str]:
    services = [Service(f"http://host{n}:9640", one) for n, one in enumerate(documents)]
    return [line.plain.rstrip() for line in picture(services, 80, time.time())]


def test_bandwidth_is_the_sum_of_the_producers() -> None:
    """Consumers see the same bytes, which must not count twice. One that began later has less."""
    old = document(producer=made(), rates=Rates(logical_bytes=[1, 2, 3], wire_bytes=[1, 1, 1]))
    new = document(producer=made(), rates=Rates(logical_bytes=[10, 20], wire_bytes=[5, 5]))
    other = document(service="consumer", rates=Rates(logical_bytes=[100] * 9, wire_bytes=[7] * 9))
    summed = totals([old, other, new])
    assert (summed.logical_bytes, summed.wire_bytes) == ([1, 12, 23], [1, 6, 6])
    assert totals([other]).logical_bytes == [100] * 9
    assert totals([]).logical_bytes == []


def test_graph_is_from_zero_to_the_largest() -> None:
    assert graph([0, 1, 2, 4], 6, 1) == ["   ▂▄█"]
    assert graph([1, 2], 2, 2) == [" █", "██"]
    assert graph([], 3, 1) == ["   "]
    assert graph([0, 0], 2, 1) == ["  "]
    assert graph([1, 3, 2, 2, 4, 0], 3, 1) == ["███"]
    assert all(len(line) == 50 for line in graph(list(range(299)), 50, 3))


def test_last_of_several_forecasts_is_told_and_one_that_is_gone_is_left_out() -> None:
    def at(seconds: float) -> Document:
        found = Outcome(
            left=5,
            seconds=seconds,
            earliest=seconds - 1,
            latest=seconds + 1,
            rows_per_second=3,
            recent_rows_per_second=3,
            window_seconds=10,
        )
        return document(producer=made(), forecast=found)

    assert lines_of(at(60), at(120))[1].startswith("generated in 2.0 min, at ")
    gone = Service("http://c:1", at(600), gone_since=time.time() - 90, why="connection refused")
    lines = [line.plain for line in picture([Service("http://a:1", at(60)), gone], 80, time.time())]
    assert lines[1].startswith("generated in 1.0 min, at ")
    assert "(of those that answer: 1 gone)" in " ".join(" ".join(lines[1:3]).split())
    assert any(line.startswith("  gone for 1.5 min: connection refused") for line in lines)


def test_two_runs_have_a_forecast_each() -> None:
    """One that only begins must not hide when the other ends."""
    found = Outcome(
        left=5,
        seconds=60,
        earliest=59,
        latest=61,
        rows_per_second=3,
        recent_rows_per_second=3,
        window_seconds=10,
    )
    one = document(producer=made(), forecast=found, model="smollm2", stream_id="5c0fc5570000")
    lines = lines_of(one, document(producer=made()))
    assert lines[1].startswith("no stream yet: too early to say")
    assert any(line.startswith("smollm2 5c0fc557: generated in 1.0 min, at ") for line in lines)


def test_stalls_drifts_and_warnings_are_told() -> None:
    minute = {True: Rates(samples=[10.0] * 40), False: Rates(samples=[4.0] * 40)}
    ranks = [
        document(service="consumer", consumer=trained(), rates=minute[place != 1])
        for place in range(3)
    ]
    producer = document(
        producer=made(nonfinite=[0, 3], zero_rows=[2]),
        stalls={"spool_full": 0.8, "no_credit": 0.01},
        drifting=[Drift("rank 2", 0.31)],
        log=[LogLine(time_seconds=1.0, level="error", words="a disk\nis full")],
    )
    text = "\n".join(lines_of(producer, *ranks))
    assert "waiting  host0:9640 spool full 80%" in text
    assert "no credit" not in text
    assert "drift    member rank 2 gets 31% of the others, says host0:9640" in text
    assert "drift    host2:9640 trains 40% of the others" in text
    assert "alarm    host0:9640: 3 values are no numbers" in text
    assert "alarm    host0:9640: 2 rows of zeros" in text
    assert "host0:9640: a disk is full" in text


def test_the_cause_of_a_warning_is_not_cut_off() -> None:
    """It stood behind column 80, and --once has nothing to scroll."""
    cause = "Address already in use (tcp://127.0.0.1:57133), since another producer has it"
    long = f"the producer at tcp://node-with-a-long-name:57133 cannot be reached: {cause}"
    services = [
        document(log=[LogLine(time_seconds=1.0, level="warning", words=long)]),
        document(log=[LogLine(time_seconds=2.0, level="error", words="word " * 190)]),
    ]
    gone = Service("http://host3:9640", None, 1.0, long)
    named = [Service(f"http://host{n}:9640", one) for n, one in enumerate(services)]
    lines = [line.plain.rstrip() for line in picture([*named, gone], 80, time.time())]
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).count(long) == 2
    assert sum("word word" in line for line in lines) == 6  # a service cannot fill the screen


def test_once_prints_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(made) as url:
        logging.getLogger("test").warning("something")
        assert main(["top", "--once", url[7:]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("draftfeed top   1 producer")
    assert "7/200" in printed
    assert "something" in printed


def test_log_that_knows_ascii_alone_gets_question_marks() -> None:
    """As cron's does: it was a traceback."""
    with shown(made) as url:
        done = subprocess.run(
            [sys.executable, "-m", "draftfeed_deploy.cli", "top", "--once", url],
            env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "7/200" in done.stdout


def test_what_cannot_be_asked_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(made) as url:
        pass
    for arguments, says in (
        (["--once", url], "connection refused"),
        (["ftp://x"], "is not the address of a service"),
        ([url], "needs a terminal; --once prints one picture"),
    ):
        assert main(["top", *arguments]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


def test_without_textual_it_is_one_line(tmp_path: Path) -> None:
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'textual' else found(name, *rest)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "draftfeed_deploy.cli", "top", "http://127.0.0.1:9"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    how = "in the checkout run: pip install '.[top]'"
    assert done.stderr == f"draftfeed: draftfeed top needs textual, which is not installed; {how}\n"
