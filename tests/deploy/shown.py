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
    """The service's address."""

    def ok() -> Probe:
        return Probe(True, "ok")

    with Status(StatusConfig(bind=bind)) as status:
        status.show(Pages(registry(snapshot, identity), ok, ok))
        assert status.url is not None
        yield status.url
