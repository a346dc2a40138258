"""Hostile peers for both state machines: real messages with wrong contents, in any order, and bytes
that are none. `make fuzz`.

Every fault is an exception other than ours, a broken promise, or something that grows. A seed
names the run that found it: `python -m peer_fuzz --seed N` does it again.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from delivery_members import ALICE, FRAME_BYTES, header, id_of, producer
from draftfeed_consumer.actions import Action as MemberAction
from draftfeed_consumer.actions import Deliver, Drop, Fail
from draftfeed_consumer.reception import MAX_OFFERS, Payload
from draftfeed_producer.session import Action, Regenerate, Send, SendChunk, StoreTombstone, Verify
from draftfeed_proto import messages as m
from draftfeed_proto.errors import MalformedChunk, ProtoError
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.limits import MAX_MEMBERS
from draftfeed_proto.sample import header_of
from member_bench import ROWS, SIZE, A, Bench, frames_of
from samples import DATASET, sample

SAMPLES = 12
STEPS = 400
HOSTILE = [b"evil-%d" % number for number in range(6)]
NAMES = ["", "0", "1", "run", "other", "first", "evil", "x" * 1024]
NUMBERS = [0, 1, 2, 3, 64, 1 << 20, 1 << 31, (1 << 32) + 5, (1 << 40) - 1, (1 << 63) - 1]


class Lying:
    """A frame in a file: so it is said."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def read(self, offset: int, into: memoryview) -> None:
        if offset + len(into) > len(self._content):
            raise MalformedChunk("it ends before that")
        into[:] = self._content[offset : offset + len(into)]


