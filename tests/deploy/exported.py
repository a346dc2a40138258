"""Which time series services have, for tests of what is written about them."""

import re
from collections.abc import Iterable

from prometheus_client.core import Metric

from draftfeed_deploy.metrics import Identity, registry
from draftfeed_deploy.records import Snapshot
from samples import DESCRIPTOR
from snapshots import consumed, produced

_NAME = re.compile(r"\bdraftfeed_(?:producer|consumer)_[a-z_]+")


def families() -> Iterable[Metric]:
    """Of services that have had everything once."""
    for snapshot in (produced(1.0), consumed(1.0, loss=0.5)):
        yield from _collected(snapshot)


def _collected(snapshot: Snapshot) -> Iterable[Metric]:
    return registry(lambda: snapshot, lambda: Identity("1", DESCRIPTOR)).collect()


def names() -> set[str]:
    """With the suffixes of their time series."""
    suffixes = {
        "counter": ("_total",),
        "histogram": ("_bucket", "_sum", "_count"),
        "info": ("_info",),
    }
    return {
        family.name + suffix for family in families() for suffix in suffixes.get(family.type, ("",))
    }


def mentioned(text: str) -> set[str]:
    """Names of ours in queries. Names of recording rules (`instance:...`) are none."""
    without_rules = re.sub(r"\b\w+:[\w:]+", "", text)
    return set(_NAME.findall(without_rules))
