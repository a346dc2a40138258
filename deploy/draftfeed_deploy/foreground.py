"""What both services need in the foreground: signals, statistics, progress."""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from draftfeed_deploy.errors import OutputError
from draftfeed_deploy.monitor import JsonLines, Monitor, View
from draftfeed_deploy.progress import Lines, Panels
from draftfeed_deploy.records import Snapshot

logger = logging.getLogger(__name__)

ONCE_SECONDS = 0.5
"""timeout(1), and whatever passes a terminal's Ctrl-C on, send each signal twice: to the process
and to its group."""


def open_log(stack: ExitStack, run_dir: Path | None, name: str) -> JsonLines | None:
    """Raises OutputError."""
    if run_dir is None:
        return None
    path = run_dir / name
    try:
        log = JsonLines(path)
    except OSError as error:
        raise OutputError(path, error, "choose another --run-dir") from None
    stack.callback(log.close)
    return log


@contextmanager
def watched(
    name: str,
    snapshot: Callable[[], Snapshot],
    run_dir: Path | None,
    console: Console,
    board: View,
) -> Iterator[None]:
    """Statistics to `run_dir`/stats.jsonl, to the terminal or the log, and to the status page."""
    with ExitStack() as stack:
        log = open_log(stack, run_dir, "stats.jsonl")
        view: View = Lines(name)
        if console.is_terminal:
            view = stack.enter_context(Panels(console, [name])).view(name)
        with Monitor(snapshot, log, [board, view]):  # a terminal may be held up
            yield


@contextmanager
def phase(console: Console, what: str) -> Iterator[None]:
    """Say what takes its time: on a terminal while it does, elsewhere in the log."""
    if not console.is_terminal:
        logger.info("%s", what)
        yield
        return
    with console.status(what):
        yield


def interrupt() -> None:
    """For `on_signal`: SIGTERM ends the main thread's work as Ctrl-C does, wherever it is."""
    raise KeyboardInterrupt


@contextmanager
def on_signal(act: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `act`; the second one acts as it would without us, unless it is the
    same within ONCE_SECONDS."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    first: tuple[int, float] | None = None

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = (number, time.monotonic())
            act()
        elif number != first[0] or time.monotonic() - first[1] >= ONCE_SECONDS:
            restore()
            signal.raise_signal(number)

    assert threading.current_thread() is threading.main_thread()
    for kind in kinds:
        signal.signal(kind, handle)
    try:
        yield
    finally:
        restore()


@contextmanager
def on_hangup(act: Callable[[], None]) -> Iterator[None]:
    """SIGHUP calls `act` in a thread, since it may have interrupted the holder of any lock."""

    def handle(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=act, name="reload", daemon=True).start()

    before = signal.signal(signal.SIGHUP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class GentleStop:
    """Asks the main thread's work to end, once; raises KeyboardInterrupt there when it has not
    ended in time. A second signal does that at once, if `on_signal(interrupt)` lies around this.

    Logging and waiting are a thread's: a signal handler may have interrupted the holder of any
    lock that it would need.
    """

    def __init__(self, ask: Callable[[], None], seconds: float) -> None:
        """ask: called in the signal handler."""
        self.asked = False
        # Our own signal must not be taken for the first one, sent twice.
        self._ask, self._seconds = ask, max(seconds, ONCE_SECONDS)
        self._reader, self._writer = os.pipe()
        self._lock, self._over = threading.Lock(), False
        self._thread = threading.Thread(target=self._watch, name="gentle stop", daemon=True)

    def __enter__(self) -> "GentleStop":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._over = True
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def begin(self) -> None:
        """For `on_signal`."""
        self.asked = True
        self._ask()
        os.write(self._writer, b"\0")

    def _watch(self) -> None:
        if not os.read(self._reader, 1):
            return
        logger.info(
            "draining: what the trainer has is trained and committed; again to stop at once"
        )
        if select.select([self._reader], [], [], self._seconds)[0]:
            return
        logger.error("not drained within %.0f s; stopping at once", self._seconds)
        with self._lock:
            main = threading.main_thread().ident
            if not self._over and main is not None:
                signal.pthread_kill(main, signal.SIGINT)
