"""One cell of the scale benchmark: so many producers and so many members, each a process."""

import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import NamedTuple

from children import DRAFTFEED, HERE, Children, free_port
from scale_trainer import Figures, read
from soak_watch import look
from thread_names import thread_cpu_seconds

HIDDEN, LAYERS = 5120, 5
ROW_BYTES = 2 * HIDDEN * LAYERS
TOKENS = 100
"""Of a sample, mean; the longest has four times as many."""
END_SECONDS = 180.0
SETTLE_SECONDS = 2.0
"""After the last process has attached, and after the first samples."""
SPARE_SECONDS = 6.0
"""Of samples that are made beside those that are looked at."""

PRODUCER = """
[engine]
name = "synthetic"
samples = {samples}
shard_size = {shard_size}
num_layers = 64
hidden_size = {hidden}
prompt_tokens = {prompt_tokens}
response_tokens = {response_tokens}
max_tokens = {max_tokens}
tokens_per_second = {rate}
[spool]
dir = "spool-{number}"
fsync = "never"
shards = "{number}"
[server]
bind = "{address}"
same_host = false
"""
CONSUMER = """
[producer]
addresses = {addresses}
[buffer]
capacity_bytes = {capacity}
window_samples = 1
stall_seconds = 0.1
[trainer]
function = "scale_trainer:train"
output_dir = "out"
[trainer.assets]
fetch = false
[trainer.options]
directory = "."
"""


class Plan(NamedTuple):
    producers: int
    members: int
    times_longer: int
    """Samples, than `TOKENS`."""
    megabytes_per_second: float
    """Of hidden states, by all producers together."""
    idle_seconds: float
    seconds: float


class Cell(NamedTuple):
    producers: int
    members: int
    seconds: float
    samples: int
    logical_bytes: int
    cpu_seconds: dict[str, float]
    """By thread, `producer MainThread` for instance: all producers together, all members."""
    idle_seconds: float
    idle_cpu_seconds: dict[str, float]
    """While all are attached and nothing is made."""
    control_messages: int
    """Both ways, without the chunks."""
    chunks: int
    member_bytes: list[int]
    producer_mb: float
    """Resident memory of one, median."""
    member_mb: float

    @property
    def gigabytes(self) -> float:
        return self.logical_bytes / 1e9

    @property
    def cost(self) -> float:
        """CPU seconds of all processes for a logical GB."""
        return sum(self.cpu_seconds.values()) / self.gigabytes

    @property
    def delivery_cost(self) -> float:
        """The same without the producers' main threads, which make, encode and store samples."""
        made = self.cpu_seconds.get("producer MainThread", 0.0)
        return (sum(self.cpu_seconds.values()) - made) / self.gigabytes

    @property
    def busy_cost(self) -> float:
        """All, without what the same processes use in the same time when nothing is sent."""
        idle = sum(self.idle_cpu_seconds.values()) * self.seconds / self.idle_seconds
        return (sum(self.cpu_seconds.values()) - idle) / self.gigabytes

    @property
    def jain(self) -> float:
        """Jain's index of fairness: 1 when all members got the same, 1/n when one got all."""
        squares = sum(one * one for one in self.member_bytes)
        return sum(self.member_bytes) ** 2 / (len(self.member_bytes) * squares)

    @property
    def most_over_least(self) -> float:
        return max(self.member_bytes) / max(1, min(self.member_bytes))


class _Look(NamedTuple):
    at: float
    cpu: dict[str, float]
    figures: list[Figures]


def _used(begin: _Look, end: _Look) -> dict[str, float]:
    """CPU seconds between the two."""
    return {name: seconds - begin.cpu.get(name, 0.0) for name, seconds in end.cpu.items()}


def play(directory: Path, plan: Plan) -> Cell:
    children = Children(directory, END_SECONDS)
    try:
        return _Run(children, plan).cell()
    finally:
        children.close()


