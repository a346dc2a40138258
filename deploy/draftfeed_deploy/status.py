"""The HTTP side of a service: a page for people at `/`, `/metrics` for Prometheus, `/healthz` and
`/readyz` for whoever restarts and whoever waits, and `/status.json`, which the page shows.

Read-only, without secrets. It listens on loopback unless it is told otherwise.
"""

import errno
import importlib.metadata
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from draftfeed_deploy.board import Board, RecentLog, encoded
from draftfeed_deploy.errors import StatusBindError
from draftfeed_deploy.metrics import Identity
from draftfeed_deploy.page import page

logger = logging.getLogger(__name__)

VERSION = importlib.metadata.version("draftfeed")
FIRST_PORT = 9640
PORTS = 100
"""Tried, when none is configured: several producers may run on one machine."""
HUNG_SECONDS = 30.0
"""A loop that writes to a slow disk, or verifies a large sample, may take a few."""
STALE_SECONDS = 10.0
"""Figures are looked at twice a second."""
REQUEST_SECONDS = 5.0
"""For all of one, question and answer."""
PATIENCE_SECONDS = 1.0
"""Longer ones end when somebody else waits."""
LAST_SECONDS = 30.0
"""For whoever reads the metrics to read them once more; less than a watchdog waits."""
SLACK_SECONDS = 1.0
MAX_REQUESTS = 16
"""At a time; whoever comes then is turned away."""
BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class StatusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bind: str | None = None
    """"HOST:PORT"; of several ranks, of the first. None: the first free port of loopback from 9640
    on."""
    enabled: bool = True

    def __post_init__(self) -> None:
        if self.bind is not None:
            _address(self.bind)


class Answer(NamedTuple):
    status: int
    kind: str
    body: bytes
    policy: str = "default-src 'none'"
    """Content-Security-Policy."""


class Probe(NamedTuple):
    """What a health check says."""

    ok: bool
    words: str


def loop_probe(name: str, turn_seconds: float) -> Probe:
    """turn_seconds: since the loop that moves data last came round."""
    if turn_seconds > HUNG_SECONDS:
        return Probe(False, f"the {name}'s loop has not come round for {turn_seconds:.0f} s")
    return Probe(True, "ok")


def _fresh(age_seconds: float) -> Probe:
    """Of the figures on the page. The service itself may be well."""
    return Probe(age_seconds <= STALE_SECONDS, f"these figures are {age_seconds:.0f} s old")


class Pages(NamedTuple):
    metrics: CollectorRegistry
    healthy: Callable[[], Probe]
    """False: it does not work any more, and a restart may help."""
    ready: Callable[[], Probe]
    """Whether it does its work now."""
    identity: Callable[[], Identity] = lambda: Identity(VERSION)

    def answer(self, path: str) -> Answer:
        match path.partition("?")[0]:
            case "/metrics":
                return Answer(200, CONTENT_TYPE_LATEST, generate_latest(self.metrics))
            case "/healthz":
                return _probe(self.healthy())
            case "/readyz":
                return _probe(self.ready())
        return Answer(404, TEXT, b"there are /, /status.json, /metrics, /healthz and /readyz\n")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"
REBOUND = Answer(421, TEXT, b"no service of that name is here\n")


def _probe(probe: Probe) -> Answer:
    return Answer(200 if probe.ok else 503, TEXT, f"{probe.words}\n".encode())


class Status:
    """The pages of a service while it is entered: there from the beginning, so that a taken port
    is known before anything is taken from anybody, and empty until `show`."""

    def __init__(self, config: StatusConfig, rank: int = 0) -> None:
        """rank: of several on one machine; each has a port of its own, the next one."""
        self._config, self._rank = config, rank
        self.board = Board()
        """To be shown every snapshot of the service."""
        self._log = RecentLog()
        self.url: str | None = None
        """None: it is not wanted."""
        self._server: _Server | None = None

    def __enter__(self) -> "Status":
        """Raises StatusBindError."""
        if self._config.enabled:
            self._server = _bound(self._config, self._rank)
            self._server.board, self._server.log = self.board, self._log
            logging.getLogger().addHandler(self._log)
            self._thread = threading.Thread(
                target=self._server.serve_forever, name="status", daemon=True
            )
            self._thread.start()
            host, port = self._server.server_address[:2]
            self.url = f"http://{_bracketed(str(host))}:{port}"
            logger.info("status page at %s, metrics at %s/metrics", self.url, self.url)
        return self

    def show(self, pages: Pages) -> None:
        if self._server is not None:
            self._server.pages = pages

    def finished(self) -> None:
        """The service has done all that there was to do, and its metrics say so: whoever reads them
        regularly is given the time to see it. Otherwise it would seem to have died."""
        if self._server is not None:
            self._server.finished = True

    def __exit__(self, *exception: object) -> None:
        if self._server is not None:
            if self._server.finished:
                with suppress(KeyboardInterrupt):
                    self._server.readings.await_one()
            logging.getLogger().removeHandler(self._log)
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _bound(config: StatusConfig, rank: int) -> "_Server":
    if config.bind is not None:
        host, port = _address(config.bind)
        return _bind(host, port + rank if port else 0)
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        try:
            return _bind("127.0.0.1", port)
        except StatusBindError:
            continue
    last = FIRST_PORT + PORTS - 1
    raise StatusBindError(f"127.0.0.1:{FIRST_PORT}-{last}", "every port is taken; set bind")


