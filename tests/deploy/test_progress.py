"""What a person sees of a running service."""

import logging

import pytest
from rich.console import Console

from draftfeed_deploy import progress
from draftfeed_deploy.progress import Lines, Panels, Rates, rows
from draftfeed_deploy.records import Snapshot
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


def test_a_service_without_news_for_long_is_not_told_about_in_a_burst(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = Lines("consumer-2")
    lines._due -= 10 * progress.LINE_SECONDS
    with caplog.at_level(logging.INFO):
        for second in range(5):
            lines.show(consumed(1.0 + second))
    assert len(caplog.messages) == 1


def test_panels_show_both_services_with_sizes_and_ratio() -> None:
    console = Console(record=True, force_terminal=True, width=80, height=40)
    with Panels(console, ["producer", "consumer"]) as panels:
        panels.view("producer").show(
            produced(
                1.0,
                samples=20,
                committed=30,
                spooled=20,
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


def text_of(snapshot: Snapshot) -> str:
    rates = Rates()
    rates.add(snapshot)
    return "; ".join(f"{label} {text}" for label, text, _ in rows(snapshot, rates))


def test_paused_admission_says_why() -> None:
    text = text_of(produced(1.0, alarm="quota of 1.0 GB reached"))
    assert "spool 0 B of 0 B, PAUSED: quota of 1.0 GB reached" in text


def test_members_and_term_are_named_so_that_a_takeover_is_seen() -> None:
    assert "members none attached;" in text_of(produced(1.0))
    assert "members 2 attached (0, 1), term 3;" in text_of(
        produced(1.0, members=["0", "1"], term=3)
    )


@pytest.mark.parametrize(
    ("local", "links", "words"),
    [
        (0, 8, ""),
        (1, 1, ", on this host"),
        (8, 8, ", on this host"),
        (1, 8, ", 1 of 8 on this host"),
    ],
)
def test_one_member_of_this_host_does_not_stand_for_all(local: int, links: int, words: str) -> None:
    assert progress.here(local, links) == words


def test_samples_that_were_made_again_are_counted() -> None:
    assert "samples 5 of 200 (2 made again);" in text_of(produced(1.0, spooled=5, regenerated=2))


def test_samples_of_earlier_processes_are_among_those_that_are_made() -> None:
    """After a restart it said "0 of 200", as if all were lost."""
    now = produced(1.0, samples=0, committed=30, leased=20, spooled=4, rejected=1)
    assert "samples 55 of 200;" in text_of(now)


def test_link_tells_one_missing_producer_from_all() -> None:
    producers = {"tcp://a:1": "open", "tcp://b:1": "down"}
    assert "attached to 1 of 2 producers;" in text_of(consumed(1.0, producers=producers))
    both = consumed(1.0, producers=dict.fromkeys(producers, "open"), attached=True, term=2)
    assert "attached to 2 of 2 producers, term 2;" in text_of(both)
    one = consumed(1.0, producers={"tcp://a:1": "open"}, attached=True, term=1, draining=True)
    assert "link attached, term 1, draining;" in text_of(one)
