"""Signals in the foreground: the first one is ours, the second one everybody's."""

import os
import signal

import pytest

from draftfeed_deploy.foreground import interrupt, on_signal


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
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


def test_sigterm_ends_work_as_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt), on_signal(interrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_are_restored_without_any_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with on_signal(interrupt):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