class _Run:
    def __init__(self, children: Children, plan: Plan) -> None:
        self._children, self._plan, self._directory = children, plan, children.directory
        self._tokens = TOKENS * plan.times_longer
        whole = plan.seconds + SETTLE_SECONDS + SPARE_SECONDS
        wanted = plan.megabytes_per_second * 1e6 * whole / (self._tokens * ROW_BYTES)
        self._shard_size = max(1, round(wanted / plan.producers))
        self.samples = self._shard_size * plan.producers
        self._addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(plan.producers)]
        self._members = [self._start_member(rank) for rank in self._configured()]
        self._producers = [self._start_producer(number) for number in range(plan.producers)]

    def _configured(self) -> range:
        for number, address in enumerate(self._addresses):
            text = PRODUCER.format(
                samples=self.samples,
                shard_size=self._shard_size,
                hidden=HIDDEN,
                prompt_tokens=2 * self._tokens // 5,
                response_tokens=3 * self._tokens // 5,
                max_tokens=4 * self._tokens,
                rate=self._plan.megabytes_per_second * 1e6 / ROW_BYTES / self._plan.producers,
                number=number,
                address=address,
            )
            (self._directory / f"producer-{number}.toml").write_text(text)
        addresses = "[" + ", ".join(f'"{one}"' for one in self._addresses) + "]"
        capacity = 128_000_000 + 8 * self._tokens * ROW_BYTES
        text = CONSUMER.format(addresses=addresses, capacity=capacity)
        (self._directory / "consumer.toml").write_text(text)
        self._store = free_port()
        return range(self._plan.members)

    def _start_member(self, rank: int) -> "Popen[bytes]":
        """As torchrun would, without a process for it."""
        world = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._plan.members),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = (*DRAFTFEED, "consumer", "-c", "consumer.toml")
        return self._children.start(f"member-{rank}", command, environment=world)

    def _start_producer(self, number: int) -> "Popen[bytes]":
        wrapper = (DRAFTFEED[0], str(HERE / "scale_producer.py"), "go", f"producer-{number}.json")
        command = (*wrapper, "producer", "-c", f"producer-{number}.toml")
        return self._children.start(f"producer-{number}", command)

    def cell(self) -> Cell:
        self._children.until(self._all_attached, "all members are attached to all producers")
        self._wait(SETTLE_SECONDS)
        idle = self._look()
        self._wait(self._plan.idle_seconds)
        idle_end = self._look()
        (self._directory / "go").touch()
        first = min(self._plan.members, self.samples // 4)
        self._children.until(lambda: self._received() >= first, "the first samples are there")
        self._wait(SETTLE_SECONDS)
        begin = self._look()
        self._wait(self._plan.seconds)
        end = self._look()
        if self._received() == self.samples:
            raise SystemExit("all samples were trained before the time was over")
        memory = [[self._memory(one) for one in some] for some in (self._producers, self._members)]
        processes = [*self._producers, *self._members]
        self._children.until(lambda: all(p.poll() is not None for p in processes), "all have ended")
        if self._received() != self.samples or any(p.returncode for p in processes):
            raise SystemExit(f"{self._received()} of {self.samples} samples were trained")
        return self._judged(idle, idle_end, begin, end, memory)

    def _judged(
        self, idle: _Look, idle_end: _Look, begin: _Look, end: _Look, memory: list[list[float]]
    ) -> Cell:
        got = [
            Figures(*(b - a for a, b in zip(before, after, strict=True)))
            for before, after in zip(begin.figures, end.figures, strict=True)
        ]
        return Cell(
            self._plan.producers,
            self._plan.members,
            end.at - begin.at,
            sum(one.samples for one in got),
            sum(one.logical_bytes for one in got),
            _used(begin, end),
            idle_end.at - idle.at,
            _used(idle, idle_end),
            sum(one.said + one.heard for one in got),
            sum(one.chunks for one in got),
            [one.logical_bytes for one in got],
            median(memory[0]),
            median(memory[1]),
        )

    def _all_attached(self) -> bool:
        """By what members say: one line for each producer."""
        return all(
            (self._directory / f"member-{rank}.log").read_bytes().count(b"attached to tcp://")
            >= self._plan.producers
            for rank in range(self._plan.members)
        )

    def _received(self) -> int:
        return sum(one.samples for one in self._figures())

    def _figures(self) -> list[Figures]:
        paths = [self._directory / f"member-{rank}.bin" for rank in range(self._plan.members)]
        return [read(path) for path in paths]

    def _look(self) -> _Look:
        cpu: defaultdict[str, float] = defaultdict(float)
        for who, processes in (("producer", self._producers), ("member", self._members)):
            for number, process in enumerate(processes):
                path = self._directory / f"{who}-{number}.json"
                for name, seconds in thread_cpu_seconds(process.pid, path).items():
                    cpu[f"{who} {name.partition('_')[0]}"] += seconds
        return _Look(time.monotonic(), cpu, self._figures())

    @staticmethod
    def _memory(process: "Popen[bytes]") -> float:
        seen = look(process.pid)
        return seen.rss_mb if seen else 0.0

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._children.until(lambda: time.monotonic() >= until, "time has passed")
