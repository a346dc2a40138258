"""Copies of a world, and a key under which two worlds that will behave alike are the same.

Names are drawn from a counter; a key numbers them in the order in which they appear. Times only
matter as far as the session timeout has passed. Byte counters are far below the size of a credit,
and figures that only statistics read are left out; the tensors of a half-received sample follow
from how many chunks of it have come.
"""

import copyreg
import hashlib
import io
import pickle
import re
from collections import deque
from functools import cache
from typing import Any

import msgspec

from draftfeed_producer.fencing import Fencing
from draftfeed_producer.session import Member
from draftfeed_producer.stock import Stock
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import SampleHeader
from model_producer import TIMEOUT_SECONDS
from model_samples import DESCRIPTOR, header
from model_world import World

_SKIPPED = {
    "_lock",
    "_make_name",
    "_new_name",
    "_header_of",
    "_next",
    "_received_bytes",
    "_credit_bytes",
    "credit_bytes",
    "sent_bytes",
    "granted_bytes",
    "logical_bytes",
    "trained_count",
    "copies",
    "replayable",
    "_states",
    "_tokens",
    "now",
    "names",
    "touched",
    "_links",
}
_PLAIN = frozenset([int, float, str, bytes, bool, type(None)])
_CONSTANT = frozenset([Descriptor, Shards])
_NAME = re.compile(rb"~\d{4}")


def _same_descriptor() -> Descriptor:
    return DESCRIPTOR


def _same_header(id: SampleId) -> SampleHeader:
    return header(id)


_LOOKED_UP: dict[type, Any] = {
    **copyreg.dispatch_table,
    Descriptor: lambda one: (_same_descriptor, ()),
    SampleHeader: lambda one: (_same_header, (one.id,)),
}
"""What never changes is not copied."""


def snapshot(world: World) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = _LOOKED_UP
    pickler.dump(world)
    return buffer.getvalue()


def restored(snapshot: bytes) -> World:
    world: World = pickle.loads(snapshot)
    return world


def key(world: World) -> bytes:
    """Of 16 bytes."""
    data = repr(_Freezer(world.now).freeze(world)).encode()
    names: dict[bytes, bytes] = {}
    data = _NAME.sub(lambda found: names.setdefault(found[0], b"%d" % len(names)), data)
    return hashlib.blake2b(data, digest_size=16).digest()


@cache
def _encoded(value: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(value)


class _Freezer:
    """Plain lists with the same contents, the same for equal ones."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._seen: dict[int, int] = {}

    def freeze(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is SampleId:
            return (value.shard, value.ordinal)
        if kind is list or kind is tuple or kind is deque:
            return [one if type(one) in _PLAIN else self.freeze(one) for one in value]
        if kind is dict:
            return [(self.freeze(k), self.freeze(v)) for k, v in value.items()]
        if kind is set or kind is frozenset:
            return {"set": sorted(map(self.freeze, value))} if value else ""
        if kind is IdSet:
            return [(shard, edges) for (_, _, shard), edges in value.by_partition()]
        return self._other(kind, value)

    def _other(self, kind: type, value: Any) -> Any:
        if kind is SampleHeader:
            return self.freeze(value.id)
        if isinstance(value, msgspec.Struct):
            return _encoded(value) if kind in _CONSTANT else msgspec.msgpack.encode(value)
        if isinstance(value, tuple):
            return [kind.__name__, *map(self.freeze, value)]
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, Stock):
            order = sorted(value, key=value._order.__getitem__)
            return [self.freeze(order), self.freeze(value.queued)]
        fields = value.__dict__
        if isinstance(value, Member | Fencing):
            fields = {**fields, **self._since(fields)}
        return [
            inner if type(inner) in _PLAIN else self.freeze(inner)
            for name, inner in fields.items()
            if name not in _SKIPPED
        ]

    def _since(self, fields: dict[str, Any]) -> dict[str, bool]:
        """Whether the session timeout has passed."""
        return {
            name: self._now - fields[name] >= TIMEOUT_SECONDS
            for name in ("gone_since", "_began_at")
            if name in fields
        }
