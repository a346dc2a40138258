"""Where a producer's samples are: asked from the running one, or read from its spool."""

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import zmq

from draftfeed_deploy.errors import ConfigError
from draftfeed_producer.archive.reader import ArchiveReader
from draftfeed_producer.archive.roots import NAME
from draftfeed_producer.errors import ArchiveError
from draftfeed_producer.spool.control import Tombstone
from draftfeed_producer.spool.reader import Reader
from draftfeed_proto import messages as m
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.keys import KeyPair, is_ipv6
from draftfeed_proto.limits import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

_ANYWHERE = re.compile(r"//(\*|0\.0\.0\.0|\[::\])")


class Source(NamedTuple):
    account: m.Account
    asked: str
    """The address that answered, or the spool directory."""
    running: bool


def ask(address: str, timeout_seconds: float, keys: KeyPair | None = None) -> Source | None:
    """None when nobody answers in time. Raises ConfigError for what is no address, and ProtoError
    for an answer that is none, or a refusal.

    keys: the producer's own, if it has any.
    """
    address = _ANYWHERE.sub("//127.0.0.1", address)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, is_ipv6(address))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            reason = f"is no address to connect to ({error}); give --address"
            raise ConfigError(address, reason) from None
        socket.send(m.encode(m.Inquire()))
        account = _answer(socket, time.monotonic() + timeout_seconds)
    return Source(account, address, True) if account is not None else None


def _answer(socket: "zmq.Socket[bytes]", deadline: float) -> m.Account | None:
    while (left_seconds := deadline - time.monotonic()) > 0:
        if socket.poll(int(1000 * left_seconds) + 1):
            message = m.decode_from_producer(socket.recv_multipart()[0])
            if isinstance(message, m.Account):
                return message
            if isinstance(message, m.Refused):
                raise ProtoError(f"the producer refuses to say: {message.reason}")
    return None


def read_spool(directory: Path, prompts: IdSet, roots: tuple[Path, ...] = ()) -> Source:
    """What a spool says without its producer: nobody is asked what members hold, and which lines
    are no prompts is not known, so those count as still to be generated.

    prompts: ids of all lines of the file. roots: of its archive, if it has one. Raises SpoolError.
    """
    reader = Reader(directory)
    control, committed = reader.control, reader.control.committed
    stored = IdSet(record.header.id for record in reader.records())
    ended = {state: ids - committed for state, ids in _by_state(control.tombstones).items()}
    over = IdSet.union([committed, *ended.values()])
    pending = prompts.within(reader.shards) - over - stored
    if roots:
        lines = IdSet.union([stored.in_epoch(0), archived_lines(reader, roots)])
        shelved = pending & IdSet.union(map(lines.in_epoch, reader.shards.each_epoch))
        pending, stored = pending - shelved, IdSet.union([stored, shelved])
    term = control.term
    account = m.Account(
        shards=reader.shards,
        committed=committed.to_wire(),
        leased=[],
        deliverable=(stored - over).to_wire(),
        terminal={state: ids.to_wire() for state, ids in ended.items()},
        pending=pending.to_wire(),
        regenerated=control.regenerated.to_wire(),
        group=term.group if term else "",
        term=term.term if term else 0,
        commit_number=control.commits[-1].number if control.commits else 0,
    )
    return Source(account, str(directory), False)


def archived_lines(spool: Reader, roots: tuple[Path, ...]) -> IdSet:
    """Lines of the prompt file, in epoch 0, that can be served out of the archive. A root that is
    missing is said so: its samples count as if there were none. Raises ArchiveError."""
    there = tuple(root for root in roots if (root / NAME).exists())
    for root in set(roots) - set(there):
        logger.warning("%s is no archive: not mounted, or not begun; nothing there counts", root)
    if not there:
        return IdSet()
    archive = ArchiveReader(there)
    if strange := archive.contents.strange(spool.owner.descriptor.stream_id(), []):
        raise ArchiveError(there[0], strange)
    return archive.lines


def _by_state(tombstones: Mapping[SampleId, Tombstone]) -> dict[str, IdSet]:
    states: dict[str, IdSet] = {}
    for id, tombstone in tombstones.items():
        states.setdefault(tombstone.state, IdSet()).add(id)
    return states
