"""Which of the target's files the producers have, asked of all of them at once."""

import logging
import time
from collections.abc import Sequence

import zmq

from draftfeed_consumer.assets import AssetsConfig, Stopped, check_files
from draftfeed_consumer.credentials import Credentials
from draftfeed_consumer.errors import AssetError, AssetsLost, NoAssets, StreamClosed
from draftfeed_consumer.line import Line
from draftfeed_consumer.link import LinkDown
from draftfeed_proto import messages as m
from draftfeed_proto.assets import identity
from draftfeed_proto.descriptor import Expectation
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.messages import AssetFile

logger = logging.getLogger(__name__)

POLL_MS = 50
MESSAGES_AT_ONCE = 64
AGAIN_SECONDS = 0.5
"""Before a producer is asked again that is still hashing."""
UNREAD_MESSAGES = 16
"""On connections for files: 128 MiB, if a producer sends what nobody asked for."""
ASKING = "fenced"
"""What a `Line` calls a producer that owes an answer."""

Address = str


def agreed(
    answers: dict[Address, m.Assets], config: AssetsConfig, expect: Expectation
) -> dict[Address, m.Assets]:
    """Those that serve files, which are the same everywhere. Raises AssetError."""
    sources = {address: answer for address, answer in answers.items() if answer.files}
    if not sources:
        raise NoAssets({address: answer.reason for address, answer in answers.items()})
    (first, one), *others = sources.items()
    for address, answer in sources.items():
        check_files(address, answer.files, config.max_bytes)
        if expect.stream_id not in (None, answer.stream_id):
            raise AssetError(
                f"[expect] stream_id is {expect.stream_id}, and {address} serves {answer.stream_id}"
            )
    for address, answer in others:
        if identity(answer.files) != identity(one.files):
            name = _first_difference(one.files, answer.files)
            raise AssetError(f"{first} and {address} serve different targets: {name} differs")
        if answer.stream_id != one.stream_id:
            ids = f"{one.stream_id} and {answer.stream_id}"
            raise AssetError(f"{first} and {address} serve different streams, {ids}")
    return sources


def _first_difference(one: Sequence[AssetFile], other: Sequence[AssetFile]) -> str:
    a, b = ({file.name: file for file in files} for files in (one, other))
    return next(name for name in sorted({*a, *b}) if a.get(name) != b.get(name))


class Listing:
    """Asks all producers at once which files they have."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        addresses: Sequence[Address],
        credentials: Credentials | None,
        stopped: Stopped,
    ) -> None:
        now = time.monotonic()
        self._context, self._stopped = context, stopped
        self._lines = {
            address: Line(address, now, credentials, unread_messages=UNREAD_MESSAGES)
            for address in addresses
        }
        self._answers: dict[Address, m.Assets] = {}
        self._passed: set[Address] = set()
        """Cannot be reached, and need not be waited for when another has files."""
        self._ask_at: dict[Address, float] = {}
        self._heard_at: float | None = None
        """When one first said anything."""

    def __enter__(self) -> "Listing":
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines.values():
            line.drop("closed", time.monotonic())

    def wait(
        self, patience_seconds: float | None, lost_after_seconds: float
    ) -> dict[Address, m.Assets]:
        """Until one with files has answered, and each of the others has, or cannot be reached; in
        the order in which they were named."""
        began = time.monotonic()
        while not self._enough:
            if self._stopped():
                raise StreamClosed
            now = time.monotonic()
            self._turn(now)
            limit = lost_after_seconds if self._heard_at is not None else patience_seconds
            since = now - (self._heard_at or began)
            if limit is not None and since > limit:
                self._give_up(since)
        return {one: self._answers[one] for one in self._lines if one in self._answers}

    @property
    def _enough(self) -> bool:
        if len(self._answers) == len(self._lines):
            return True
        some = any(answer.files for answer in self._answers.values())
        return some and all(a in self._answers or a in self._passed for a in self._lines)

    def _give_up(self, seconds: float) -> None:
        address, line = next((a, b) for a, b in self._lines.items() if a not in self._answers)
        raise AssetsLost(address, "the list of them", seconds, line.reason)

    def _turn(self, now: float) -> None:
        poller = zmq.Poller()
        for line in self._lines.values():
            if line.due(now) and line.address not in self._answers:
                line.begin(self._context, now)
            if line.link is not None:
                line.link.register(poller)
        poller.poll(POLL_MS)
        for line in self._lines.values():
            if line.link is not None:
                self._look(line, time.monotonic())
            if line.to_report(now) and line.address not in self._answers:
                logger.warning("waiting for the producer at %s: %s", line.address, line.reason)

    def _look(self, line: Line, now: float) -> None:
        assert line.link is not None
        try:
            for _ in range(MESSAGES_AT_ONCE):
                if (got := line.link.receive()) is None:
                    break
                self._heard(line, got[0], now)
            if line.link.check() and not line.linked:
                line.up(now)
                self._ask_at[line.address] = now
            if line.linked and now >= self._ask_at.get(line.address, float("inf")):
                line.link.send(m.ListAssets())
                line.asked(now)
                del self._ask_at[line.address]
            if line.address in self._answers:
                line.drop("has answered", now)
            elif overdue := line.overdue(ASKING, now):
                raise LinkDown(overdue)
        except (LinkDown, ProtoError) as error:
            self._passed.add(line.address)
            line.drop(str(error), now)

    def _heard(self, line: Line, message: m.FromProducer, now: float) -> None:
        if self._heard_at is None:
            self._heard_at = now
        match message:
            case m.Assets():
                self._answers[line.address] = message
            case m.Refused(code="malformed"):
                reason = "it is of an older version, which cannot be asked"
                self._answers[line.address] = m.Assets(stream_id="", reason=reason)
            case m.Refused():
                if line.reason != message.reason:
                    logger.info("%s: %s", line.address, message.reason)
                line.reason = message.reason
                line.asked(now)
                self._ask_at[line.address] = now + AGAIN_SECONDS
