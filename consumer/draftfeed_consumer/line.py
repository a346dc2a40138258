"""The line to one producer: the link, when there is one, and the patience with it."""

import logging
from collections.abc import Sequence
from typing import Literal

import zmq

from draftfeed_consumer.credentials import Credentials
from draftfeed_consumer.errors import ProducerClosing, StreamError, StreamLost
from draftfeed_consumer.link import Link, LinkDown
from draftfeed_consumer.local import HandoverLost, LocalFiles, Unreachable
from draftfeed_proto import messages as m
from draftfeed_proto.chunk import Placed

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts to connect; the last one repeats."""
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 10.0
"""For a producer to answer a Fence."""
REPORT_SECONDS = 10.0
"""How often waiting is mentioned in the log."""


class Line:
    """Times are monotonic seconds, given by the caller."""

    def __init__(
        self,
        address: str,
        now: float,
        credentials: Credentials | None = None,
        *,
        unread_messages: int = 0,
    ) -> None:
        """unread_messages: see `Link`."""
        self.address = address
        self._credentials, self._unread_messages = credentials, unread_messages
        self.link: Link | None = None
        self._files: LocalFiles | None = None
        self.linked = False
        """The handshake was seen."""
        self.was_attached = False
        self.attached = False
        self.wire_bytes = 0
        """Read from its links, and from its files."""
        self.reason = "not tried yet"
        """Why there is no link."""
        self._closing_reason: str | None = None
        self._attempts = 0
        self._retry_at = now
        self._since = now
        """When the link was begun, or asked for the stream."""
        self._down_since = now
        self._reported_at = now - REPORT_SECONDS

    @property
    def same_host(self) -> bool:
        """Chunks are read from files of the producer's."""
        return self._files is not None

    def look_for_files(self, granted: m.Granted) -> None:
        """The session has begun: is the producer on this host?"""
        self._forget_files()
        self._files = LocalFiles.of(granted)

    def frames_at(self, message: m.ChunksAt) -> Sequence[Placed]:
        """What it speaks of. Where that is out of reach the sample is refused, and the rest of the
        session comes over the connection."""
        if self._files is not None:
            try:
                return self._files.at(message)
            except HandoverLost as error:
                words = "its samples come over the network now"
                logger.warning("%s: %s; %s", self.address, error, words)
                self._forget_files()
        return [Unreachable(size) for _, size in message.places]

    def check_files(self) -> None:
        """A chunk came over the connection: has the producer ended the handover?"""
        if self._files is not None and self._files.over:
            logger.warning("%s: it hands no more files over", self.address)
            self._forget_files()

    def _forget_files(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    @property
    def cut(self) -> bool:
        """The producer was attached, and is not."""
        return self.was_attached and not self.attached

    def due(self, now: float) -> bool:
        return self.link is None and now >= self._retry_at

    def begin(self, context: "zmq.Context[zmq.Socket[bytes]]", now: float) -> None:
        """Raises AddressError. There is no link afterwards when the system has no descriptors for
        one: it is tried again."""
        try:
            self.link = Link(
                context, self.address, self._credentials, unread_messages=self._unread_messages
            )
        except LinkDown as error:
            self.drop(str(error), now)
            return
        self.linked = False
        self._since = now

    def up(self, now: float) -> None:
        self.linked = True
        self._since = now

    def overdue(self, state: Literal["fenced"] | str, now: float) -> str:
        """What has taken too long; "" when nothing has."""
        if self.link is None:
            return ""
        if not self.linked and now - self._since > CONNECT_SECONDS:
            return f"no connection within {CONNECT_SECONDS:.0f} s"
        if state == "fenced" and now - self._since > ANSWER_SECONDS:
            return f"no answer within {ANSWER_SECONDS:.0f} s"
        return ""

    def asked(self, now: float) -> None:
        self._since = now

    def attach(self) -> None:
        """The producer granted the stream."""
        self.attached = self.was_attached = True
        self._attempts = 0
        self._closing_reason = None

    def drop(self, reason: str, now: float, *, closing: bool = False) -> None:
        """Close the link, and pause before the next one."""
        self._forget_files()
        if self.link is not None:
            self.link.close()
        if self.attached:
            self._down_since = now
        self.link, self.attached, self.linked, self.reason = None, False, False, reason
        if closing:
            self._closing_reason = reason
        self._retry_at = now + RETRY_SECONDS[min(self._attempts, len(RETRY_SECONDS) - 1)]
        self._attempts += 1

    def lost(self, after_seconds: float, now: float) -> StreamError | None:
        """The error of having waited too long for a producer that was there."""
        down_seconds = now - self._down_since
        if not self.cut or down_seconds <= after_seconds:
            return None
        if self._closing_reason is not None:
            return ProducerClosing(self.address, self._closing_reason)
        return StreamLost(self.address, down_seconds)

    def to_report(self, now: float) -> bool:
        """Whether to say that it is waited for."""
        waiting = not self.attached and self._attempts > 0
        if not waiting or now - self._reported_at < REPORT_SECONDS:
            return False
        self._reported_at = now
        return True
