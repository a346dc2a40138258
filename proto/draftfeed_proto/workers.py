"""Threads that encode or decode chunks. Codecs and checksums leave the interpreter to others while
they run, so that several of them run side by side."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """With one thread there is none: the one that submits does the work itself, at once. So it
    does after `close`, and while the interpreter ends, when no thread takes any more."""

    def __init__(self, threads: int = 1) -> None:
        self.ahead = threads if threads > 1 else 0
        """How much should be under way before one waits for the first of it."""
        self._executor = _started(threads) if threads > 1 else None

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        if self._executor is not None:
            with suppress(RuntimeError):
                return self._executor.submit(work, *args, **kwargs)
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - `result` raises it
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Returns when nothing is under way any more."""
        if self._executor is not None:
            self._executor.shutdown()


def _started(threads: int) -> ThreadPoolExecutor:
    """All threads run when it returns. An executor starts them as work comes, and when it may not,
    it raises an error and has taken the work nevertheless. Raises RuntimeError."""
    executor = ThreadPoolExecutor(threads, "codec")
    together = Barrier(threads)
    try:
        waiting = [executor.submit(together.wait) for _ in range(threads)]
    except RuntimeError:
        together.abort()
        executor.shutdown(cancel_futures=True)
        raise
    for future in waiting:
        future.result()
    return executor


INLINE = Workers()
