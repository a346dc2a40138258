"""Everything there is: producers, one or two lives of a training run, links, and what can happen.

Steps need no fault; faults do. Both are plain tuples: the name of a method and its arguments, so
that a trace can be printed and played again.
"""

from typing import Any, NamedTuple

from draftfeed_consumer.actions import Attach
from model_faults import Faults, Step, rank_tag
from model_group import SCRATCH, Checkpoint, Group, Rank
from model_link import Link
from model_producer import KEEP_COMMITS, Producer
from model_promise import check_refusal

TICK_SECONDS = 11.0
"""Longer than the session timeout: whoever is tried again has waited for it."""

QUIET = (
    *("arrive_up", "arrive_down", "notice_up", "notice_down"),
    *("launch", "bury", "start", "relink", "heal"),
)
"""Steps that by themselves bring nobody nearer to the end."""


class Scope(NamedTuple):
    """How much of everything."""

    producers: int = 2
    ranks: int = 2
    samples: int = 3
    """Shared out among the producers."""
    room_samples: int = 0
    """What a rank has room for; 0 = anything."""
    synced: bool = False
    """Whether a sample is on the disk before it is offered, or may be lost with the power."""
    early_saves: bool = False
    """A checkpoint after every step rather than at the end, when nothing else decides."""


class World(Faults):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.now = 0.0
        self.names = 0
        self.links: dict[bytes, Link] = {}
        share, more = divmod(scope.samples, scope.producers)
        self.producers = [
            Producer(k, share + (k < more), self.links, self.new_name)
            for k in range(scope.producers)
        ]
        for producer in self.producers:
            producer.start(self.now)
        self.disk: list[Checkpoint] = []
        """Durable checkpoints that are kept, oldest first."""
        self.rolling_back = ""
        """How, until every producer has accepted it."""
        self.lives = 0
        self.groups: list[Group] = []
        self.ticked = False
        """Nothing but new connections happened since the last ones."""
        self.touched: set[tuple[Any, ...]] = set()
        """What the last step was about."""
        self.begin(Attach())

    def new_name(self) -> str:
        self.names += 1
        return f"~{self.names:04d}"

    def do(self, step: Step) -> None:
        self.touched = set()
        name, *arguments = step
        if name not in QUIET:
            self.ticked = False
        getattr(self, name)(*arguments)
        self._tidy()

    # steps that need no choice: what is on its way arrives, what is over is found out

    def urgent(self) -> list[Step]:
        steps: list[Step] = []
        for link in self.links.values():
            if link.arrives_down:
                steps.append(("arrive_down", link.sender))
            if link.arrives_up and not self.producers[link.producer].blocked:
                steps.append(("arrive_up", link.sender))
        for link in self.links.values():
            if link.producer_may_notice and not self.producers[link.producer].blocked:
                steps.append(("notice_up", link.sender))
            if link.member_may_notice:
                steps.append(("notice_down", link.sender))
        steps += [("launch", g.life) for g in self.groups if g.may_load]
        ended = [group for group in self.groups if not group.alive or group.finished]
        steps += [("bury", group.life) for group in ended]
        steps += [("start", p.number) for p in self.producers if p.delivery is None]
        return steps

    def arrive_up(self, sender: bytes) -> None:
        link = self.links[sender]
        self._touch(link)
        self._touch_producer(link.producer)
        self.producers[link.producer].received(sender, link.up.popleft(), self.now)

    def arrive_down(self, sender: bytes) -> None:
        link = self.links[sender]
        self._touch(link)
        rank = self._rank(link)
        data, frame = link.down.popleft()
        rank.received(address(link.producer), data, frame)
        self._touch_rank(rank)
        self._settle_rollback(self._group(link.life), rank)

    def _settle_rollback(self, group: Group, rank: Rank) -> None:
        """It is over when all have accepted it. When samples are no longer there, which is said by
        name, they are asked for in the next life."""
        check_refusal(group, rank)
        if rank.failure is not None and rank.failure[0] == "rollback":
            self.rolling_back = "regenerate"
        if group.attach.rollback and all(peer.opened for peer in group.ranks[0].membership.peers):
            self.rolling_back = ""

    def notice_up(self, sender: bytes) -> None:
        link = self.links[sender]
        self._touch(link)
        self._touch_producer(link.producer)
        link.close_producer()
        self.producers[link.producer].disconnected(sender, self.now)

    def notice_down(self, sender: bytes) -> None:
        link = self.links[sender]
        self._touch(link)
        link.close_member()
        rank = self._rank(link)
        rank.unlinked(address(link.producer))
        self._touch_rank(rank)

    def launch(self, life: int) -> None:
        """The leader has the stream: the checkpoint is loaded, and the other ranks attach."""
        group = self._group(life)
        group.load(self.disk[-1] if self.disk else SCRATCH)
        for rank in group.ranks:
            self._touch_rank(rank)

    def bury(self, life: int) -> None:
        """It has left. Or a rank is gone: whoever started them ends the others, and what was not
        durable goes."""
        group = self._group(life)
        for rank in group.ranks:
            rank.die()
        self.groups.remove(group)

    def start(self, number: int) -> None:
        self._touch_producer(number)
        self.producers[number].start(self.now)

    # steps among which the search chooses

    def choices(self) -> list[Step]:
        """The first is what happens when nobody chooses: a run of these must reach the end."""
        relink: list[Step] = [("relink",)] if self._apart() else []
        heal: list[Step] = [("heal", k.sender) for k in self.links.values() if k.stalled]
        heal += [("unblock", p.number) for p in self.producers if p.full]
        again: list[Step] = [] if self.groups or self.over else [("begin_again",)]
        lost: list[Step] = [("give_up", group.life) for group in self.groups if self._lost(group)]
        work = [*self._engine_steps(), *self._trainer_steps()]
        first = [] if self.ticked else relink
        last = relink if self.ticked else []
        return [*first, *again, *work, *heal, *(lost or last)]

    def _engine_steps(self) -> list[Step]:
        steps: list[Step] = []
        for producer in self.producers:
            if producer.may_generate:
                steps.append(("generate", producer.number, self.scope.synced))
            if producer.may_finish:
                steps.append(("finish", producer.number))
        return steps

    def _trainer_steps(self) -> list[Step]:
        saves: list[Step] = []
        trains: list[Step] = []
        for group in self.groups:
            if group.saving:
                saves.append(("durable", group.life))
            if group.saved and group.training:
                saves.append(("commit", group.life))
            if group.may_save:
                saves.append(("save", group.life))
            if group.may_leave:
                saves.append(("leave", group.life))
            if group.training:
                busy = [rank for rank in group.ranks if rank.held or rank.at_work]
                trains += [("train", group.life, rank.number) for rank in busy]
        return [*saves, *trains] if self.scope.early_saves else [*trains, *saves]

    def trainer_choices(self) -> list[Step]:
        """What a trainer also does: it takes a sample and is not done with it, or refuses one."""
        ready = [(g.life, rank) for g in self.groups if g.training for rank in g.ranks if rank.held]
        takes: list[Step] = [
            ("take", life, rank.number) for life, rank in ready if not rank.at_work
        ]
        return [*takes, *(("reject", life, rank.number) for life, rank in ready)]

    def relink(self) -> None:
        """Time passes, and whoever is not connected tries again."""
        self.ticked = True
        self.now += TICK_SECONDS
        for rank, producer in self._apart():
            self._connect(rank, producer)

    def heal(self, sender: bytes) -> None:
        self.links[sender].stalled = False

    def give_up(self, life: int) -> None:
        """A producer is out of reach for longer than allowed."""
        self._group(life).ranks[-1].die()

    def _lost(self, group: Group) -> bool:
        """A rank waits for its leader to attach, which needs nothing more of a producer whose
        spool was lost since."""
        if not self.ticked:
            return False
        leader, *others = group.ranks
        done = [peer.address for peer in leader.membership.peers if peer.state == "done"]
        waiting = [one for rank in others for one in rank.missing()]
        lossy = [address(producer.number) for producer in self.producers if producer.lossy]
        return bool({*done} & {*waiting} & {*lossy})

    def unblock(self, number: int) -> None:
        self.producers[number].unblock()
        self._touch_producer(number)

    def begin_again(self) -> None:
        self.begin(Attach(rollback=self.rolling_back))  # type: ignore[arg-type]

    def begin(self, attach: Attach) -> None:
        self.lives += 1
        addresses = [address(producer.number) for producer in self.producers]
        group = Group(
            self.lives, self.scope.ranks, addresses, attach, self.new_name, self.scope.room_samples
        )
        self.groups.append(group)

    def generate(self, number: int, synced: bool) -> None:
        self._touch_producer(number)
        self.producers[number].generate(synced=synced)

    def finish(self, number: int) -> None:
        self._touch_producer(number)
        self.producers[number].finish()

    def take(self, life: int, number: int) -> None:
        group = self._group(life)
        group.take(group.ranks[number])
        self._touch_rank(group.ranks[number])

    def train(self, life: int, number: int) -> None:
        """Takes a sample and makes a step of it, when none was taken before."""
        group = self._group(life)
        rank = group.ranks[number]
        if not rank.at_work:
            group.take(rank)
        group.train(rank)
        self._touch_rank(rank)

    def reject(self, life: int, number: int) -> None:
        group = self._group(life)
        group.reject(group.ranks[number])
        self._touch_rank(group.ranks[number])

    def save(self, life: int) -> None:
        self._group(life).save()

    def durable(self, life: int) -> None:
        """The files are whole. Checkpoints beyond those that may be restored are deleted."""
        checkpoint = self._group(life).durable()
        self.disk = sorted([*self.disk, checkpoint], key=lambda one: one.key)[-KEEP_COMMITS:]

    def commit(self, life: int) -> None:
        group = self._group(life)
        group.commit()
        self._touch_rank(group.ranks[0])

    def leave(self, life: int) -> None:
        self._group(life).leave()

    @property
    def over(self) -> bool:
        """Every prompt is terminal. A run that has left before is started again, when the spool of
        a producer was lost after that, or a rollback is not yet known to all."""
        ended = all(p.delivery is not None and p.delivery.all_terminal for p in self.producers)
        return ended and not self.rolling_back

    # inner

    def _apart(self) -> list[tuple[Rank, int]]:
        return [
            (rank, producer.number)
            for group in self.groups
            for rank in group.ranks
            for producer in self.producers
            if producer.delivery is not None and address(producer.number) in rank.missing()
        ]

    def _connect(self, rank: Rank, number: int) -> None:
        life = next(group.life for group in self.groups if rank in group.ranks)
        link = Link(self.new_name().encode(), life, rank.number, number)
        self.links[link.sender] = link
        rank.linked(address(number), link)

    def _tidy(self) -> None:
        for link in [link for link in self.links.values() if link.gone]:
            del self.links[link.sender]

    def _rank(self, link: Link) -> Rank:
        ranks = self._group(link.life).ranks
        return next(rank for rank in ranks if link in rank.links.values())

    def _touch(self, link: Link) -> None:
        self.touched.add(link.tag)

    def _touch_producer(self, number: int) -> None:
        self.touched.add(("producer", number))
        self.touched |= {link.tag for link in self.links.values() if link.producer == number}

    def _touch_rank(self, rank: Rank) -> None:
        for group in self.groups:
            if rank in group.ranks:
                self.touched.add(rank_tag(group.life, rank.number))
        self.touched |= {link.tag for link in rank.links.values()}


def address(producer: int) -> str:
    return f"p{producer}"
