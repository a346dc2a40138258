"""Producers, links and members as queues: what passes in a second, and what is busy.

A discrete-event simulation. A sample is made (encoded and stored), dealt to the member that was
given least, and goes there in chunks: through the producer's server thread, its ZeroMQ thread, its
link, the member's link, ZeroMQ thread, client thread and decoders, to the trainer. Each thread
takes one thing at a time; a node has so many cores. A session has credit for so many encoded bytes
on their way, a member room for so many decoded ones. Times in seconds, sizes in bytes.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

CHUNK_BYTES = 4 << 20
"""Decoded."""
CREDIT_BYTES = 32 << 20
"""Encoded."""
OFFERED, LEAST_OFFERED = 64, 4
"""Samples that a producer offers at a time, to all its members together and to each at least."""
GB = 1e9
SIGMA = 0.6
"""Of the lognormal lengths of samples, as the synthetic engine's."""


class Cost(NamedTuple):
    """CPU seconds of one stage."""

    per_gb: float = 0.0
    """Logical: of hidden states as they are trained on."""
    per_sample: float = 0.0
    per_sample_peer: float = 0.0
    """For each sample and each node at the other side."""

    def sample(self, peers: int) -> float:
        return self.per_sample + self.per_sample_peer * peers


class Costs(NamedTuple):
    make: Cost = Cost()
    """Encode and store. What the target does is not in it."""
    server: Cost = Cost()
    send: Cost = Cost()
    receive: Cost = Cost()
    client: Cost = Cost()
    decode: Cost = Cost()


class Layout(NamedTuple):
    producers: int
    members: int
    bytes_per_second: float
    """Of hidden states, made by all producers together."""
    sample_bytes: float
    """Mean."""
    ratio: float = 1.48
    """Decoded over encoded."""
    link_bytes_per_second: float = float("inf")
    """Of each member's link, and of each producer's."""
    shared_link: bool = False
    """All producers are on one machine, behind one link."""
    delay_seconds: float = 0.0
    """One way."""
    producer_cores: int = 1_000_000
    """Of each producer's machine; of all of them where the link is shared."""
    member_cores: int = 1_000_000
    one_machine: bool = False
    """Everything shares `producer_cores`."""
    buffer_bytes: float = 4 * 2**30
    trainer_bytes_per_second: float = float("inf")
    """Of each member."""
    decode_threads: int = 2
    io_threads: int = 4


class Outcome(NamedTuple):
    made_bytes: float
    delivered_bytes: float
    """To the trainers, from the beginning to the end."""
    left_bytes: float
    """Made, and not delivered."""
    bytes_per_second: float
    """Decoded, in the second half."""
    busy: dict[str, float]
    """By stage: the share of time of the busiest of its kind, in the second half."""
    cpu_per_gb: float
    member_bytes: list[float]

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


class _Cores:
    def __init__(self, number: int) -> None:
        self.free = number
        self.waiting: deque[_Station] = deque()


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until


class _Station:
    """Serves in order, `servers` at a time, each with a core of its node."""

    def __init__(self, clock: _Clock, cores: _Cores | None, servers: int = 1) -> None:
        self._clock, self._cores, self._free, self.servers = clock, cores, servers, servers
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self.busy_seconds = 0.0
        self._waits = False

    def serve(self, seconds: float, then: Callable[[], None]) -> None:
        self._queue.append((seconds, then))
        self.start()

    def start(self) -> None:
        while self._queue and self._free:
            if self._cores is not None and not self._cores.free:
                if not self._waits:
                    self._waits = True
                    self._cores.waiting.append(self)
                return
            seconds, then = self._queue.popleft()
            self._free -= 1
            if self._cores is not None:
                self._cores.free -= 1
            self._clock.after(seconds, lambda s=seconds, t=then: self._end(s, t))  # type: ignore[misc]

    def _end(self, seconds: float, then: Callable[[], None]) -> None:
        self.busy_seconds += seconds
        self._free += 1
        cores = self._cores
        if cores is not None:
            cores.free += 1
            while cores.waiting and cores.free:
                first = cores.waiting.popleft()
                first._waits = False
                first.start()
        then()
        self.start()


class _Sample(NamedTuple):
    size: float
    chunks: int


