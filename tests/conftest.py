"""What tests measured, below their summary: `record_property(name, value)` in a test."""

import pytest

# Tests of one module that others import, each for its own engine.
pytest.register_assert_rewrite("engine_suite")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
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
