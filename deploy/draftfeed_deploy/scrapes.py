"""Asking a running service over HTTP: its metrics by name, or any other page of it."""

import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from http.client import HTTPException, HTTPMessage
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from draftfeed_deploy.errors import ServiceUnreachable

TIMEOUT_SECONDS = 5.0
MOST_BYTES = 4 << 20
"""Of an answer."""
READ_BYTES = 1 << 16
Labels = tuple[tuple[str, str], ...]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Who answers must be who was asked."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
"""Services are in our own network: no proxy in between."""


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


def fetch(url: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bytes:
    """The body of what is there, in all within the time. Raises ServiceUnreachable."""
    deadline = time.monotonic() + timeout_seconds
    try:
        with _OPENER.open(url, timeout=timeout_seconds) as answer:
            body = bytearray()
            while part := answer.read1(READ_BYTES):
                body += part
                if len(body) > MOST_BYTES:
                    raise ServiceUnreachable(url, f"its answer has more than {MOST_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError
            return bytes(body)
    except urllib.error.HTTPError as error:
        error.close()
        raise ServiceUnreachable(url, f"answers with {error.code}") from None
    except TimeoutError:
        raise ServiceUnreachable(url, f"no answer within {timeout_seconds:g} s") from None
    except UnicodeError:  # a host with a part that is empty or too long, a path beyond ASCII
        raise ServiceUnreachable(url, "is not an address that can be asked") from None
    except (OSError, HTTPException) as error:
        raise ServiceUnreachable(url, _words(error)) from None


def _words(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    words = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
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
                yield (sample.name, tuple(sorted(sample.labels.items()))), sample.value