class _Member:
    def __init__(self, run: "Simulation", cores: _Cores | None) -> None:
        layout, clock = run.layout, run.clock
        self.link = _Station(clock, None)
        self.receive = _Station(clock, cores, min(layout.producers, layout.io_threads))
        self.client = _Station(clock, cores)
        self.decode = _Station(clock, cores, layout.decode_threads)
        self.trainer = _Station(clock, None)
        self.room = layout.buffer_bytes
        self.given = self.delivered = 0.0
        self.asked: deque[tuple[_Session, _Sample]] = deque()
        """Dealt to it, and there was no room yet."""


class _Producer:
    def __init__(self, run: "Simulation", cores: _Cores | None, link: _Station) -> None:
        self.make = _Station(run.clock, cores)
        self.server = _Station(run.clock, cores)
        self.send = _Station(run.clock, cores)
        self.link = link
        self.stock: deque[_Sample] = deque()


class _Session:
    def __init__(self, producer: _Producer, member: _Member) -> None:
        self.producer, self.member = producer, member
        self.others: list[_Session] = []
        """All of the producer, with this one."""
        self.offered = 0
        self.credit = float(CREDIT_BYTES)
        self.ready: deque[tuple[_Sample, int]] = deque()
        """Chunks that were asked for."""


class Simulation:
    def __init__(self, layout: Layout, costs: Costs, seed: int = 0) -> None:
        self.layout, self.costs, self.clock = layout, costs, _Clock()
        self._random = random.Random(seed)
        self.made = self.arrived = 0.0
        common = _Cores(layout.producer_cores)
        shared = layout.one_machine or layout.shared_link
        link = _Station(self.clock, None)
        self.producers = [
            _Producer(
                self,
                common if shared else _Cores(layout.producer_cores),
                link if layout.shared_link else _Station(self.clock, None),
            )
            for _ in range(layout.producers)
        ]
        self.members = [
            _Member(self, common if layout.one_machine else _Cores(layout.member_cores))
            for _ in range(layout.members)
        ]
        self._sessions = [[_Session(p, m) for m in self.members] for p in self.producers]
        for sessions in self._sessions:
            for session in sessions:
                session.others = sessions

    def run(self, seconds: float) -> Outcome:
        """Raises nothing: what does not fit piles up."""
        for sessions in self._sessions:
            self.clock.after(
                self._random.random() * self._mean_gap, lambda s=sessions: self._make(s)
            )  # type: ignore[misc]
        self.clock.run(seconds / 2)
        before, arrived = self._busy_seconds(), self.arrived
        self.clock.run(seconds)
        half = seconds / 2
        used = {name: (busy, before[name]) for name, busy in self._busy_seconds().items()}
        return Outcome(
            self.made,
            self._delivered,
            self.made - self._delivered,
            (self.arrived - arrived) / half,
            {
                name: max((now - then) / half for now, then in zip(*pair, strict=True))
                for name, pair in used.items()
            },
            self._cpu_seconds() / max(self._delivered / GB, 1e-9),
            [member.delivered for member in self.members],
        )

    @property
    def _mean_gap(self) -> float:
        """Between two samples of one producer."""
        layout = self.layout
        return layout.sample_bytes * layout.producers / layout.bytes_per_second

    @property
    def _delivered(self) -> float:
        return sum(member.delivered for member in self.members)

    def _make(self, sessions: list[_Session]) -> None:
        """The target has finished a sample, and begins the next."""
        layout, cost = self.layout, self.costs.make
        size = layout.sample_bytes * self._random.lognormvariate(-(SIGMA**2) / 2, SIGMA)
        sample = _Sample(size, max(1, -(-int(size) // CHUNK_BYTES)))
        self.made += size
        seconds = cost.per_gb * size / GB + cost.sample(layout.members)
        producer = sessions[0].producer
        producer.make.serve(seconds, partial(self._stored, sessions, sample))
        gap = size * layout.producers / layout.bytes_per_second
        self.clock.after(gap, lambda: self._make(sessions))

    def _stored(self, sessions: list[_Session], sample: _Sample) -> None:
        sessions[0].producer.stock.append(sample)
        self._deal(sessions)

    def _deal(self, sessions: list[_Session]) -> None:
        """To whoever was given least, of those that have few offers open."""
        stock = sessions[0].producer.stock
        while stock and (hungry := [one for one in sessions if one.offered < self._share]):
            session, sample = min(hungry, key=lambda one: one.member.given), stock.popleft()
            session.member.given += sample.size
            session.offered += 1
            self.clock.after(self.layout.delay_seconds, partial(self._heard, session, sample))

    @property
    def _share(self) -> int:
        return max(LEAST_OFFERED, OFFERED // self.layout.members)

    def _heard(self, session: _Session, sample: _Sample) -> None:
        session.member.asked.append((session, sample))
        self._grant(session.member)

    def _grant(self, member: _Member) -> None:
        while member.asked and member.asked[0][1].size <= member.room:
            session, sample = member.asked.popleft()
            member.room -= sample.size
            self.clock.after(self.layout.delay_seconds, partial(self._granted, session, sample))

    def _granted(self, session: _Session, sample: _Sample) -> None:
        session.offered -= 1
        session.ready.extend((sample, index) for index in range(sample.chunks))
        self._pump(session)
        self._deal(session.others)

    def _pump(self, session: _Session) -> None:
        """As much as there is credit for."""
        while session.ready and session.credit > 0:
            sample, index = session.ready.popleft()
            size = sample.size / sample.chunks
            encoded = size / self.layout.ratio
            session.credit -= encoded
            self._pass(session, sample, index, size, encoded)

    def _pass(
        self, session: _Session, sample: _Sample, index: int, size: float, encoded: float
    ) -> None:
        """One chunk, from station to station."""
        layout, costs, member = self.layout, self.costs, session.member
        on_link = encoded / layout.link_bytes_per_second
        part = 1 / sample.chunks
        steps: list[tuple[_Station, float]] = [
            (session.producer.server, self._both(costs.server, size, part, layout.members)),
            (session.producer.send, self._both(costs.send, size, part, layout.members)),
            (session.producer.link, on_link),
            (member.link, on_link),
            (member.receive, self._both(costs.receive, size, part, layout.producers)),
            (member.client, self._both(costs.client, size, part, layout.producers)),
        ]

        def step(number: int) -> None:
            if number == len(steps):
                self.clock.after(layout.delay_seconds, lambda: self._renew(session, encoded))
                seconds = self._both(costs.decode, size, part, layout.producers)
                member.decode.serve(seconds, lambda: self._decoded(member, sample, index))
                return
            station, seconds = steps[number]
            if station is member.link and layout.delay_seconds:
                self.clock.after(
                    layout.delay_seconds, lambda: station.serve(seconds, lambda: step(number + 1))
                )
            else:
                station.serve(seconds, lambda: step(number + 1))

        step(0)

    @staticmethod
    def _both(cost: Cost, size: float, part: float, peers: int) -> float:
        return cost.per_gb * size / GB + part * cost.sample(peers)

    def _renew(self, session: _Session, encoded: float) -> None:
        session.credit += encoded
        self._pump(session)

    def _decoded(self, member: _Member, sample: _Sample, index: int) -> None:
        self.arrived += sample.size / sample.chunks
        if index + 1 < sample.chunks:
            return

        def trained() -> None:
            member.delivered += sample.size
            member.room += sample.size
            self._grant(member)

        member.trainer.serve(sample.size / self.layout.trainer_bytes_per_second, trained)

    def _stations(self) -> dict[str, list[_Station]]:
        producers, members = self.producers, self.members
        links = {id(p.link): p.link for p in producers}
        return {
            "make": [p.make for p in producers],
            "server": [p.server for p in producers],
            "send": [p.send for p in producers],
            "producer's link": list(links.values()),
            "member's link": [m.link for m in members],
            "receive": [m.receive for m in members],
            "client": [m.client for m in members],
            "decode": [m.decode for m in members],
            "trainer": [m.trainer for m in members],
        }

    def _busy_seconds(self) -> dict[str, list[float]]:
        """Of each station, as if it had one server."""
        return {
            name: [one.busy_seconds / one.servers for one in stations]
            for name, stations in self._stations().items()
        }

    def _cpu_seconds(self) -> float:
        stages = self._stations()
        return sum(
            one.busy_seconds
            for name in ("make", "server", "send", "receive", "client", "decode")
            for one in stages[name]
        )


def simulate(layout: Layout, costs: Costs, seconds: float = 30.0, seed: int = 0) -> Outcome:
    return Simulation(layout, costs, seed).run(seconds)
