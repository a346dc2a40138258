"""`draftfeed consumer --ranks N`: this machine's ranks, started by torchrun's agent.

torchrun itself ends with 1 whatever its ranks ended with, and starts those anew that another node
has replaced. A service manager has to tell these apart, so here the first fault ends all ranks, and
its exit code is ours; whoever starts services starts this one again.
"""

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from draftfeed_deploy import exits
from draftfeed_deploy.rank import PARENT

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
SHUTDOWN_SECONDS = 30
"""For the others to end, when one has."""
ABORT_SECONDS = 2.0
AGENT_LOG = "torch.distributed.elastic.multiprocessing.api"


def run_ranks(count: int) -> int:
    """Runs this process's own command line `count` times, and returns the exit code of them all
    together. SIGTERM and SIGINT are passed on: the ranks drain."""
    return _Group(count).run()


class _Group:
    def __init__(self, count: int) -> None:
        self._count = count
        self._asked = 0
        """Plain: a signal handler counts here."""
        self._told: dict[int, int] = {}
        """How often each rank was told to end, by its process id."""
        self._outcome: int | BaseException = exits.FAILED

    def run(self) -> int:
        """Raises what kept the ranks from being started."""
        # They are on one machine: nobody else has to reach them.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ[PARENT] = str(os.getpid())
        # It says that signals do not reach it in a thread; they reach us.
        logging.getLogger(AGENT_LOG).setLevel(logging.ERROR)
        acts = {signal.SIGTERM: self._ask, signal.SIGINT: self._ask, signal.SIGABRT: _abort}
        before = {kind: signal.signal(kind, act) for kind, act in acts.items()}
        try:
            agent = threading.Thread(target=self._launch, name="ranks", daemon=True)
            agent.start()
            while agent.is_alive():
                agent.join(POLL_SECONDS)
                self._tell()
        finally:
            for kind, handler in before.items():
                if handler is not None:  # else it is faulthandler's, which Python cannot put back
                    signal.signal(kind, handler)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1

    def _tell(self) -> None:
        """Ranks that come up later, too."""
        for pid in _children():
            if self._told.get(pid, 0) < self._asked:
                self._told[pid] = self._told.get(pid, 0) + 1
                _kill(pid, signal.SIGTERM)

    def _launch(self) -> None:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._count,
            run_id=secrets.token_hex(8),
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        try:
            elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
            self._outcome = exits.DONE
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            self._outcome = self._code(codes)
        except BaseException as error:  # noqa: BLE001 - it is raised in the main thread
            self._outcome = error

    def _code(self, codes: list[int]) -> int:
        if self._asked and set(codes) == {-signal.SIGTERM}:
            logger.info("stopped before the ranks were up: nothing was trained")
            return exits.DONE
        if self._asked and exits.INTERRUPTED in codes:
            return exits.INTERRUPTED
        return code_of_ranks(codes)


def code_of_ranks(codes: Iterable[int]) -> int:
    """codes: of all that did not end with 0; -N: by signal N. Some only follow from others: a rank
    without the rest, or one that was told to end because another had failed."""
    found = set(codes)
    return next((code for code in (exits.FENCED, exits.WRONG_INPUT) if code in found), exits.FAILED)


def _abort(number: int, frame: FrameType | None) -> None:
    """The watchdog's: it is the ranks that hang, and say where (PYTHONFAULTHANDLER)."""
    for pid in _children():
        _kill(pid, signal.SIGABRT)
    until = time.monotonic() + ABORT_SECONDS
    while _children() and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGABRT)


def _kill(pid: int, kind: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, kind)


def _children() -> list[int]:
    """Only ranks are started by this process."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in _words(task / "children")]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # that thread has ended
        return []
