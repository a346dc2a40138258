"""All processes of an episode and what lies between them: what faults act upon."""

import json
import subprocess
import time
from pathlib import Path

from chaos import hosts
from chaos.archives import make_archive
from chaos.checkpoints import Checkpoint, newest, read
from chaos.nodes import COMMAND, FENCED, Process, Producer, Trainer
from chaos.plan import Plan
from chaos.relay import Relay


class Broken(AssertionError):
    """The promise does not hold, or a process did what it should not."""


class World:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan, self.directory = plan, directory
        self.checkpoints = directory / "checkpoints"
        self.checkpoints.mkdir(parents=True)
        self._log = (directory / "events.jsonl").open("w", buffering=1)
        self._began = time.monotonic()
        self.links = hosts.Hosts()
        # The first producer lies behind a relay, a second one is reached directly.
        archive = directory / "archive"
        if plan.source == "replayed":
            make_archive(plan, archive, directory)
        self.producers = [
            Producer(
                number, plan, directory / f"producer{number}", archive, behind_relay=number == 0
            )
            for number in range(plan.producers)
        ]
        self.relay = self._relay(self.producers[0])
        self.old: list[Trainer] = []
        """Replaced by a takeover while they lived: each must end with exit code FENCED."""
        self._trainers = 0
        for producer in self.producers:
            producer.start()
        self.current = self.launch_trainer()
        """The node that is to train; the last one started."""

    def _relay(self, producer: Producer) -> Relay:
        listener = hosts.listen(producer.host, producer.public_port)
        return Relay(
            listener,
            lambda: hosts.connect(producer.host, producer.loopback_port),
            self.plan.seed,
        )

    def launch_trainer(self, *options: str, host: str = "") -> Trainer:
        """Start a node, which becomes the current one.

        An operator leaves producers out that have ended: nobody grants the stream there.
        """
        without = [one.address for one in self.producers if one.done]
        addresses = [producer.address for producer in self.producers]
        host = host or hosts.TRAINERS[0]
        trainer = Trainer(self._trainers, host, self.plan, self.directory, addresses)
        trainer.start(options, without)
        self._trainers += 1
        self.current = trainer
        self.note(f"{trainer.name} started", options=options, without=without)
        return trainer

    def take_over(self) -> tuple[Trainer, Trainer]:
        """(the node replaced while it lives, its successor on the other host)"""
        old = self.current
        self.old.append(old)
        return old, self.launch_trainer("--takeover", host=other_host(old.host))

    def drain(self) -> "subprocess.Popen[bytes]":
        """Ask the current node to leave in an orderly way."""
        trainer = self.current
        with (trainer.directory / "drain.log").open("ab") as log:
            return subprocess.Popen(
                [COMMAND, "drain", "-c", "consumer.toml"],
                cwd=trainer.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def check(self) -> None:
        """Raises Broken when a process ended as none should."""
        for producer in self.producers:
            _check_code(producer, {0})
        for trainer in self.old:
            _check_code(trainer, {FENCED})
        _check_code(self.current, {0})

    def relaunch_stranded(self) -> None:
        """A node that ended unconfirmed is started again; one that waits for the grant of a
        producer that ended since, without it."""
        trainer = self.current
        if trainer.unconfirmed:
            self.launch_trainer(host=trainer.host)
            return
        waits = trainer.alive and not trainer.stopped and not trainer.granted
        if waits and any(one.done and one.address not in trainer.without for one in self.producers):
            trainer.kill()
            self.launch_trainer("--takeover", host=trainer.host)

    def over(self) -> bool:
        return self.current.code == 0 and all(producer.done for producer in self.producers)

    def progress(self) -> object:
        """Changes for as long as anything is trained."""
        path = newest(self.checkpoints)
        return (path and path.name, [trainer.name for trainer in (*self.old, self.current)])

    def last_checkpoint(self) -> Checkpoint:
        path = newest(self.checkpoints)
        return read(path) if path is not None else Checkpoint({}, {}, 0, {})

    def terminal(self) -> dict[str, str]:
        return {id: why for producer in self.producers for id, why in producer.terminal().items()}

    def note(self, event: str, **details: object) -> None:
        at = round(time.monotonic() - self._began, 3)
        self._log.write(json.dumps({"at": at, "event": event, **details}) + "\n")

    def last_words(self) -> str:
        """The ends of all logs, for a person."""
        processes: list[Process] = [*self.producers, *self.old, self.current]
        heads = (f"--- {one.name}, code {one.code}\n" for one in processes)
        words = (one.last_words() for one in processes)
        return "\n".join(head + said for head, said in zip(heads, words, strict=True))

    def close(self) -> None:
        for process in (*self.producers, *self.old, self.current):
            process.kill()
        self.relay.close()
        for producer in self.producers:
            hosts.take_out(producer.disk)
        self.links.close()
        self._log.close()


def other_host(host: str) -> str:
    first, second = hosts.TRAINERS
    return second if host == first else first


def _check_code(process: Process, right: set[int]) -> None:
    code = process.code
    if code is None or code in right or process.killed or process.unconfirmed:
        return
    raise Broken(f"{process.name} ended with code {code}\n{process.last_words()}")
