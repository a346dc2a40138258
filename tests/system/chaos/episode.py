"""One run from its first process to its audit."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from chaos import audit
from chaos.faults import POLL_SECONDS
from chaos.plan import Plan
from chaos.schedule import Happened, Schedule
from chaos.world import Broken, World

STANDSTILL_SECONDS = 60.0
LEAVE_SECONDS = 30.0
FAULTS_SECONDS_EACH = 30.0


class Result(NamedTuple):
    plan: Plan
    happened: list[Happened]
    trained: int
    terminal: int
    seconds: float
    broken: list[str]
    """Sentences; none when the promise held."""


def run(plan: Plan, directory: Path, say: Callable[[str], None]) -> Result:
    began = time.monotonic()
    world = World(plan, directory)
    schedule = Schedule(world, plan.seed, say)
    try:
        broken = _broken(world, schedule)
        if broken:
            _keep(world, broken)
        trained, terminal = len(world.last_checkpoint().counts), len(world.terminal())
        seconds = time.monotonic() - began
        return Result(plan, schedule.happened, trained, terminal, seconds, broken)
    finally:
        world.close()


def _broken(world: World, schedule: Schedule) -> list[str]:
    try:
        _break_things(world, schedule)
        _let_it_end(world, schedule)
    except Broken as error:
        return [str(error)]
    nodes = (*world.old, world.current)
    if world.plan.link == "local" and not any(node.read_files for node in nodes):
        return ["samples came over the network to a node on the producers' host"]
    last = world.last_checkpoint()
    terminal = world.terminal()
    found = audit.faults(audit.expected(world.plan), last.counts, last.digests, terminal)
    if len(terminal) > _may_be_lost(world):
        found.append(f"{len(terminal)} ended untrained: {dict(list(terminal.items())[:5])}")
    return found


def _may_be_lost(world: World) -> int:
    """A sample that arrives damaged five times, and one that nobody can make again."""
    flipped = sum(producer.flipped for producer in world.producers)
    replayed = world.plan.epochs * flipped if world.plan.source == "replayed" else 0
    return world.relay.flipped // 5 + replayed


def _break_things(world: World, schedule: Schedule) -> None:
    _settle(world, schedule)
    deadline = time.monotonic() + FAULTS_SECONDS_EACH * world.plan.faults
    while schedule.began() < world.plan.faults and not world.over():
        _tick(world)
        schedule.turn(time.monotonic())
        if time.monotonic() > deadline:
            raise Broken(f"only {schedule.began()} of {world.plan.faults} faults could be made")


def _settle(world: World, schedule: Schedule) -> None:
    """Most episodes begin when samples flow, some while everything is starting."""
    if schedule.patient:
        deadline = time.monotonic() + STANDSTILL_SECONDS
        while not world.current.granted:
            _tick(world)
            if time.monotonic() > deadline:
                raise Broken("nothing was granted, and no fault was made yet")


def _let_it_end(world: World, schedule: Schedule) -> None:
    """Faults end, then samples do."""
    while not schedule.quiet:
        _tick(world)
        schedule.go_on(time.monotonic())
    world.note("faults are over")
    progress, moved_at = world.progress(), time.monotonic()
    while not world.over():
        _tick(world)
        world.current.want(step_seconds=0.0, save_seconds=0.0)
        if world.progress() != progress:
            progress, moved_at = world.progress(), time.monotonic()
        if time.monotonic() - moved_at > STANDSTILL_SECONDS:
            raise Broken(f"nothing was trained for {STANDSTILL_SECONDS:.0f} s without faults")
    deadline = time.monotonic() + LEAVE_SECONDS
    while lingering := [one.name for one in world.old if one.alive]:
        _tick(world)
        if time.monotonic() > deadline:
            raise Broken(f"replaced, but still there: {', '.join(lingering)}")


def _tick(world: World) -> None:
    time.sleep(POLL_SECONDS)
    world.check()
    world.relaunch_stranded()


def _keep(world: World, broken: list[str]) -> None:
    """The spools lie on disks that vanish with this process."""
    world.note("broken", what=broken)
    (world.directory / "last-words.txt").write_text(world.last_words())
    for producer in world.producers:
        producer.kill()
        shutil.copytree(producer.spool, producer.directory / "spool-kept", dirs_exist_ok=True)