class Source:
    """Values that a hostile peer would try, and that are near what is right."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def number(self) -> int:
        return self.rng.choice(NUMBERS)

    def name(self) -> str:
        return self.rng.choice(NAMES)

    def id(self) -> SampleId:
        if self.rng.random() < 0.8:
            return id_of(self.rng.randrange(2 * SAMPLES))
        dataset = self.rng.choice([DATASET, "f" * 16])
        return SampleId(dataset, self.rng.choice([0, 1]), self.number() >> 5, self.number() >> 24)

    def ids(self) -> list[SampleId]:
        return [self.id() for _ in range(self.rng.choice([0, 1, 2, 40]))]

    def ranges(self) -> Any:
        if self.rng.random() < 0.5:
            return IdSet(id_of(self.rng.randrange(SAMPLES)) for _ in range(3)).to_wire()
        ends = sorted({self.number() >> 24 for _ in range(4)})
        return [(DATASET, 0, self.rng.choice([0, 1, 999, 1 << 30]), ends)]

    def damaged(self, message: m.Message) -> bytes:
        """As it goes over the wire, sometimes with a few bytes changed, cut off or added."""
        try:
            data = bytearray(m.encode(message))
        except (ProtoError, ValueError, OverflowError):  # not even we can write it
            return self.rng.randbytes(self.rng.randrange(64))
        while self.rng.random() < 0.2:
            at = self.rng.randrange(len(data) + 1)
            added = self.rng.randbytes(self.rng.choice([0, 1, 3]))
            data[at : at + self.rng.choice([0, 1, 9])] = added
        return bytes(data)


class Honest:
    """A member that trains what it gets, and counts: each sample is to be trained once."""

    def __init__(self, world: "ServerWorld") -> None:
        self._world = world
        self.trained: Counter[SampleId] = Counter()
        self.durable = IdSet()
        self.held: list[SampleId] = []
        self._offered: list[SampleId] = []
        self._number = 0
        self._granted: m.Granted | None = None

    def attach(self) -> None:
        self._offered = []
        fence = m.Fence(group="run", member="0", incarnation="mine", process="p", term=1)
        self._world.receive(ALICE, fence)
        assert self._granted is not None, "the honest member was refused"
        self._say(
            m.Open,
            trained=self.durable.to_wire(),
            held=self._uncommitted(),
            ledger_term=int(self._number > 0),
            ledger_number=self._number,
        )
        self._say(m.Credit, total_bytes=1 << 40)

    def _uncommitted(self) -> list[SampleId]:
        return [id for id in {*self.held, *self.trained} if id not in self.durable]

    def _say(self, kind: type[m.InSession], **fields: Any) -> None:
        assert self._granted is not None
        term, session = self._granted.term, self._granted.session
        self._world.receive(ALICE, kind(term=term, session=session, **fields))

    def hear(self, message: m.FromProducer) -> None:
        match message:
            case m.Granted():
                self._granted = message
            case m.Offer():
                self._offered += [id for id, _ in message.samples]
            case m.Chunk() if message.index + 1 == header(0).chunks:
                self._got(message.id)
            case m.Refused():
                raise AssertionError(f"the honest member was refused: {message}")

    def _got(self, id: SampleId) -> None:
        assert id not in self.held, f"{id} came twice"
        assert id not in self.trained, f"{id} came again after it was trained"
        self.held.append(id)

    def step(self, rng: random.Random) -> None:
        rng.choice([self.grant, self.receive, self.train, self.train, self.commit, self.again])()

    def grant(self) -> None:
        wanted, self._offered = self._offered, []
        self._say(m.Grant, ids=wanted)

    def receive(self) -> None:
        self._world.perform(self._world.delivery.next_chunk(ALICE))

    def train(self) -> None:
        if self.held:
            id = self.held.pop(0)
            self._say(m.AtWork, ids=[id])
            self.trained[id] += 1

    def commit(self) -> None:
        self._number += 1
        self.durable = IdSet(self.trained)
        self._say(m.Commit, number=self._number, trained=self.durable.to_wire())

    def again(self) -> None:
        """A cut, and at once a new connection."""
        self._world.perform(self._world.delivery.disconnected(ALICE, self._world.now))
        self.attach()


class ServerWorld:
    """The producer's half, an honest member, and others who know everything but its connection."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.source, self.now = rng, Source(rng), 0.0
        self.delivery = producer(samples=SAMPLES)
        self.delivery.finish()
        self.honest = Honest(self)
        self.honest.attach()

    def receive(self, sender: bytes, message: Any) -> None:
        self.perform(self.delivery.received(sender, message, self.now))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(sender, message) | SendChunk(sender, message):
                    if isinstance(action, SendChunk):
                        self.delivery.sent(sender, FRAME_BYTES)
                    self.heard(sender, message)
                case Verify(id):
                    self.perform(self.delivery.verified(id, True))
                case Regenerate(ids):
                    for id in ids:
                        self.perform(self.delivery.stored(header(id.ordinal)))
                case StoreTombstone():
                    raise AssertionError(f"a stranger ended a sample: {action}")

    def heard(self, sender: bytes, message: Any) -> None:
        m.encode(message)  # it can be sent
        if sender == ALICE:
            self.honest.hear(message)

    def attack(self) -> None:
        data = self.source.damaged(self.message())
        try:
            message = m.decode_from_member(data)
            self.receive(self.rng.choice(HOSTILE), message)
        except ProtoError:
            pass

    def message(self) -> m.Message:
        source, term = self.source, self.delivery.fencing.number
        sessions = [member.session for member in self.delivery.fencing.attached.values()]
        session = next((one.name for one in sessions if one), "none")
        mine: Any = {
            "term": self.rng.choice([term, term + 1, source.number()]),
            "session": self.rng.choice([session, session, source.name()]),
        }
        makers: list[Callable[[], m.Message]] = [
            self.fence,
            lambda: m.Open(
                **mine,
                trained=source.ranges(),
                held=source.ids(),
                ledger_term=source.number(),
                ledger_number=source.number(),
                rollback=self.rng.choice(["", "deliver", "regenerate", "x"]),
                checkpoint_samples=source.number(),
            ),
            lambda: m.Grant(**mine, ids=source.ids()),
            lambda: m.Credit(**mine, total_bytes=source.number()),
            lambda: m.Nack(**mine, id=source.id(), reason=source.name()),
            lambda: m.Reject(**mine, id=source.id(), reason="", state=source.name()),
            lambda: m.AtWork(**mine, ids=source.ids()),
            lambda: m.Release(**mine, ids=source.ids()),
            lambda: m.Commit(**mine, number=source.number(), trained=source.ranges()),
            lambda: m.Bye(**mine, failed=self.rng.random() < 0.5),
            m.Inquire,
            m.ListAssets,
        ]
        return self.rng.choice(makers)()

    def fence(self) -> m.Fence:
        source = self.source
        return m.Fence(
            version=self.rng.choice([m.VERSION, m.VERSION, (1, 9), (2, 9)]),
            group=self.rng.choice(["run", source.name()]),
            member=source.name(),
            members=self.rng.choice([1, 2, MAX_MEMBERS]),
            leader=self.rng.random() < 0.7,
            incarnation=self.rng.choice(["evil", source.name()]),
            process=source.name(),
            term=max(1, self.rng.choice([self.delivery.fencing.number + 1, source.number()])),
            takeover=self.takes_over,
        )

    takes_over = False

    def step(self) -> None:
        self.now += 0.001
        if self.rng.random() < 0.1 and not self.takes_over:
            self.honest.step(self.rng)
        elif self.rng.random() < 0.05:
            sender = self.rng.choice(HOSTILE)
            self.perform(self.delivery.disconnected(sender, self.now))
        else:
            self.attack()
        self.check()

    def check(self) -> None:
        """Nothing has grown."""
        fencing = self.delivery.fencing
        assert len(fencing.attached) <= 1 + len(HOSTILE)
        assert len(fencing.members) <= (fencing.term.members if fencing.term else 0)
        assert len(self.delivery.tombstones) <= 2 * SAMPLES
        assert len(self.delivery._nacks) <= 2 * SAMPLES

    def finish(self) -> None:
        """The attack is over, and the honest member gets to the end."""
        self.honest.again()
        for _ in range(SAMPLES * 10):
            for act in (self.honest.grant, self.honest.receive, self.honest.train):
                act()
        self.honest.commit()
        assert self.honest.trained == Counter({id_of(k): 1 for k in range(SAMPLES)})
        assert self.delivery.committed == IdSet(map(id_of, range(SAMPLES)))
        assert self.delivery.all_terminal


