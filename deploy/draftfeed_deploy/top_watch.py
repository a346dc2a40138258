"""Asking many services at a time what they say of themselves."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from draftfeed_deploy.board import Document, decoded
from draftfeed_deploy.errors import ServiceUnreachable
from draftfeed_deploy.scrapes import fetch, no_answer
from draftfeed_deploy.status import FIRST_PORT, PORTS

ASK_SECONDS = 2.0
CONNECT_SECONDS = 0.2
SEARCH_SECONDS = 5.0
EVERY_SECONDS = 1.0
FIRST_SECONDS = 10.0
POLL_SECONDS = 0.02
MOST_SERVICES = 100
"""As many as ports are looked at."""


class Service(NamedTuple):
    """What is known of one: the last it said, and since when it has said nothing."""

    url: str
    document: Document | None = None
    """None: it has not answered yet."""
    gone_since: float | None = None
    """Unix time."""
    why: str = ""

    @property
    def name(self) -> str:
        return self.url.partition("://")[2]


class Watch:
    """Asks each service in a thread of its own, while it is entered: one that hangs holds up no
    other, and nobody waits for it at the end."""

    def __init__(self, urls: Sequence[str] = (), every_seconds: float = EVERY_SECONDS) -> None:
        """urls: as base_url gives them; none: whatever is found on this machine, as it comes."""
        self._find, self._every_seconds = not urls, every_seconds
        self._lock = threading.Lock()
        self._services = {url: Service(url) for url in urls}
        self._searched, self._over = threading.Event(), threading.Event()

    def __enter__(self) -> "Watch":
        for url in list(self._services):
            self._start(self._ask, url)
        if self._find:
            self._start(self._search)
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()

    def services(self) -> list[Service]:
        with self._lock:
            return list(self._services.values())

    def wait(self) -> None:
        """Until each has answered or failed to, and this machine has been searched."""
        deadline = time.monotonic() + FIRST_SECONDS
        if self._find:
            self._searched.wait(FIRST_SECONDS)
        while time.monotonic() < deadline and not all(map(_known, self.services())):
            self._over.wait(POLL_SECONDS)

    def _start(self, act: Callable[..., None], *arguments: str) -> threading.Thread:
        thread = threading.Thread(target=act, args=arguments, name="top", daemon=True)
        thread.start()
        return thread

    def _ask(self, url: str) -> None:
        service = self._services[url]
        while not self._over.is_set():
            service = asked(service)
            with self._lock:
                self._services[url] = service
            self._over.wait(self._every_seconds)

    def _search(self) -> None:
        while not self._over.is_set():
            known = {service.url for service in self.services()}
            fresh = [url for url in open_ports() if url not in known]
            for thread in [self._start(self._consider, url) for url in fresh]:
                thread.join()  # each has its limit of time, and they are asked together
            self._searched.set()
            self._over.wait(SEARCH_SECONDS)

    def _consider(self, url: str) -> None:
        """Shown from now on, if it is a service, or one that hangs, for all that can be seen."""
        service = asked(Service(url))
        if not (_is_service(service) or service.why == no_answer(ASK_SECONDS)):
            return
        with self._lock:
            self._services[url] = service
        self._start(self._ask, url)


def _known(service: Service) -> bool:
    return service.document is not None or service.gone_since is not None


def _is_service(service: Service) -> bool:
    """And not somebody else's, who has taken a port of that range."""
    return service.document is not None and bool(service.document.version)


def open_ports() -> list[str]:
    """Of those that services take when none is configured."""
    found = []
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        with socket.socket() as probe:
            probe.settimeout(CONNECT_SECONDS)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.append(f"http://127.0.0.1:{port}")
    return found


def asked(service: Service) -> Service:
    """What is known of it now."""
    try:
        text = fetch(f"{service.url}/status.json", ASK_SECONDS)
        return Service(service.url, decoded(text))
    except ServiceUnreachable as error:
        why = error.reason
    except (msgspec.DecodeError, RecursionError):
        why = "what it says is no status of a service"
    return service._replace(gone_since=service.gone_since or time.time(), why=why)


class Totals(Struct, frozen=True):
    """Of several services, per second and interval, the newest last."""

    interval_seconds: float
    logical_bytes: list[float]
    wire_bytes: list[float]
    tokens: list[float]


def totals(documents: Sequence[Document]) -> Totals:
    """Sums, interval by interval from now back; of producers where there are any, since consumers
    see the same bytes."""
    producers = [one for one in documents if one.service == "producer"]
    counted = [one.rates for one in producers or documents]
    return Totals(
        counted[0].interval_seconds if counted else 0.0,
        _summed([one.logical_bytes for one in counted]),
        _summed([one.wire_bytes for one in counted]),
        _summed([one.tokens for one in counted]),
    )


def _summed(series: Sequence[Sequence[float]]) -> list[float]:
    longest = max(map(len, series), default=0)
    return [sum(one[-back] for one in series if back <= len(one)) for back in range(longest, 0, -1)]
