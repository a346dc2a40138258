"""The status page in a browser: figures of a running producer, and nothing from anywhere else."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import look, needs_chromium
from draftfeed_deploy.page import page
from draftfeed_deploy.records import ProducerSnapshot
from draftfeed_deploy.scrapes import fetch
from draftfeed_deploy.status import Status, StatusConfig
from processes import Run
from shown import served, shown
from snapshots import consumed, produced
from waiting import eventually

pytestmark = [needs_chromium, pytest.mark.timeout(180)]

EVIL = "<script>document.title='evil'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, rate=400, samples=100_000)
    yield run
    run.kill_all()


def document(url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fetch(f"{url}/status.json"))
    return found


def test_page_shows_the_figures_of_a_running_producer_and_they_change(
    run: Run, tmp_path: Path
) -> None:
    port = run.port()
    url = f"http://127.0.0.1:{port}"
    producer = run.start("producer", "--set", f"status.bind=127.0.0.1:{port}")
    run.wait_for(producer, "serving synthetic")
    eventually(lambda: (document(url)["producer"] or {"samples": 0})["samples"] > 3, "samples")
    before = document(url)
    first, second = look(url, tmp_path), look(url, tmp_path)
    after = document(url)
    made = [int(one.tile("prompts made").replace(",", "")) for one in (first, second)]
    assert before["producer"]["samples"] <= made[0] < made[1] <= after["producer"]["samples"]
    assert first.text("service") == "draftfeed producer"
    assert first.text("state") == "generating"
    assert first.text("model") == f"synthetic, stream {before['stream_id'][:8]}"
    rows = [int(word) for word in first.text("values").split() if word.isdigit()]
    assert len(rows) == 5 * 5
    assert rows[::5] == before["layer_ids"]
    assert '<polyline points="' in first.dom
    spool_bytes = after["producer"]["spool_bytes"]
    assert first.tile("spool").endswith((" kB", " MB"))
    assert spool_bytes > 0


def test_page_asks_its_own_server_again_and_again_and_nobody_else(tmp_path: Path) -> None:
    asked: list[int] = []

    def snapshot() -> ProducerSnapshot:
        asked.append(0)
        return produced(2.0 * len(asked), samples=len(asked), spooled=len(asked), captured=10)

    with shown(snapshot) as url:
        seen = look(url, tmp_path, seconds=9)
    assert len(seen.requested) >= 3
    assert set(seen.requested) == {f"{url}/status.json"}
    assert 2 < int(seen.tile("prompts made")) <= len(asked)


def test_names_from_the_network_are_text(tmp_path: Path) -> None:
    """A member, a producer or an alarm may be called anything."""

    def snapshot() -> ProducerSnapshot:
        return produced(
            1.0,
            phase=EVIL,
            alarm=EVIL,
            members=[EVIL, "__proto__"],
            sent_bytes={EVIL: 7, "__proto__": 9},
            stall_seconds={EVIL: 1.0},
            inexact=[0],
        )

    with shown(snapshot) as url:
        seen = look(url, tmp_path)
        assert set(seen.requested) == {f"{url}/status.json"}
    assert EVIL in seen.text("alarm")
    assert seen.text("peers").endswith(f"{EVIL} 7 B 0 B __proto__ 9 B 0 B")
    assert "<title>draftfeed producer</title>" in seen.dom
    with shown(lambda: consumed(1.0, producers={EVIL: "down"}, offered={EVIL: 3})) as url:
        seen = look(url, tmp_path)
    assert f"{EVIL} down 0 B 3" in seen.text("peers")
    assert "<title>draftfeed consumer</title>" in seen.dom


def test_loss_that_is_no_number_is_an_alarm(tmp_path: Path) -> None:
    with shown(lambda: consumed(1.0, loss=float("nan"), loss_lost=True)) as url:
        seen = look(url, tmp_path)
    assert seen.text("alarm") == "The trainer's loss is no number any more."
    assert "<small>loss is no number</small>" in seen.dom


def test_service_that_starts_and_one_that_has_ended_are_told_apart(tmp_path: Path) -> None:
    with Status(StatusConfig(bind="127.0.0.1:0")) as status:
        assert status.url is not None
        seen = look(status.url, tmp_path)
        assert seen.text("state") == "starting"
        assert 'id="gone" class="bad" role="alert" hidden' in seen.dom
    asked: list[int] = []

    def snapshot() -> ProducerSnapshot:
        asked.append(0)
        if len(asked) > 1:
            raise RuntimeError("it has ended")
        return produced(1.0, samples=5, spooled=5)

    with shown(snapshot) as url:
        seen = look(url, tmp_path, seconds=9)
    assert seen.text("gone").startswith("No answer since ")
    assert seen.tile("prompts made") == "5"  # what was last known stays


def test_warnings_of_the_service_are_on_its_page(tmp_path: Path) -> None:
    with shown(lambda: produced(1.0)) as url:
        logging.getLogger("test").error("the disk is %s", "full")
        seen = look(url, tmp_path)
    assert "error the disk is full" in seen.text("log")


FOREIGN = b"""<html><link rel="icon" href="data:,"><body><p id="words">before</p>
<img src="http://foreign.invalid/image.png"><script src="http://foreign.invalid/a.js"></script>
<script>document.getElementById("words").textContent = "a script ran";</script></body></html>"""


def test_policy_forbids_what_a_page_without_it_would_do(tmp_path: Path) -> None:
    """So that a name that was not escaped could do nothing; and the browser's log shows it."""
    with served(FOREIGN, {"Content-Type": "text/html"}) as url:
        seen = look(url, tmp_path)
        assert sorted(seen.requested) == [
            "http://foreign.invalid/a.js",
            "http://foreign.invalid/image.png",
        ]
        assert seen.text("words") == "a script ran"
    policy = {"Content-Type": "text/html", "Content-Security-Policy": page().policy}
    with served(FOREIGN, policy) as url:
        seen = look(url, tmp_path)
        assert seen.requested == []
        assert seen.text("words") == "before"
