"""Pages in a real browser: Chromium without a screen, one process for each look."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import NamedTuple

import pytest

CHROMIUM = shutil.which("chromium")
MISSING = "no chromium, `apt-get install --no-install-recommends chromium` installs it"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
OPTIONS = (
    "--headless",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--lang=en-US",
    "--window-size=1000,1200",
)
LOOK_SECONDS = 60


class Look(NamedTuple):
    dom: str
    """As HTML, when the time was over."""
    requested: list[str]
    """URLs that the page asked for, itself left out; refused ones are not among them."""

    def text(self, id: str) -> str:
        """What is written in an element, tags replaced by spaces."""
        found = re.search(rf'<(\w+)[^>]* ?id="{id}"[^>]*>(.*?)</\1>', self.dom, re.DOTALL)
        assert found is not None, f"no element {id}"
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", found[2])).split())

    def tile(self, label: str) -> str:
        found = re.search(rf">{label}</span><strong>([^<]*)</strong>", self.dom)
        assert found is not None, f"no tile {label}"
        return unescape(found[1])


def look(url: str, directory: Path, seconds: float = 5.0) -> Look:
    """At the page after so many seconds of its own clock, which is faster than ours. No name but
    loopback's is resolved."""
    assert CHROMIUM is not None
    log = directory / "net.json"
    done = subprocess.run(
        [
            CHROMIUM,
            *OPTIONS,
            f"--user-data-dir={directory / 'profile'}",
            f"--log-net-log={log}",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--virtual-time-budget={int(1000 * seconds)}",
            "--dump-dom",
            url,
        ],
        capture_output=True,
        text=True,
        timeout=LOOK_SECONDS,
        check=True,
    )
    return Look(done.stdout, _requested(log))


def _requested(log: Path) -> list[str]:
    """The browser's own requests, for its updates, have no origin."""
    written = json.loads(log.read_text())
    (kind,) = (
        number
        for name, number in written["constants"]["logEventTypes"].items()
        if name == "URL_REQUEST_START_JOB"
    )
    parts = [event.get("params", {}) for event in written["events"] if event["type"] == kind]
    return [part["url"] for part in parts if part.get("initiator", "").startswith("http")]
