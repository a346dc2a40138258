"""One of two ranks at the end of the data: `late_refusal_child.py ADDRESS`.

Rank 0 trains what it gets. It says a line when it has nothing more to come, and votes for the end.
Rank 1 is nothing but a socket: it keeps its sample until it reads a line, refuses it then until
the other one has it, and votes for the end as well. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
come from the environment.
"""

import json
import os
import select
import sys

from bare_member import BareMember
from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.ranks import Ranks
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig
from draftfeed_proto import messages as m

GROUP = "default"


class Refusing(BareMember):
    """A rank of a group that another one leads."""

    def __init__(self, address: str, incarnation: str, term: int) -> None:
        self._incarnation = incarnation
        self._refused = self._ended_after = 0
        super().__init__(address, term)

    def _fence(self, name: str, term: int) -> m.Fence:
        return m.Fence(
            group=GROUP,
            member="1",
            members=2,
            leader=False,
            incarnation=self._incarnation,
            process="p",
            term=term,
        )

    def refuse_until_the_end(self) -> None:
        """What it has, and whatever it is offered again."""
        while self._refused < len(self.received):
            self._refuse()
        self._until(lambda: self._ended_after == self._refused, "end")

    def _refuse(self) -> None:
        self.say(m.Nack, id=self.received[self._refused], reason="checksum")
        self._refused += 1

    def _take(self, message: m.FromProducer) -> None:
        super()._take(message)
        if isinstance(message, m.EndOfSamples):
            self._ended_after = message.refused
        while 0 < self._refused < len(self.received):
            self._refuse()


def say(what: object) -> None:
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def train(ranks: Ranks, address: str) -> None:
    buffer = BufferConfig(window_samples=1, stall_seconds=0.1)
    config = StreamConfig(producer=ClientConfig(addresses=(address,), group=GROUP), buffer=buffer)
    stream = HiddenStateStream(config, ranks=ranks)
    _ = stream.descriptor
    trained: list[int] = []
    while True:
        items = stream.batch(1)
        if not items and stream._buffer.ended:
            say("at its end")
        agreed = stream.agree(bool(items))
        if agreed.over:
            break
        trained += [item["id"].ordinal for item in items]
        stream.trained([item["id"] for item in items], len(trained))
    say(trained)


def refuse(ranks: Ranks, address: str) -> None:
    life = ranks.share(None)
    member = Refusing(address, life.incarnation, life.term)
    member.open()
    member.receive(1)
    while not select.select([sys.stdin], [], [], 0)[0]:
        ranks.agree(False, more=lambda: True)
    member.refuse_until_the_end()
    while not ranks.agree(False).over:
        pass
    say("over")


if __name__ == "__main__":
    made = Ranks.from_environment()
    assert made is not None
    (train if made.leader else refuse)(made, sys.argv[1])
    os._exit(0)
