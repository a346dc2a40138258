"""Asking a running service over HTTP: its metrics by name, or any other page of it."""

import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from draftfeed_deploy.errors import ServiceUnreachable

TIMEOUT_SECONDS = 5.0
MOST_BYTES = 4 << 20
"""Of an answer."""
READ_BYTES = 1 << 16
Labels = tuple[tuple[str, str], ...]


def base_url(text: str) -> str:
    """ "http://HOST:PORT" of that, of HOST:PORT or of one of the service's pages.

    Raises ServiceUnreachable.
    """
    refused = ServiceUnreachable(text, "is not the address of a service, http://HOST:PORT")
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise refused from None
    if not known or any(not character.isprintable() or character == " " for character in url):
        raise refused
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/status.json")
    return f"{parts.scheme}://{parts.netloc}{path}"


def no_answer(timeout_seconds: float) -> str:
    """The reason of an error."""
    return f"no answer within {timeout_seconds:g} s"


def fetch(url: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bytes:
    """The body of what is there, in all within the time. Asks nobody in between, and follows no
    redirection: who answers must be who was asked. Raises ServiceUnreachable."""
    deadline = time.monotonic() + timeout_seconds
    try:
        with closing(_connection(url, timeout_seconds)) as connection:
            connection.connect()
            with _cut_off(connection.sock, deadline):
                body = _body(url, connection)
            if time.monotonic() >= deadline:  # it looks like the end of what is sent
                raise TimeoutError
            return body
    except UnicodeError:  # a host with a part that is empty or too long, a path beyond ASCII
        raise ServiceUnreachable(url, "is not an address that can be asked") from None
    except (OSError, HTTPException) as error:
        late = isinstance(error, TimeoutError) or time.monotonic() >= deadline
        reason = no_answer(timeout_seconds) if late else _words(error)
        raise ServiceUnreachable(url, reason) from None


def _connection(url: str, timeout_seconds: float) -> HTTPConnection:
    """Raises UnicodeError."""
    parts = urlsplit(url)
    parts.path.encode("ascii")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_seconds)


@contextmanager
def _cut_off(connected: socket.socket, deadline: float) -> Iterator[None]:
    """At the deadline, in the middle of whatever it is: the timeout of a socket is for each of its
    parts, and some servers send a byte at a time."""

    def cut() -> None:
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _body(url: str, connection: HTTPConnection) -> bytes:
    parts = urlsplit(url)
    connection.request("GET", parts.path + (f"?{parts.query}" if parts.query else "") or "/")
    answer = connection.getresponse()
    if answer.status != HTTPStatus.OK:
        raise ServiceUnreachable(url, f"answers with {answer.status}")
    body = bytearray()
    while part := answer.read1(READ_BYTES):
        body += part
        if len(body) > MOST_BYTES:
            raise ServiceUnreachable(url, f"its answer has more than {MOST_BYTES} bytes")
    return bytes(body)


def _words(error: Exception) -> str:
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(words.split())[:200].lower()


class Scrape(NamedTuple):
    """A service's metrics at one moment."""

    seconds: float
    """Monotonic, of when they were asked for."""
    values: Mapping[tuple[str, Labels], float]

    def value(self, name: str, default: float = 0.0, **labels: str) -> float:
        return self.values.get((name, tuple(sorted(labels.items()))), default)

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's values by one of its labels; empty when there is none of that name."""
        return {
            dict(labels)[label]: value
            for (found, labels), value in self.values.items()
            if found == name and label in dict(labels)
        }

    def labels(self, name: str) -> dict[str, str]:
        """Those of an info metric."""
        return next((dict(labels) for found, labels in self.values if found == name), {})

    def has(self, name: str) -> bool:
        return any(found == name for found, _ in self.values)


def scrape(url: str) -> Scrape:
    """url: as base_url gives it. Raises ServiceUnreachable."""
    seconds = time.monotonic()
    text = fetch(f"{url}/metrics").decode(errors="replace")
    try:
        return Scrape(seconds, dict(_values(text)))
    except (ValueError, IndexError, KeyError) as error:
        raise ServiceUnreachable(url, f"its metrics cannot be read: {error}") from None


def _values(text: str) -> Iterable[tuple[tuple[str, Labels], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if math.isfinite(sample.value):
                yield (sample.name, _labels(sample.labels)), sample.value


def _labels(found: Mapping[str, str]) -> Labels:
    """They are shown in terminals, where a stranger's escapes would be obeyed."""
    return tuple(sorted((name, printable(value)) for name, value in found.items()))


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
