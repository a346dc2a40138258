"""What both services need in the foreground: signals, statistics, progress."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from draftfeed_deploy.errors import OutputError
from draftfeed_deploy.monitor import JsonLines, Monitor, View
from draftfeed_deploy.progress import Lines, Panels
from draftfeed_deploy.records import Snapshot


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
    name: str, snapshot: Callable[[], Snapshot], run_dir: Path | None, console: Console
) -> Iterator[None]:
    """Statistics to `run_dir`/stats.jsonl, and to the terminal or the log."""
    with ExitStack() as stack:
        log = open_log(stack, run_dir, "stats.jsonl")
        view: View = Lines(name)
        if console.is_terminal:
            view = stack.enter_context(Panels(console, [name])).view(name)
        with Monitor(snapshot, log, view):
            yield


def interrupt() -> None:
    """For `on_signal`: SIGTERM ends the main thread's work as Ctrl-C does, wherever it is."""
    raise KeyboardInterrupt


@contextmanager
def on_signal(act: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `act`; the second one acts as it would without us."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        act()

    assert threading.current_thread() is threading.main_thread()
    for kind in kinds:
        signal.signal(kind, handle)
    try:
        yield
    finally:
        restore()
