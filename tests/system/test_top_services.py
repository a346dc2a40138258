"""`draftfeed top` and `plan --from` beside services of the real kind."""

import asyncio
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftfeed_deploy.top import Top
from draftfeed_deploy.top_watch import Watch
from processes import Run
from waiting import eventually

pytestmark = pytest.mark.timeout(180)
SECONDS = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, rate=2000, samples=100_000)
    yield run
    run.kill_all()


def bound(port: int) -> list[str]:
    return ["--set", f"status.bind=127.0.0.1:{port}"]


def test_killed_producer_is_gone_and_back_with_its_consumer_waiting(run: Run) -> None:
    ports = {"producer": run.port(), "consumer": run.port()}
    producer = run.start("producer", *bound(ports["producer"]))
    run.start("consumer", *bound(ports["consumer"]))
    urls = [f"http://127.0.0.1:{port}" for port in ports.values()]

    async def act(watch: Watch) -> None:
        top = Top(watch, draw_seconds=0.1)
        async with top.run_test(size=(80, 24)) as pilot:

            async def until(*patterns: str) -> None:
                deadline = time.monotonic() + SECONDS
                while not all(re.search(one, text(), re.MULTILINE) for one in patterns):
                    assert time.monotonic() < deadline, f"not shown: {patterns}\n{text()}"
                    await pilot.pause(0.05)

            def text() -> str:
                return top.picture.shown.plain

            name = f"127\\.0\\.0\\.1:{ports['producer']}"
            await until(
                r"1 producer, 1 consumer",
                rf"^{name} +generating +[1-9]\d*/100,000 +[1-9]",
                r"term 1, commit \d+ s ago, members 0",
                rf"^127\.0\.0\.1:{ports['consumer']} +attached +[1-9]\d* ",
                r"^wire +[1-9][\d.]* [kM]?B/s",
                r"term 1, step [1-9]",
            )
            producer.kill()
            await until(
                r"1 gone", rf"^{name} +gone ", rf"^127\.0\.0\.1:{ports['consumer']} +waiting"
            )
            run.start("producer", *bound(ports["producer"]), run_dir="again")
            await until(r"1 producer, 1 consumer", rf"^{name} +generating", r"attached")

    with Watch(urls, every_seconds=0.1) as watch:
        asyncio.run(act(watch))


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("draftfeed")), *arguments]


def test_q_ends_it_and_leaves_the_terminal_as_it_was(run: Run) -> None:
    port = run.port()
    producer = run.start("producer", *bound(port))
    run.wait_for(producer, "serving synthetic")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        command("top", f"127.0.0.1:{port}"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        shown = _read(ours, b"generating")
        os.write(ours, b"q")
        shown += _read(ours, b"\x1b[?1049l")  # back from the alternate screen
        assert b"\x1b[?1049h" in shown
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read(terminal: int, until: bytes) -> bytes:
    """What is written to a terminal, up to some words."""
    found, deadline = b"", time.monotonic() + SECONDS
    while until not in found:
        left = deadline - time.monotonic()
        assert left > 0, found[-2000:]
        if select.select([terminal], [], [], left)[0]:
            found += os.read(terminal, 1 << 16)
    return found


def test_plan_from_a_running_producer_says_when_it_ends(run: Run) -> None:
    """The finish that it tells is that of the rate which the engine was told to keep."""
    port = run.port()
    producer = run.start("producer", *bound(port), "--set", "engine.samples=1000")
    run.wait_for(producer, "serving synthetic")
    ask = command("plan", "--from", f"127.0.0.1:{port}", "--for", "2", "--json")

    told: dict[str, float] = {}

    def forecast() -> bool:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
        told.update(json.loads(done.stdout)["running"]["forecast"] or {})
        return bool(told)

    eventually(forecast, "a forecast")
    asked_at = time.monotonic()
    assert told["rows_per_second"] == pytest.approx(2000, rel=0.3)
    logged = run.directory / "producer" / "stats.jsonl"

    def generated() -> bool:
        return '"phase":"delivering"' in logged.read_text()

    eventually(generated, "the end of generation")
    took = time.monotonic() - asked_at
    assert told["earliest"] - 4 < took < told["latest"] + 4
