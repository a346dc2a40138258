"""What a service tells the service manager that started it (sd_notify(3)).

Nothing is said, and no thread runs, where NOTIFY_SOCKET is not set.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
SEND_SECONDS = 1.0
"""How long a manager that reads slowly is waited for."""
EXTEND_SECONDS = 30.0
"""By how much a start or a stop may go on after each word from us."""
MAX_START_SECONDS = 3600.0
"""A start that takes longer is not going to end."""
MAX_STATUS_BYTES = 1024


class Condition(NamedTuple):
    """How a service is."""

    stage: Literal["starting", "running", "ending"]
    words: str
    """For `systemctl status`: rate, lag and state."""
    turn_seconds: float
    """Since the loop that moves data last came round."""


class Manager:
    """The socket in NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(SEND_SECONDS)

    @classmethod
    def of_environment(cls) -> "Manager | None":
        """Takes the variable out of it: an engine's processes are to say nothing in our name."""
        address = os.environ.pop("NOTIFY_SOCKET", "")
        return cls(address) if address[:1] in ("/", "@") else None

    def tell(self, *assignments: str) -> bool:
        """Whether it has taken them."""
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._address)
        except OSError as error:
            logger.debug("the service manager does not take %s: %s", assignments, error)
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class Announcer:
    """Looks at the service twice a second and tells the manager what it must know.

    The watchdog is fed from here, but only when the service's own loop has come round since it
    was last fed.
    """

    def __init__(self, manager: Manager, look: Callable[[], Condition], end_seconds: float) -> None:
        self.stopping = False
        """Plain: a signal handler may set it, whatever locks its thread holds."""
        self._manager, self._look, self._end_seconds = manager, look, end_seconds
        self._stage = "starting"
        self._since = self._fed_at = time.monotonic()
        self._extend_due = 0.0
        self._words = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, words: str | None) -> None:
        """words: why it ends, when that is an error."""
        self._over.set()
        self._thread.join()
        if words is not None:
            self._say(words)
        elif self.stopping:
            self._enter("ending")
        self._manager.close()

    def reload(self, act: Callable[[], None]) -> None:
        """`act` is what a reload does. A manager that waits for READY=1 hears of no reload before
        that: it would take the end of it for the end of the start."""
        if self._stage != "running":
            act()
            return
        self._manager.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            act()
        finally:
            self._manager.tell("READY=1")

    def _run(self) -> None:
        while True:
            self._take(self._look(), time.monotonic())
            if self._over.wait(LOOK_SECONDS):
                return

    def _take(self, now_is: Condition, now: float) -> None:
        stage = "ending" if self.stopping else now_is.stage
        if stage != "starting" and stage != self._stage != "ending":
            self._enter(stage)
        if self._stage == "running":
            self._feed(now_is.turn_seconds, now)
        else:
            self._extend(now)
        if now_is.words != self._words:
            self._say(now_is.words)

    def _enter(self, stage: str) -> None:
        word = {"running": "READY=1", "ending": "STOPPING=1"}[stage]
        if self._stage != stage and self._manager.tell(word):
            self._stage, self._since = stage, time.monotonic()
            self._extend_due = 0.0

    def _feed(self, turn_seconds: float, now: float) -> None:
        if now - turn_seconds > self._fed_at and self._manager.tell("WATCHDOG=1"):
            self._fed_at = now

    def _extend(self, now: float) -> None:
        limit_seconds = self._end_seconds if self._stage == "ending" else MAX_START_SECONDS
        if self._extend_due <= now < self._since + limit_seconds:
            self._extend_due = now + EXTEND_SECONDS / 3
            self._manager.tell(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1e6:.0f}")

    def _say(self, words: str) -> None:
        line = " ".join(words.split()).encode()[:MAX_STATUS_BYTES].decode(errors="ignore")
        if self._manager.tell(f"STATUS={line}"):
            self._words = words


class Silent:
    """In place of an announcer, where there is no manager."""

    stopping = False

    def reload(self, act: Callable[[], None]) -> None:
        act()


@contextmanager
def announced(look: Callable[[], Condition], end_seconds: float) -> Iterator[Announcer | Silent]:
    """The manager is told how the service is while this is entered; at an error, the error.

    end_seconds: for how long more time is asked for while it ends. What hangs then, in spite of all
    limits of its own, is the manager's to kill.
    """
    manager = Manager.of_environment()
    if manager is None:
        yield Silent()
        return
    announcer = Announcer(manager, look, end_seconds)
    announcer.start()
    words = None
    try:
        yield announcer
    except ValueError as error:
        words = str(error)
        raise
    finally:
        announcer.close(words)
