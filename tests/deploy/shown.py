"""Pages of a service with the snapshots that a test speaks of, at a real port."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from draftfeed_deploy.metrics import Identity, registry
from draftfeed_deploy.records import Snapshot
from draftfeed_deploy.status import Pages, Probe, Status, StatusConfig


def identity() -> Identity:
    return Identity("1.2.3")


@contextmanager
def shown(snapshot: Callable[[], Snapshot], bind: str = "127.0.0.1:0") -> Iterator[str]:
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
