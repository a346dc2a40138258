"""What tests measured, below their summary: `record_property(name, value)` in a test. And which
tests need an environment that is not there."""

from pathlib import Path

import pytest

import browser
import promtool

# Tests of one module that others import, each for its own engine.
pytest.register_assert_rewrite("engine_suite", "sglang_suite")

SGLANG_TESTS = Path(__file__).parent / "sglang_engine"
SGLANG_MISSING = not Path(__file__).parents[1].joinpath(".venv-sglang/.installed").exists()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    left_out = SGLANG_MISSING and collection_path.is_relative_to(SGLANG_TESTS)
    return True if left_out else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SGLANG_MISSING:
        missing = "no .venv-sglang, `make sglang` builds it"
        terminalreporter.line(f"tests/sglang_engine left out: {missing}")
    if browser.CHROMIUM is None:
        terminalreporter.line(f"tests in a browser left out: {browser.MISSING}")
    if not promtool.THERE:
        terminalreporter.line(f"tests with Prometheus left out: {promtool.MISSING}")
    _print_measured(terminalreporter)


def _print_measured(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group]
    measured = [
        f"{report.nodeid.rpartition('::')[2]}: {name}: {value}"
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
    ]
    if measured:
        terminalreporter.section("measured")
        for line in sorted(measured):
            terminalreporter.line(line)
