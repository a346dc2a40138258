"""A connection between one rank and one producer: two queues that keep their order.

What was sent before an end went away may still arrive; what is in the queues when the link is cut
never does. Each end finds out by itself.
"""

from collections import deque

from draftfeed_proto import messages as m


class Violation(AssertionError):
    """The promise is broken, or the run can never end."""


class Link:
    def __init__(self, sender: bytes, life: int, rank: int, producer: int) -> None:
        self.sender = sender
        """By which the producer knows it; one for each connection."""
        self.life, self.rank, self.producer = life, rank, producer
        self.up: deque[bytes] = deque()
        self.down: deque[tuple[bytes, bytes | None]] = deque()
        """(message, frame of a chunk)"""
        self.member_open = self.producer_open = True
        self.cut = self.stalled = False

    @property
    def tag(self) -> tuple[str, int, int, int]:
        return ("link", self.life, self.rank, self.producer)

    def send_up(self, message: m.Message) -> None:
        if self.producer_open and not self.cut:
            self.up.append(m.encode(message))

    def send_down(self, message: m.Message, frame: bytes | None = None) -> None:
        if self.member_open and not self.cut:
            self.down.append((m.encode(message), frame))

    def break_off(self) -> None:
        """Whatever is on its way is lost."""
        self.cut, self.stalled = True, False
        self.up.clear()
        self.down.clear()

    def close_member(self) -> None:
        self.member_open = False
        self.down.clear()

    def close_producer(self) -> None:
        self.producer_open = False
        self.up.clear()

    @property
    def arrives_up(self) -> bool:
        return bool(self.up) and self.producer_open and not self.stalled

    @property
    def arrives_down(self) -> bool:
        return bool(self.down) and self.member_open and not self.stalled

    @property
    def member_may_notice(self) -> bool:
        over = self.cut or (not self.producer_open and not self.down)
        return self.member_open and over and not self.stalled

    @property
    def producer_may_notice(self) -> bool:
        over = self.cut or (not self.member_open and not self.up)
        return self.producer_open and over and not self.stalled

    @property
    def gone(self) -> bool:
        return not self.member_open and not self.producer_open
