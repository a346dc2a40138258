"""Pages of a service with the snapshots that a test speaks of, at a real port."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from draftfeed_deploy.metrics import Identity, registry
from draftfeed_deploy.records import Snapshot
from draftfeed_deploy.status import Pages, Probe, Status, StatusConfig


def identity() -> Identity:
    return Identity("1.2.3")


@contextmanager
def shown(
    snapshot: Callable[[], Snapshot],
    bind: str = "127.0.0.1:0",
    identity: Callable[[], Identity] = identity,
) -> Iterator[str]:
    """The service's address. A snapshot is taken for each request."""
    with Status(StatusConfig(bind=bind)) as status:

        def healthy() -> Probe:
            status.board.show(snapshot())
            return Probe(True, "ok")

        status.show(Pages(registry(snapshot, identity), healthy, ready, identity))
        assert status.url is not None
        yield status.url


def ready() -> Probe:
    return Probe(True, "generating")


@contextmanager
def served(body: bytes, headers: Mapping[str, str] = {}) -> Iterator[str]:
    """The address of a server that is none of ours and says the same at every path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody is interested."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
