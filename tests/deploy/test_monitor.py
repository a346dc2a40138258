import json
from pathlib import Path

from draftfeed_deploy.monitor import JsonLines, Monitor
from draftfeed_deploy.records import Snapshot
from snapshots import produced


class Shown:
    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def show(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)


def test_last_state_is_recorded_even_when_the_service_fails(tmp_path: Path) -> None:
    log, view, state = JsonLines(tmp_path / "new/stats.jsonl"), Shown(), {"samples": 0}
    try:
        with Monitor(lambda: produced(1.0, samples=state["samples"]), log, [view]):
            state["samples"] = 7
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        log.close()
    lines = (tmp_path / "new/stats.jsonl").read_bytes().splitlines()
    assert json.loads(lines[-1])["samples"] == 7
    assert view.snapshots[-1].samples == 7
    assert len(view.snapshots) == len(lines)


def test_log_is_appended_to_by_a_service_that_starts_again(tmp_path: Path) -> None:
    for number in (1, 2):
        log = JsonLines(tmp_path / "stats.jsonl")
        log.write(produced(number))
        log.close()
    lines = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert [json.loads(line)["time_seconds"] for line in lines] == [1, 2]
