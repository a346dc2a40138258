"""One run of transport.py: its processes, and what they used while samples went from the ones to
the others."""

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from children import free_port
from draftfeed_deploy.keygen import write_pair
from rounds import cpu_seconds
from transport_orders import LOOPBACK, Order

END = Path(__file__).with_name("transport_end.py")
TIMEOUT_SECONDS = 300.0
MEMORY = Path("/dev/shm")


class Cell(NamedTuple):
    """Who sends what to whom."""

    transport: str
    states: str
    """Name of the set."""
    producers: int = 1
    consumers: int = 1
    keys: bool = False
    same_host: bool = False

    @property
    def layout(self) -> str:
        """What raw TCP must have in common with it to be its limit."""
        return f"{self.states}, {self.producers} to {self.consumers}"

    @property
    def name(self) -> str:
        keys = ", keys" if self.keys else ""
        return f"{self.transport}{', same host' if self.same_host else ''}{keys}"


class Amount(NamedTuple):
    """How much goes through a run."""

    warm: int
    """Samples of each producer before anything is measured."""
    samples: int
    """Of each producer that are sent while they are made, with those."""
    stored: int
    """And then out of a spool, by draftfeed: with `edge` at either end that is not measured."""
    edge: int
    commit_steps: int
    """Of draftfeed's trainer."""
    segment_bytes: int
    """Of draftfeed's spools."""


class Passage(NamedTuple):
    """What was measured."""

    bytes: int
    """Of states."""
    seconds: float
    producer_cpu_seconds: float
    consumer_cpu_seconds: float
    check_cpu_seconds: float
    """Of the consumers', what the benchmark's own check took."""
    stages: dict[str, dict[str, float]]
    """CPU seconds by stage, of each role, where they were asked for."""


class Absent(Exception):
    """A peer that is not installed here."""


class Damaged(Exception):
    """What arrived is not what was sent."""


class Hosts(NamedTuple):
    """Where the ends are: on this machine unless told otherwise."""

    address: str = LOOPBACK
    """Of the producers."""
    enter: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 - nobody changes it
    """By role, the command that runs another one there."""


def run(
    cell: Cell,
    amount: Amount,
    states: Path,
    directory: Path,
    hosts: Hosts = Hosts(),  # noqa: B008 - it never changes
    *,
    corrupt: bool = False,
    stages: bool = False,
) -> dict[str, Passage]:
    """By what is measured: `live`, and for draftfeed `stored`, what lies in spools when it begins.

    corrupt, stages: see `Order`. Raises Absent, Damaged, or SystemExit when an end fails.
    """
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        keys = own / "keys" if cell.keys else None
        for name in ("producers", "clients/consumer") if keys else ():
            write_pair(own / "keys" / name)
        order = Order(
            role="",
            transport=cell.transport,
            number=0,
            producers=cell.producers,
            consumers=cell.consumers,
            states=states,
            **amount._asdict(),
            directory=own,
            shared=shared,
            keys=keys,
            same_host=cell.same_host,
            host=hosts.address,
            rendezvous=f"tcp://127.0.0.1:{free_port()}",
            corrupt=corrupt,
            stages=stages,
        )
        session = Session(cell, order, hosts)
        stack.callback(session.close)
        return session.run()