def _bind(host: str, port: int) -> "_Server":
    try:
        return _Server(host, port)
    except (OSError, OverflowError) as error:
        number, reason = 0, str(error)
        if isinstance(error, OSError):
            number, reason = error.errno or 0, error.strerror or reason
        absent = number == errno.EADDRNOTAVAIL
        raise StatusBindError(f"{_bracketed(host)}:{port}", reason, absent=absent) from None


def _address(text: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"bind is {text!r}, it must be HOST:PORT")
    return host.strip("[]"), int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Readings:
    """When the metrics were read."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._times: list[float] = []
        """The last two."""
        self._count = 0

    def add(self) -> None:
        with self._changed:
            self._times = [*self._times[-1:], time.monotonic()]
            self._count += 1
            self._changed.notify_all()

    def await_one(self) -> None:
        """The next one, if there is somebody who reads them regularly."""
        with self._changed:
            before, now = self._count, time.monotonic()
            if len(self._times) < 2:
                return
            first, last = self._times
            due = last + 2 * (last - first) + SLACK_SECONDS
            self._changed.wait_for(
                lambda: self._count > before, min(LAST_SECONDS, max(0.0, due - now))
            )


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = Pages(
            CollectorRegistry(), lambda: Probe(True, "starting"), lambda: Probe(False, "starting")
        )
        self.board, self.log = Board(), RecentLog()
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        self.readings, self.finished = Readings(), False
        self._failed = False
        """A page could not be made, which is said once."""
        self._lock = threading.Lock()
        self._begun: dict[socket.socket, float] = {}
        """When each request did, the oldest first."""
        super().__init__((host, port), _Handler)

    def answer(self, path: str) -> Answer:
        try:
            return self._answer(path)
        except Exception:
            if not self._failed:
                logger.exception("%r cannot be shown", path)
            self._failed = True
            return Answer(
                500, TEXT, b"this page cannot be shown; the service's log has the reason\n"
            )

    def _answer(self, path: str) -> Answer:
        match path.partition("?")[0]:
            case "/":
                return Answer(200, HTML, *page())
            case "/status.json":
                return Answer(200, JSON, self._document())
        return self.pages.answer(path)

    def _document(self) -> bytes:
        healthy, ready = self.pages.healthy(), self.pages.ready()
        document = self.board.document(self.pages.identity(), self.log.lines())
        fresh = _fresh(0.0 if self.finished else document.age_seconds)
        said = next((probe for probe in (healthy, fresh) if not probe.ok), ready)
        return encoded(
            replace(document, healthy=healthy.ok, ready=ready.ok and fresh.ok, state=said.words)
        )

    def process_request(self, request: Any, client_address: Any) -> None:
        if not (self._free.acquire(blocking=False) or self._room_by_force()):
            with suppress(OSError):
                request.setblocking(False)
                request.send(BUSY)
            self.shutdown_request(request)
            return
        with self._lock:
            self._begun[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._begun[request]
            self._free.release()

    def service_actions(self) -> None:
        """Twice a second: a socket's own timeout begins anew with every byte."""
        self._end_older_than(REQUEST_SECONDS)

    def _room_by_force(self) -> bool:
        """Ours take milliseconds: who takes longer sends, or reads, a byte at a time."""
        return self._end_older_than(PATIENCE_SECONDS) and self._free.acquire(timeout=0.2)

    def _end_older_than(self, seconds: float) -> bool:
        """Whether there were such requests."""
        before = time.monotonic() - seconds
        with self._lock:
            slow = [request for request, begun in self._begun.items() if begun < before]
        for request in slow:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        return bool(slow)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody hung up, or sent nonsense."""
        logger.debug("a request from %s came to nothing", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    server_version = "draftfeed"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        assert isinstance(self.server, _Server)
        try:
            rebound = self._rebound()
        except ValueError:
            answer = Answer(400, TEXT, b"that is no host\n")
        else:
            answer = REBOUND if rebound else self.server.answer(self.path)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", answer.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if body:
            self.wfile.write(answer.body)
            if self.path.partition("?")[0] == "/metrics":
                self.server.readings.add()

    def _rebound(self) -> bool:
        """Whether a page from elsewhere asks in the name of whoever looks at it: a name of its own
        that leads to our loopback address. Raises ValueError when it is no name."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or "localhost"
        host_port: Any = self.server.server_address
        return _is_loopback(str(host_port[0])) and host != "localhost" and not _is_loopback(host)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("%s: " + format, self.address_string(), *args)
