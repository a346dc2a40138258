"""What can go wrong in a world, and what operators do to it."""

from typing import Any

from draftfeed_consumer.actions import Attach
from model_group import Checkpoint, Group
from model_link import Link
from model_producer import Producer

Step = tuple[Any, ...]
Tags = set[tuple[Any, ...]]
Fault = tuple[Step, Tags | None]
"""With what it concerns; None: it may as well wait for a quiet moment."""


class Faults:
    """The half of `World` that a search has to ask for."""

    producers: list[Producer]
    groups: list[Group]
    links: dict[bytes, Link]
    disk: list[Checkpoint]
    rolling_back: str

    def begin(self, attach: Attach) -> None:
        raise NotImplementedError

    def bury(self, life: int) -> None:
        raise NotImplementedError

    def _group(self, life: int) -> Group:
        return next(group for group in self.groups if group.life == life)

    def faults(self) -> list[Fault]:
        """Each with what it concerns; None: it may as well wait for a quiet moment."""
        found: list[Fault] = []
        for producer in self.producers:
            k = producer.number
            mine = {
                ("producer", k),
                *(link.tag for link in self.links.values() if link.producer == k),
            }
            if producer.delivery is not None:
                found += [(("kill", k, True), mine), (("kill", k, False), mine)]
                if not producer.full:
                    found.append((("fill", k), mine))
                if not all(producer.records.values()):
                    found.append((("lose_power", k), mine))
                if producer.control.term is not None and len(self.groups) == 1:
                    found += [(("lose_spool", k, said), None) for said in (True, False)]
        for link in self.links.values():
            if not link.cut and link.member_open and link.producer_open:
                found.append((("cut", link.sender), {link.tag}))
                if not link.stalled:
                    found.append((("stall", link.sender), {link.tag}))
        for group in self.groups:
            found += self._group_faults(group)
        return found

    def _group_faults(self, group: Group) -> list[Fault]:
        life = group.life
        found: list[Fault] = [
            (("crash", life, rank.number), {rank_tag(life, rank.number)})
            for rank in group.ranks
            if rank.alive
        ]
        found.append((("crash_all", life), None))
        if group.saving:
            found.append((("fail_save", life), None))
        between = not any(rank.at_work for rank in group.ranks)
        if group.training and between and not group.draining:
            found.append((("drain", life), None))
        # A spool that is lost takes the memory of who was replaced along: nobody takes over
        # before the run has attached to the new one.
        fenced = all(producer.control.term for producer in self.producers)
        if group.training and len(self.groups) == 1 and fenced:
            found.append((("take_over",), None))
            found += [(("roll_back", life, how), None) for how in ("deliver", "regenerate")]
        return found

    def kill(self, number: int, lost: bool) -> None:
        """lost: what it had sent does not arrive any more."""
        self.producers[number].stop()
        self._disconnect(number, lost=lost)

    def lose_power(self, number: int) -> None:
        self.producers[number].lose_power()
        self._disconnect(number, lost=True)

    def lose_spool(self, number: int, said: bool) -> None:
        """said: its operator knows, and tells the new spool that there was another."""
        producer = self.producers[number]
        producer.stop()
        producer.new_disk(lost=said)
        producer.lossy = True
        self._disconnect(number, lost=False)

    def fill(self, number: int) -> None:
        """The disk is full when the next record of the control log is to be written."""
        self.producers[number].full = True

    def cut(self, sender: bytes) -> None:
        self.links[sender].break_off()

    def stall(self, sender: bytes) -> None:
        self.links[sender].stalled = True

    def crash(self, life: int, number: int) -> None:
        self._group(life).ranks[number].die()

    def crash_all(self, life: int) -> None:
        self.bury(life)

    def fail_save(self, life: int) -> None:
        self._group(life).saving.pop(0)

    def drain(self, life: int) -> None:
        self._group(life).drain()

    def take_over(self) -> None:
        self.begin(Attach(takeover=True))

    def roll_back(self, life: int, how: str) -> None:
        """The run is started again from the oldest checkpoint there is. The newer one is deleted:
        who started from it later would be refused."""
        self.bury(life)
        self.disk = self.disk[:-1]
        self.rolling_back = how
        self.begin(Attach(rollback=how))  # type: ignore[arg-type]

    def _disconnect(self, number: int, *, lost: bool) -> None:
        for link in self.links.values():
            if link.producer == number:
                link.close_producer()
                if lost:
                    link.down.clear()


def rank_tag(life: int, number: int) -> tuple[str, int, int]:
    return ("rank", life, number)
