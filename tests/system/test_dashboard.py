"""The dashboard: what its script writes, and data in every panel while the demo runs."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from draftfeed_deploy import smollm2
from exported import mentioned, names
from promtool import needs_prometheus
from waiting import eventually

pytestmark = pytest.mark.timeout(400)
DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "draftfeed.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
COMMAND = [
    str(Path(sys.executable).with_name("draftfeed")),
    *("demo", "--prompts", "8", "--max-new-tokens", "16"),
]
SCRAPE = "1s"
STARTING = 503


class Query(NamedTuple):
    panel: str
    expression: str


QUERIES = [Query(panel["title"], one["expr"]) for panel in PANELS for one in panel["targets"]]


def test_dashboard_is_what_its_script_writes(tmp_path: Path) -> None:
    written = tmp_path / "written.json"
    subprocess.run([sys.executable, DEPLOY / "grafana" / "make.py", written], check=True)
    assert written.read_text() == (DEPLOY / "grafana" / "draftfeed.json").read_text()


def test_dashboard_asks_for_nothing_that_services_do_not_have() -> None:
    asked = set().union(*(mentioned(one.expression) for one in QUERIES))
    assert len(asked) > 20
    assert asked <= names(), asked - names()


def test_panels_lie_side_by_side_and_have_names_and_words() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["description"].endswith(".") for panel in PANELS)


class Demo:
    """Running, in a process group of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._output = (directory / "demo.log").open("wb")
        self._process = subprocess.Popen(
            [*COMMAND, "--dir", "run"],
            cwd=directory,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def metrics_of(self, service: str) -> str:
        """HOST:PORT, as the service says in its log."""
        log = self._directory / "run" / f"{service}.log"
        found: list[str] = []

        def said() -> bool:
            self.check()
            text = log.read_text() if log.exists() else ""
            found[:] = re.findall(r"metrics at http://(\S+)/metrics", text)
            return bool(found)

        eventually(said, f"where the metrics of the {service} are")
        return found[0]

    @property
    def streaming(self) -> bool:
        """Its services run."""
        return b"evaluating the drafter" not in (self._directory / "demo.log").read_bytes()

    def check(self) -> None:
        over = self._process.poll() is not None
        assert not over, (self._directory / "demo.log").read_text()[-2000:]

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    smollm2.prepare()
    demo = Demo(tmp_path)
    yield demo
    demo.end()


class Prometheus:
    """With the rules that are shipped, and every second."""

    def __init__(self, directory: Path, targets: dict[str, str]) -> None:
        """targets: by job."""
        config = {
            "global": {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE},
            "rule_files": [str(DEPLOY / "prometheus" / "rules.yml")],
            "scrape_configs": [
                {
                    "job_name": job,
                    "scrape_timeout": SCRAPE,
                    "static_configs": [{"targets": [target], "labels": {"run": "demo"}}],
                }
                for job, target in targets.items()
            ],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._log = directory / "prometheus.log"
        self._output = self._log.open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'tsdb'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self._url = f"http://{self._address()}/api/v1/query_range"
        self._began = int(time.time())

    def _address(self) -> str:
        found: list[str] = []

        def said() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            found[:] = re.findall(r'"Listening on" address=(\S+)', self._log.read_text())
            return bool(found)

        eventually(said, "where Prometheus listens")
        return found[0]

    def has_data(self, query: str) -> bool:
        """Whether it had a value that is a number since we began."""
        now = int(time.time()) + 1
        asked = {"query": query, "start": self._began, "end": now, "step": 1}
        url = f"{self._url}?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == STARTING:
                return False
            pytest.fail(f"{query}: {error.read().decode()}")
        except OSError:  # it has not begun to listen
            assert self._process.poll() is None, self._log.read_text()
            return False
        values = [float(value) for series in found for _, value in series["values"]]
        return any(map(math.isfinite, values))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()


@needs_prometheus
def test_every_panel_has_data_in_the_demo(tmp_path: Path, demo: Demo) -> None:
    """A query that is misspelt, or waits for what never comes, is an empty panel for ever."""
    jobs = {f"draftfeed_{name}": demo.metrics_of(name) for name in ("producer", "consumer")}
    prometheus = Prometheus(tmp_path, jobs)
    empty = dict.fromkeys(QUERIES)

    def all_have_data() -> bool:
        demo.check()
        lasts = demo.streaming
        for one in list(empty):
            if prometheus.has_data(as_grafana_asks(one.expression)):
                del empty[one]
        assert lasts or not empty, f"the demo is over, and these had no data: {list(empty)}"
        return not empty

    try:
        eventually(all_have_data, "data in every panel", 300)
        assert not prometheus.has_data('ALERTS{alertstate="firing"}'), "an alert in a healthy run"
    finally:
        prometheus.end()


def as_grafana_asks(expression: str) -> str:
    """With its variables filled in: all runs, all services, four scrapes."""
    return (
        expression.replace("$run", ".*")
        .replace("$instance", ".*")
        .replace("$__rate_interval", "4s")
    )
