"""What a person sees of a running service."""

import logging

import pytest
from rich.console import Console

from draftfeed_deploy import progress
from draftfeed_deploy.progress import Lines, Panels, Rates
from snapshots import consumed, produced


def test_rate_is_of_the_last_ten_seconds_and_not_of_the_whole_run() -> None:
    rates = Rates()
    for second in range(31):
        rates.add(produced(100.0 + second, captured=1000 if second == 0 else 1000 + 5 * second))
    assert rates("captured") == pytest.approx(5)
    for second in range(31, 60):
        rates.add(produced(100.0 + second, captured=1150))
    assert rates("captured") == 0


def test_one_snapshot_has_no_rate() -> None:
    rates = Rates()
    rates.add(produced(5.0, captured=7))
    assert rates("captured") == 0


def test_lines_come_when_they_are_due(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines("consumer")
    with caplog.at_level(logging.INFO):
        lines.show(consumed(1.0))
        assert caplog.messages == []
        monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
        due = Lines("consumer")
        due.show(consumed(1.0))
        due.show(consumed(2.0, tokens=40, trained=3, held=2, step=3, loss=4.5))
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("consumer: link waiting for the producer; received 0 ")
    assert "40.0 tokens/s" in caplog.messages[1]
    assert "trained 3 (2 held); step 3, loss 4.500" in caplog.messages[1]


def test_panels_show_both_services_with_sizes_and_ratio() -> None:
    console = Console(record=True, force_terminal=True, width=80, height=40)
    with Panels(console, ["producer", "consumer"]) as panels:
        panels.view("producer").show(
            produced(
                1.0,
                samples=50,
                logical_bytes=3_000_000,
                encoded_bytes=2_000_000,
                spool_bytes=1_500_000,
                spool_quota_bytes=1_000_000_000,
                stall_seconds={"spool_full": 0.0, "no_credit": 2.0},
            )
        )
        console.print(panels.picture())
    text = console.export_text()
    assert "starting" in text
    for words in ("50 of 200", "ratio 1.50", "1.5 MB of 1.0 GB", "no credit 2 s"):
        assert words in text