class TakenWorld(ServerWorld):
    """Whoever comes takes the stream over: nobody is honest, and the producer has to live."""

    takes_over = True

    def heard(self, sender: bytes, message: Any) -> None:
        m.encode(message)
        if isinstance(message, m.Granted) and sender == ALICE:
            self.honest.hear(message)

    def perform(self, actions: list[Action]) -> None:
        super().perform([action for action in actions if not isinstance(action, StoreTombstone)])

    def finish(self) -> None:
        return


class ClientWorld:
    """The member's half, and a producer that says anything."""

    ROOM = 4

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.source = rng, Source(rng)
        self.delivered: set[SampleId] = set()
        self.begin()

    def begin(self) -> None:
        """A new process: the one before gave up, as it may."""
        self.bench = Bench(A, room=self.ROOM)
        self.bench.link()
        self.bench.grant(A)
        self.bench.do(self.bench.member.open())
        self.took_bytes = 0
        self.session = self.bench._sessions[A]
        self.bench.actions.clear()

    def message(self) -> tuple[m.Message, Payload | None]:
        source, rng = self.source, self.rng
        term, session = self.session
        mine: Any = {"term": term, "session": session}
        if rng.random() < 0.05:
            mine = {"term": source.number(), "session": source.name()}
        made = sample(rng.randrange(20), ROWS)
        frames = frames_of(made)
        size = sum(map(len, frames))
        index = rng.randrange(len(frames) + 1)
        frame = memoryview(bytearray(frames[min(index, len(frames) - 1)]))
        if rng.random() < 0.1:
            frame[rng.randrange(len(frame))] ^= 1 + rng.randrange(255)
        if rng.random() < 0.05:
            frame = frame[: rng.randrange(len(frame))]
        due = self.bench.member.peer(A).reception
        known = due.due if due else []
        if known and rng.random() < 0.7:
            made = sample(rng.choice(known).ordinal, ROWS)
            frames = frames_of(made)
            size = sum(map(len, frames))
        head = header_of(made, chunks=len(frames), encoded_bytes=size, audit=True)
        placed: Any = [Lying(frame), *map(Lying, map(memoryview, frames[index + 1 :]))]
        placed = placed[: rng.randrange(1, 9)]
        where = tuple((source.number(), len(one) or 1) for one in placed)
        at: Any = {"id": made.id, "index": index, "file": source.number(), "places": where}
        makers: list[Callable[[], tuple[m.Message, Payload | None]]] = [
            lambda: (m.Offer(**mine, samples=[(made.id, SIZE)]), None),
            lambda: (m.Offer(**mine, samples=[(id, source.number()) for id in source.ids()]), None),
            lambda: (m.Begin(**mine, header=head), None),
            lambda: (m.Chunk(**mine, id=made.id, index=index), [frame]),
            lambda: (m.ChunksAt(**mine, **at), placed),
            lambda: (m.Chunk(**mine, id=made.id, index=index), None),
            lambda: (m.EndOfSamples(**mine), None),
            lambda: (m.Committed(**mine, number=source.number()), None),
            lambda: (m.CheckpointWanted(**mine), None),
            lambda: (m.Opened(**mine), None),
            lambda: (m.Closing(**mine, reason=source.name()), None),
            lambda: (m.Refused(code=source.name(), reason="", term=source.number()), None),
            lambda: (m.Refused(code="held", reason="", term=0), None),
        ]
        return rng.choice(makers)()

    def whole(self) -> None:
        """One sample as it should come, so that hostile ones meet a stream that flows."""
        reception = self.bench.member.peer(A).reception
        if reception is None or not reception.due or reception._assembler is not None:
            return
        if self.bench.member.peer(A).state != "open":
            return
        self.bench.send(A, self.rng.choice(reception.due).ordinal)

    def step(self) -> None:
        try:
            if self.rng.random() < 0.1:
                self.whole()
            else:
                self.attack()
        except ProtoError:  # what the client answers with a new link
            self.bench.do(self.bench.member.unlinked(A))
        self.perform(list(self.bench.actions))
        self.check()

    def attack(self) -> None:
        message, frames = self.message()
        decoded = m.decode_from_producer(self.source.damaged(message))
        self.bench.do(self.bench.member.received(A, decoded, frames))

    def perform(self, actions: list[MemberAction]) -> None:
        self.bench.actions.clear()
        for action in actions:
            match action:
                case Deliver(made):
                    assert made.hidden_states.shape[0] + 1 == len(made.input_ids)
                    self.took_bytes += SIZE
                    self.release(made.id)
                case Fail():
                    self.bench.member.unlinked(A)
                    self.attach()
                    return
                case Drop():
                    self.bench.do(self.bench.member.unlinked(A))
        if self.bench.member.peer(A).state in ("down", "linked", "fenced"):
            self.attach()

    def release(self, id: SampleId) -> None:
        """The trainer trains it at once."""
        self.bench.ledger.take(id)
        self.bench.ledger.train([id])
        self.bench.room.cancel(SIZE)

    def attach(self) -> None:
        self.check()
        self.begin()

    def check(self) -> None:
        left, reception = self.bench.room.left_bytes, self.bench.member.peer(A).reception
        reserved = sum(reception._due.values()) if reception else 0
        assert left + reserved == self.ROOM * SIZE, "room was lost, or given back twice"
        assert left >= 0
        assert reception is None or len(reception.offers) <= MAX_OFFERS

    def finish(self) -> None:
        """Then an honest one: what it sends arrives."""
        self.begin()
        self.bench.offer(A, 3)
        self.bench.send(A, 3)
        assert 3 in self.bench.delivered


WORLDS: tuple[type[Any], ...] = (ServerWorld, TakenWorld, ClientWorld)


def run(kind: type[Any], seed: int, steps: int = STEPS) -> None:
    world = kind(random.Random(seed))
    for _ in range(steps):
        world.step()
    world.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    if options.seed is not None:
        for kind in WORLDS:
            run(kind, options.seed)
        return
    seed = runs = random.SystemRandom().randrange(1 << 40)
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        for kind in WORLDS:
            try:
                run(kind, seed)
            except BaseException:
                print(f"{kind.__name__}, --seed {seed}")  # noqa: T201
                raise
        seed += 1
    print(f"{len(WORLDS) * (seed - runs)} runs of {STEPS} steps, nothing found")  # noqa: T201


if __name__ == "__main__":
    main()