class Session:
    """Owns the processes."""

    def __init__(self, cell: Cell, order: Order, hosts: Hosts) -> None:
        """order: what is the same for all of them."""
        self._cell, self._order, self._hosts = cell, order, hosts
        self._events: queue.SimpleQueue[tuple[_End, dict[str, Any]]] = queue.SimpleQueue()
        self._heard: dict[str, list[tuple[_End, dict[str, Any]]]] = defaultdict(list)
        self._ends: list[_End] = []

    def run(self) -> dict[str, Passage]:
        cell, order = self._cell, self._order
        for number in range(cell.producers):
            self._start("producer", number, [])
        addresses = self._until("serving", cell.producers)
        by_number = sorted((end.order.number, facts["address"]) for end, facts in addresses)
        for number in range(cell.consumers):
            self._start("consumer", number, [address for _, address in by_number])
        ours = cell.transport == "draftfeed"
        if ours:
            self._until("attached", cell.consumers)  # a producer looks at who is there
            self._say("warm")
        self._until("warm", cell.producers * order.warm)
        measured = order.samples - order.warm
        passages = {"live": self._measure("live")}
        self._count("done", cell.producers * measured)
        if ours:
            self._until("attached", 2 * cell.consumers)
            passages["stored"] = self._stored()
        return passages

    def _stored(self) -> Passage:
        """Out of full spools, between two samples of a flow: nobody has to begin or to wait for
        the last one."""
        cell = self._cell
        self._say("fill")
        self._until("filled", cell.producers)
        self._heard["warm"].clear()
        self._say("stored")
        self._until("warm", cell.consumers)
        passage = self._measure("count")
        self._until("over", cell.consumers)
        self._count("over", cell.producers * self._order.stored)
        return passage

    def close(self) -> None:
        for end in self._ends:
            end.process.kill()
            end.process.wait()
            with suppress(BrokenPipeError):
                end.words.close()
            end.reader.join()

    def _start(self, role: str, number: int, addresses: list[str]) -> None:
        directory = self._order.directory / f"{role}-{number}"
        directory.mkdir()
        order = msgspec.structs.replace(
            self._order, role=role, number=number, addresses=addresses, directory=directory
        )
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [*self._hosts.enter.get(role, ()), sys.executable, str(END), order.words()],
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._ends.append(_End(order, process, self._events))

    def _measure(self, word: str) -> Passage:
        """From that word, upon which the measured part begins, until all of it was checked."""
        for heard in ("done", "stages"):
            self._heard[heard].clear()
        began, before = time.monotonic(), self._cpu_seconds()
        self._say(word)
        done = [facts for _, facts in self._until("done", self._cell.consumers)]
        seconds = time.monotonic() - began
        spent = {role: cpu - before[role] for role, cpu in self._cpu_seconds().items()}
        return Passage(
            sum(facts["bytes"] for facts in done),
            seconds,
            spent["producer"],
            spent["consumer"],
            sum(facts["check_seconds"] for facts in done),
            self._stages() if self._order.stages else {},
        )

    def _count(self, event: str, samples: int) -> None:
        """Raises SystemExit unless as many were checked as were sent."""
        if (came := sum(facts["samples"] for _, facts in self._heard[event])) != samples:
            raise SystemExit(f"{self._cell.name}: {came} of {samples} samples were checked")

    def _cpu_seconds(self) -> dict[str, float]:
        """By role."""
        spent = {"producer": 0.0, "consumer": 0.0}
        for end in self._ends:
            spent[end.order.role] += cpu_seconds(end.process.pid)
        return spent

    def _stages(self) -> dict[str, dict[str, float]]:
        self._say("end")
        told = self._until("stages", len(self._ends))
        stages: dict[str, dict[str, float]] = {"producer": {}, "consumer": {}}
        for end, facts in told:
            of_role = stages[end.order.role]
            for stage, seconds in facts["seconds"].items():
                of_role[stage] = of_role.get(stage, 0.0) + seconds
        return stages

    def _say(self, word: str) -> None:
        for end in self._ends:
            with suppress(BrokenPipeError):  # one that has ended is heard of by `_until`
                end.words.write(f"{word}\n".encode())
                end.words.flush()

    def _until(self, event: str, count: int) -> list[tuple["_End", dict[str, Any]]]:
        """Until so many of it were heard; returns them. Raises Absent, Damaged, SystemExit."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(self._heard[event]) < count:
            try:
                end, facts = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SystemExit(
                    f"{self._cell.name}: no {event!r} within {TIMEOUT_SECONDS:.0f} s"
                ) from None
            match facts["event"]:
                case "absent":
                    raise Absent(facts["why"])
                case "damaged":
                    raise Damaged(f"sample {facts['sample']} of producer {facts['producer']}")
                case "ended":
                    log = (end.order.directory / "log").read_text(errors="replace")
                    raise SystemExit(f"{self._cell.name}: a {end.order.role} ended:\n{log[-4000:]}")
                case heard:
                    self._heard[heard].append((end, facts))
        return self._heard[event]


class _End:
    """A process, and a thread that reads what it says."""

    def __init__(
        self,
        order: Order,
        process: "subprocess.Popen[bytes]",
        events: "queue.SimpleQueue[tuple[_End, dict[str, Any]]]",
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.order, self.process, self.words = order, process, process.stdin
        self._said, self._events = process.stdout, events
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with self._said:
            for line in self._said:
                self._events.put((self, json.loads(line)))
        self._events.put((self, {"event": "ended"}))
