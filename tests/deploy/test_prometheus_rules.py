"""Alerts: each one fires, and none cries wolf in a healthy run, by Prometheus' own tools."""

import re
from pathlib import Path
from typing import Any

import yaml

from exported import mentioned, names
from promtool import needs_prometheus, promtool

DIRECTORY = Path(__file__).parents[2] / "deploy" / "prometheus"
RULES = [
    rule
    for group in yaml.safe_load((DIRECTORY / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in RULES if "alert" in rule}
CASES: list[dict[str, Any]] = [
    case
    for test in yaml.safe_load((DIRECTORY / "rules_test.yml").read_text())["tests"]
    for case in test.get("alert_rule_test", ())
]


@needs_prometheus
def test_example_configuration_and_rules_are_what_prometheus_takes() -> None:
    code, output = promtool("check", "config", DIRECTORY / "prometheus.yml")
    assert code == 0, output
    assert f"{len(RULES)} rules found" in output


@needs_prometheus
def test_alerts_fire_when_they_should_and_leave_a_healthy_run_alone() -> None:
    code, output = promtool("test", "rules", DIRECTORY / "rules_test.yml")
    assert code == 0, output


@needs_prometheus
def test_cases_notice_an_alert_that_never_fires(tmp_path: Path) -> None:
    """With every threshold out of reach, no alert's case may pass."""
    rules = yaml.safe_load((DIRECTORY / "rules.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["expr"] = f"({rule['expr']}) and vector(1) == 2"
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    (tmp_path / "rules_test.yml").write_text((DIRECTORY / "rules_test.yml").read_text())
    code, output = promtool("test", "rules", tmp_path / "rules_test.yml")
    assert code == 1
    assert [alert for alert in ALERTS if f"alertname: {alert}," not in output] == []


def test_the_page_has_a_row_for_every_alert() -> None:
    page = (DIRECTORY.parents[1] / "docs" / "operate.md").read_text()
    table = page.partition("| alert | when |\n")[2].partition("\n\n")[0]
    named = [
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(named) == sorted(ALERTS)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fired = {case["alertname"] for case in CASES if case["exp_alerts"]}
    quiet = {case["alertname"] for case in CASES if not case["exp_alerts"]}
    assert fired == set(ALERTS)
    assert quiet | {"DraftfeedQualityGateClosed"} == set(ALERTS)  # that one in its neighbour's


def test_every_alert_says_how_bad_it_is_and_what_to_look_at() -> None:
    for name, alert in ALERTS.items():
        assert alert["labels"]["severity"] in ("critical", "warning"), name
        assert set(alert["annotations"]) == {"summary", "description"}, name
        assert "{{ $labels." in alert["annotations"]["summary"], name


def test_rules_ask_for_nothing_that_services_do_not_have() -> None:
    """A metric that was renamed would leave an alert silent for good."""
    asked = set().union(*(mentioned(rule["expr"]) for rule in RULES))
    assert asked
    assert asked <= names(), asked - names()


def test_what_an_alert_reads_is_recorded_before_it_in_its_group() -> None:
    """In another group it might be a round old: promtool's cases passed on some runs only."""
    groups = yaml.safe_load((DIRECTORY / "rules.yml").read_text())["groups"]
    read = 0
    for group in groups:
        recorded: set[str] = set()
        for rule in group["rules"]:
            found = set(re.findall(r"instance:[\w:]+", rule["expr"]))
            assert found <= recorded, rule
            read += len(found)
            recorded |= {rule["record"]} if "record" in rule else set()
    assert read
