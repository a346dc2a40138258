"""The document that the status page and `draftfeed top` show."""

import logging
import threading

import pytest

from draftfeed_deploy import board
from draftfeed_deploy.board import Board, Document, LogLine, RecentLog, decoded, encoded
from draftfeed_deploy.drift import drifting
from draftfeed_deploy.records import Snapshot
from shown import identity
from snapshots import consumed, produced


def said(*snapshots: Snapshot) -> Document:
    shown = Board()
    for snapshot in snapshots:
        shown.show(snapshot)
    return decoded(encoded(shown.document(identity(), [])))


def test_rates_are_per_second_of_each_interval() -> None:
    """Whatever the pace of snapshots: two a second, or one that comes late."""
    times = [100.0, 100.5, 101.0, 101.5, 102.0, 102.5, 106.0]
    rates = said(*(produced(at, captured=int(10 * (at - 100))) for at in times)).rates
    assert rates.tokens == [10, 10]
    rates = said(*(consumed(at, wire_bytes=int(7 * at), trained=int(at)) for at in (0, 2, 4))).rates
    assert (rates.wire_bytes, rates.samples) == ([7, 7], [1, 1])


def test_ten_minutes_are_kept_and_no_more() -> None:
    found = said(*(produced(2.0 * turn, captured=turn) for turn in range(1000)))
    assert len(found.rates.tokens) == board.KEPT
    assert len(encoded(found)) < 20_000


def test_stalls_are_shares_of_the_last_minute() -> None:
    """A stall of an hour ago is no trouble of now."""
    past = [
        produced(
            2.0 * turn, stall_seconds={"spool_full": min(100.0, turn), "no_credit": turn * 0.5}
        )
        for turn in range(300)
    ]
    found = said(*past).stalls
    assert found == {"spool_full": 0.0, "no_credit": pytest.approx(0.25)}


def test_member_that_gets_less_than_the_others_is_named() -> None:
    def at(turn: int) -> Snapshot:
        sent = {"0": 100 * turn, "1": 30 * turn, "2": 110 * turn, "gone": 5}
        return produced(2.0 * turn, members=["0", "1", "2"], sent_bytes=sent)

    (drift,) = said(*(at(turn) for turn in range(10))).drifting
    assert drift.name == "1"
    assert drift.share == pytest.approx(30 / 105)


def test_drift_needs_others_and_something_done() -> None:
    assert drifting({}) == []
    assert drifting({"0": 0.0}) == []
    assert drifting({"0": 0.0, "1": 0.0}) == []
    assert [one.name for one in drifting({"0": 100, "1": 65, "2": 40})] == ["2"]
    assert [one.name for one in drifting({"0": 9, "1": 0})] == ["1"]


def test_consumer_has_no_forecast_and_a_service_that_starts_nothing_at_all() -> None:
    assert (said(consumed(1.0)).forecast, said(consumed(1.0)).too_early) == (None, "")
    starting = said()
    assert (starting.service, starting.state, starting.producer) == ("", "starting", None)


def test_forecast_is_that_of_the_last_minutes() -> None:
    def at(turn: int) -> Snapshot:
        made = 10 * turn
        return produced(
            100.0 + 2 * turn,
            prompts=1000,
            samples=made,
            spooled=made,
            tokens=100 * made,
            captured=100 * made,
            response_tokens=60 * made,
            generating_seconds=2.0 * turn,
        )

    found = said(*(at(turn) for turn in range(20)))
    assert found.forecast is not None
    assert found.forecast.left == 810
    assert found.forecast.seconds == pytest.approx(162)
    assert found.forecast.latest is not None
    assert said(at(1)).too_early.startswith("10 samples are finished")
    replay = produced(100.0, prompts=1000, spooled=40, replayed=40)
    assert said(replay).too_early.startswith("40 samples were made before")


def test_newer_and_older_documents_can_be_read() -> None:
    assert decoded(b'{"service": "producer", "new": {"field": 1}}').service == "producer"
    assert decoded(b"{}") == Document()


def test_last_warnings_are_kept_and_cut() -> None:
    log, logger = RecentLog(), logging.getLogger("test.board")
    logger.addHandler(log)
    logger.propagate = False
    try:
        logger.info("nothing")
        for number in range(100):
            logger.warning("number %d %s", number, "x" * 5000)
        logger.error("%d", "no number")
    finally:
        logger.removeHandler(log)
        logger.propagate = True
    lines = log.lines()
    assert len(lines) == board.LOG_LINES
    assert (lines[0].level, lines[0].words) == ("error", "%d")
    assert lines[1].words.startswith("number 99 x")
    assert max(len(line.words) for line in lines) == board.LOG_CHARACTERS


def test_bytes_that_are_no_text_are_spelt_out() -> None:
    """A warning that named such a file took the page away until twenty others had followed."""
    shown = Board()
    shown.show(produced(1.0, alarm="a\udcff", sent_bytes={"\udcfe": 1}))
    document = shown.document(identity(), [LogLine(words="no \udcff.jsonl")])
    found = decoded(encoded(document))
    assert found.log[0].words == "no \\udcff.jsonl"
    assert found.producer is not None
    assert (found.producer.alarm, found.producer.sent_bytes) == ("a\\udcff", {"\\udcfe": 1})


def test_document_is_whole_while_snapshots_come() -> None:
    shown, over = Board(), threading.Event()

    def feed() -> None:
        for turn in range(2000):
            shown.show(produced(2.0 * turn, samples=turn, sent_bytes={str(turn % 7): turn}))
        over.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    while not over.is_set():
        found = decoded(encoded(shown.document(identity(), [])))
        assert len(found.rates.tokens) <= board.KEPT
    feeder.join()
