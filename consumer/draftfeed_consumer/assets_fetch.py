"""Fetching the target's files from the producers, over connections of their own.

It happens before a stream is taken from anybody: gigabytes may travel for minutes.
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import zmq

from draftfeed_consumer.assets import (
    AssetsConfig,
    PartFile,
    Stopped,
    TargetDirectory,
)
from draftfeed_consumer.assets_listing import (
    ASKING,
    POLL_MS,
    UNREAD_MESSAGES,
    Address,
    Listing,
    agreed,
)
from draftfeed_consumer.assets_progress import Progress
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.errors import AssetError, AssetsLost, StreamClosed
from draftfeed_consumer.line import Line
from draftfeed_consumer.link import LinkDown
from draftfeed_proto import messages as m
from draftfeed_proto.assets import identity
from draftfeed_proto.descriptor import Expectation
from draftfeed_proto.errors import MalformedMessage, ProtoError
from draftfeed_proto.limits import MAX_ASSET_PIECE_BYTES
from draftfeed_proto.messages import AssetFile

logger = logging.getLogger(__name__)

WINDOW = 4
"""Pieces that are asked for and have not come."""
MAX_FAULTS = 3
"""Answers that are not what was asked for; a cable may spoil one."""


class Fetched(NamedTuple):
    directory: TargetDirectory
    stream_id: str
    """Of the stream that the files belong to."""
    fetched_bytes: int
    """What had to travel now."""


class _Refused(Exception):
    """The producer will not send it; another one may."""


def fetch_target(
    producer: ClientConfig,
    config: AssetsConfig,
    *,
    expect: Expectation = Expectation(),  # noqa: B008 - frozen
    without: Collection[Address] = (),
    stopped: Stopped = lambda: False,
    patience_seconds: float | None = None,
) -> Fetched:
    """The target's files in the cache, complete and verified; what is there does not travel again.
    They come from the first of the addresses that has them, and from the next where it fails.

    without: producers that are not asked. patience_seconds: for a producer to be there; None: for
    as long as it takes, as a stream is waited for. Once one has answered, it is
    `lost_after_seconds`.

    Raises NoAssets when the producers have none, AssetError, AssetsLost, AddressError, and
    StreamClosed when stopped.
    """
    addresses = [address for address in producer.addresses if address not in without]
    credentials = producer.credentials()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        lost_after = producer.lost_after_seconds
        with Listing(context, addresses, credentials, stopped) as listing:
            answers = listing.wait(patience_seconds, lost_after)
        sources = agreed(answers, config, expect)
        first = next(iter(sources.values()))
        directory = TargetDirectory(config.root, first.files)
        fetched = 0
        if not directory.complete:
            now = time.monotonic()
            lines = [
                Line(address, now, credentials, unread_messages=UNREAD_MESSAGES)
                for address in sources
            ]
            with _Download(context, directory, lines, config, lost_after, stopped) as one:
                fetched = one.run()
        return Fetched(directory, first.stream_id, fetched)
    finally:
        context.term()


class _Request(NamedTuple):
    name: str
    offset: int
    bytes: int


class _Download:
    """Fills one directory, from one producer at a time."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        directory: TargetDirectory,
        lines: Sequence[Line],
        config: AssetsConfig,
        lost_after_seconds: float,
        stopped: Stopped,
    ) -> None:
        now = time.monotonic()
        self._context, self._directory, self._stopped = context, directory, stopped
        self._lines = deque(lines)
        """The first is the one that is asked."""
        self._stall_seconds, self._lost_after_seconds = config.stall_seconds, lost_after_seconds
        self._listed = False
        """The one that is asked has said that it has these files."""
        self._requests: deque[_Request] = deque()
        self._asked_to = 0
        """Of the file that is coming: the end of what is asked for."""
        self._moved_at = self._came_at = now
        """When the connection was of use last, and when a piece came."""
        self._faults = 0
        self._reported_at = float("-inf")

    def __enter__(self) -> "_Download":
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines:
            line.drop("closed", time.monotonic())

    def run(self) -> int:
        """Bytes that travelled."""
        directory = self._directory
        with directory.lock(self._stopped, self._say_waiting):
            if directory.complete:  # while we waited for the lock
                return 0
            directory.check_space()
            total = sum(file.bytes for file in directory.files)
            self._progress = Progress(total, total - directory.missing_bytes())
            self._came_at = time.monotonic()
            for file in directory.missing():
                self._fetch(file)
            directory.finish()
        self._progress.done(str(directory.path))
        return self._progress.travelled

    def _say_waiting(self) -> None:
        if time.monotonic() - self._reported_at > 10:
            self._reported_at = time.monotonic()
            logger.info("another process on this machine fetches the target's files; waiting")

    def _fetch(self, file: AssetFile) -> None:
        with PartFile(self._directory, file) as part:
            part.resume(self._stopped)
            for last in (False, True):
                for data in self._pieces(file, part.size):
                    part.write(data)
                size = part.size
                if part.finish():
                    return
                self._progress.lost(size)
                address = self._lines[0].address
                if last:
                    raise AssetError(
                        f"{file.name} came twice with another SHA-256 than {address} says that it "
                        "has; what the producer reads, or the way here, is damaged"
                    )
                logger.warning("%s has another SHA-256 than promised: once more", file.name)
                self._next_producer(f"{file.name} is damaged")

    def _pieces(self, file: AssetFile, start: int) -> Iterator[memoryview | bytes]:
        """The file from there on, in order, whatever happens to the connection."""
        offset = self._asked_to = start
        self._requests.clear()
        self._came_at = self._moved_at = time.monotonic()
        while offset < file.bytes:
            if self._stopped():
                raise StreamClosed
            try:
                piece = self._turn(file)
            except (LinkDown, ProtoError, _Refused) as error:
                if not isinstance(error, LinkDown):
                    self._count_fault(error)
                self._next_producer(str(error))
                self._asked_to = offset
                self._check_patience(file, offset, str(error))
                continue
            if piece is not None:
                offset += len(piece)
                self._progress.add(len(piece))
                yield piece
                # From here on: a disk that takes its time is no silence of the producer's.
                self._came_at = self._moved_at = time.monotonic()

    def _turn(self, file: AssetFile) -> memoryview | None:
        """Ask, wait, and read one message; the next piece if it is one.

        Raises LinkDown, ProtoError and _Refused, and AssetError when another target is served now.
        """
        now = time.monotonic()
        line = self._lines[0]
        if line.link is None:
            if not line.due(now):
                time.sleep(POLL_MS / 1000)
                return None
            line.begin(self._context, now)
            self._moved_at = now
            if line.link is None:
                return None
        if overdue := line.overdue("" if self._listed else ASKING, now):
            raise LinkDown(overdue)
        if now - self._moved_at > self._stall_seconds:
            raise LinkDown(f"nothing came for {self._stall_seconds:g} s")
        link = line.link
        assert link is not None
        got = link.receive()
        if got is None:
            if link.check() and not line.linked:
                line.up(now)
                link.send(m.ListAssets())
                line.asked(now)
            self._ask(line, file)
            poller = zmq.Poller()
            link.register(poller)
            poller.poll(POLL_MS)
            return None
        return self._heard(line, got[0], got[1])

    def _ask(self, line: Line, file: AssetFile) -> None:
        assert line.link is not None
        while self._listed and len(self._requests) < WINDOW and self._asked_to < file.bytes:
            size = min(MAX_ASSET_PIECE_BYTES, file.bytes - self._asked_to)
            request = _Request(file.name, self._asked_to, size)
            line.link.send(m.FetchAsset(name=file.name, offset=request.offset, bytes=size))
            self._requests.append(request)
            self._asked_to += size

    def _heard(
        self, line: Line, message: m.FromProducer, frame: memoryview | None
    ) -> memoryview | None:
        match message:
            case m.Assets():
                if identity(message.files) != self._directory.identity:
                    raise AssetError(f"another target is served at {line.address} by now")
                if not self._listed:
                    self._listed = True
                    self._moved_at = time.monotonic()
                    line.attach()
            case m.AssetPiece():
                return self._checked(message, frame)
            case m.Refused(code="preparing" | "busy"):
                raise LinkDown(message.reason)
            case m.Refused():
                raise _Refused(message.reason)
        return None

    def _checked(self, piece: m.AssetPiece, frame: memoryview | None) -> memoryview:
        asked = self._requests.popleft() if self._requests else None
        found = _Request(piece.name, piece.offset, len(frame) if frame is not None else 0)
        if frame is None or found != asked:
            told = f"{found.bytes} bytes from {found.offset} on of {found.name[:100]!r}"
            words = f"it sent {told}, asked for was {tuple(asked) if asked else 'nothing'}"
            raise MalformedMessage(words)
        return frame

    def _count_fault(self, error: Exception) -> None:
        self._faults += 1
        if self._faults >= MAX_FAULTS:
            address = self._lines[0].address
            raise AssetError(f"{address} does not send the target's files: {error}") from None

    def _next_producer(self, reason: str) -> None:
        """Another one if there is, or the same after a pause."""
        line = self._lines[0]
        logger.warning("fetching from %s: %s", line.address, reason)
        line.drop(reason, time.monotonic())
        self._lines.rotate(-1)
        self._listed = False
        self._requests.clear()

    def _check_patience(self, file: AssetFile, offset: int, reason: str) -> None:
        seconds = time.monotonic() - self._came_at
        if seconds > self._lost_after_seconds:
            missing = f"{file.name} from byte {offset} of {file.bytes} on"
            raise AssetsLost(self._lines[-1].address, missing, seconds, reason)
