"""Signals in the foreground: the first one asks, the next one insists."""

import logging
import os
import signal
import threading

import pytest

from draftfeed_deploy import foreground
from draftfeed_deploy.foreground import GentleStop, interrupt, on_signal


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any second signal is another one."""
    monkeypatch.setattr(foreground, "ONCE_SECONDS", 0.0)


@pytest.fixture
def for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same signal again belongs to the first, however slow this machine is."""
    monkeypatch.setattr(foreground, "ONCE_SECONDS", 3600.0)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("at_once")
def test_first_signal_acts_and_the_second_is_as_it_was_before(kind: signal.Signals) -> None:
    acts: list[str] = []
    before = signal.signal(kind, lambda number, frame: acts.append("before"))
    try:
        with on_signal(lambda: acts.append("ours")):
            os.kill(os.getpid(), kind)
            os.kill(os.getpid(), kind)
        assert acts == ["ours", "before"]
        os.kill(os.getpid(), kind)
        assert acts == ["ours", "before", "before"]
    finally:
        signal.signal(kind, before)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("for_long")
def test_signal_that_a_wrapper_sends_twice_is_one(kind: signal.Signals) -> None:
    """`timeout 60 draftfeed consumer` stopped at once instead of draining, now and then."""
    acts: list[str] = []
    other = signal.SIGTERM if kind is signal.SIGINT else signal.SIGINT
    before = signal.signal(other, lambda number, frame: acts.append("before"))
    try:
        with on_signal(lambda: acts.append("ours")):
            os.kill(os.getpid(), kind)
            os.kill(os.getpid(), kind)
            assert acts == ["ours"]
            os.kill(os.getpid(), other)
        assert acts == ["ours", "before"]
    finally:
        signal.signal(other, before)


def test_sigterm_ends_work_as_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt), on_signal(interrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_are_restored_without_any_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with on_signal(interrupt):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def signalled(stop: GentleStop, *kinds: signal.Signals) -> None:
    """Work that gets these signals and would not end for a long time."""
    with on_signal(interrupt), stop, on_signal(stop.begin):
        for kind in kinds:
            os.kill(os.getpid(), kind)
        threading.Event().wait(10)


def test_first_signal_asks_and_the_work_may_end_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = threading.Event()
    stop = GentleStop(asked.set, 60)
    with caplog.at_level(logging.INFO), on_signal(interrupt), stop, on_signal(stop.begin):
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(10)
    assert stop.asked
    assert "again to stop at once" in caplog.text


@pytest.mark.usefixtures("at_once")
def test_second_signal_interrupts_work_that_does_not_end() -> None:
    stop = GentleStop(lambda: None, 60)
    with pytest.raises(KeyboardInterrupt):
        signalled(stop, signal.SIGTERM, signal.SIGTERM)
    assert stop.asked


def test_work_that_does_not_end_in_time_is_interrupted_while_it_waits() -> None:
    with pytest.raises(KeyboardInterrupt):
        signalled(GentleStop(lambda: None, 0.05), signal.SIGINT)


def test_work_without_any_signal_is_left_alone() -> None:
    with on_signal(interrupt), GentleStop(lambda: pytest.fail("asked"), 0.0) as stop:
        pass
    assert not stop.asked
