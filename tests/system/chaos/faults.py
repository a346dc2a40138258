"""One function for each kind of fault: it acts, waits by yielding seconds, and undoes.

`mark.begin(...)` says that the fault really happened; one that found nothing to break does not
say so, and is not counted.
"""

import random
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

from chaos import hosts
from chaos.nodes import Producer, Trainer
from chaos.world import Broken, World, other_host

POLL_SECONDS = 0.02
PATIENCE_SECONDS = 120.0
SLOW_BYTES_PER_SECOND = 20_000
SAVE_SECONDS = 8.0
"""Longer than it takes another node to start and take over."""

Steps = Generator[float, None, None]


class Mark:
    """When a fault really began."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.began: float | None = None
        self.ended: float | None = None
        self.detail = ""

    def begin(self, detail: str = "") -> None:
        self.began, self.detail = time.monotonic(), detail


class Scene(NamedTuple):
    """What a fault function is given."""

    world: World
    rng: random.Random
    mark: Mark
    claims: frozenset[str]

    @property
    def producer(self) -> Producer:
        """The one that the fault has claimed."""
        return next(one for one in self.world.producers if one.name in self.claims)


Claims = Callable[[World, random.Random], set[str]]


class Kind(NamedTuple):
    act: Callable[[Scene], Steps]
    claims: Claims
    """What nothing else may act upon meanwhile; empty: not possible now."""

    @property
    def name(self) -> str:
        return self.act.__name__.replace("_", " ")


def until(condition: Callable[[], bool], what: str) -> Steps:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
        yield POLL_SECONDS


def a_while(rng: random.Random) -> float:
    """Seconds, now and then longer than ZeroMQ's heartbeats need to notice (15 s)."""
    return 17.0 if rng.random() < 0.03 else rng.uniform(0.3, 3.0)


# what faults claim


def a_producer(world: World, rng: random.Random) -> set[str]:
    alive = [one.name for one in world.producers if one.alive and not one.stopped]
    return {rng.choice(alive)} if alive else set()


def the_trainer(world: World, rng: random.Random) -> set[str]:
    """A pending one may be killed: then it is known never to take over later."""
    return {"trainer"} if world.current.alive and not world.current.stopped else set()


def producer_and_trainer(world: World, rng: random.Random) -> set[str]:
    producer, trainer = a_producer(world, rng), the_trainer(world, rng)
    return producer | trainer if producer and trainer else set()


def a_link(world: World, rng: random.Random) -> set[str]:
    if world.plan.link == "local":
        return set()
    return {f"link {rng.choice([hosts.PRODUCERS, world.current.host])}"}


def a_disk(world: World, rng: random.Random) -> set[str]:
    return {f"disk {rng.choice(world.producers).number}"}


def the_wire(world: World, rng: random.Random) -> set[str]:
    return {"wire"} if world.plan.link == "tcp" else set()


def wire_and_trainer(world: World, rng: random.Random) -> set[str]:
    return {"wire", "trainer"} if the_trainer(world, rng) else set()


# faults


def kill_producer(scene: Scene) -> Steps:
    scene.producer.kill()
    scene.mark.begin(scene.producer.name)
    yield a_while(scene.rng)
    scene.producer.start()


def kill_consumer(scene: Scene) -> Steps:
    world = scene.world
    world.current.kill()
    scene.mark.begin(world.current.name)
    yield a_while(scene.rng)
    _start_again(scene)


def kill_both(scene: Scene) -> Steps:
    scene.producer.kill()
    scene.world.current.kill()
    scene.mark.begin(f"{scene.producer.name} and {scene.world.current.name}")
    yield a_while(scene.rng)
    if scene.rng.random() < 0.5:
        _start_again(scene)
        yield a_while(scene.rng)
        scene.producer.start()
    else:
        scene.producer.start()
        yield a_while(scene.rng)
        _start_again(scene)


def stop_producer(scene: Scene) -> Steps:
    scene.producer.stop()
    scene.mark.begin(scene.producer.name)
    yield a_while(scene.rng)
    scene.producer.go_on()


def stop_consumer(scene: Scene) -> Steps:
    trainer = scene.world.current
    trainer.stop()
    scene.mark.begin(trainer.name)
    yield a_while(scene.rng)
    trainer.go_on()


def cut_link(scene: Scene) -> Steps:
    (claim,) = scene.claims
    host = claim.removeprefix("link ")
    scene.world.links.cut(host)
    scene.mark.begin(host)
    yield a_while(scene.rng)
    scene.world.links.heal(host)


def truncate_segment(scene: Scene) -> Steps:
    scene.producer.kill()
    if detail := scene.producer.truncate(scene.rng):
        scene.mark.begin(f"{scene.producer.name} {detail}")
    yield a_while(scene.rng)
    scene.producer.start()


def flip_disk_while_down(scene: Scene) -> Steps:
    scene.producer.kill()
    if detail := scene.producer.flip(scene.rng):
        scene.mark.begin(f"{scene.producer.name} {detail}")
    yield a_while(scene.rng)
    scene.producer.start()


def flip_disk_while_running(scene: Scene) -> Steps:
    producer = _producer_of_disk(scene)
    if producer.alive and (detail := producer.flip(scene.rng)):
        scene.mark.begin(f"{producer.name} {detail}")
    yield 0.5


def fill_disk(scene: Scene) -> Steps:
    producer = _producer_of_disk(scene)
    if not producer.segments():
        return  # a spool cannot be made on a full disk, and loses nothing by that
    taken = producer.fill_disk()
    scene.mark.begin(f"{producer.name} {taken} bytes taken")
    yield a_while(scene.rng)
    producer.free_disk()


def flip_wire(scene: Scene) -> Steps:
    relay = scene.world.relay
    before, deadline = relay.flipped, time.monotonic() + 5
    relay.flip(scene.rng.randint(1, 4))
    while relay.flipped == before and time.monotonic() < deadline:
        yield POLL_SECONDS
    if relay.flipped > before:
        scene.mark.begin()
    yield 1.0
    relay.flip(0)
    scene.mark.detail = f"{relay.flipped - before} bytes"


def take_over_in_mid_checkpoint(scene: Scene) -> Steps:
    yield from _trainer_has_the_stream(scene)
    old = scene.world.current
    old.save_now(SAVE_SECONDS)
    yield from until(lambda: old.saving() or not old.alive, f"{old.name} makes a checkpoint")
    if not old.alive:
        return  # it had trained everything
    old, new = scene.world.take_over()
    scene.mark.begin(f"{old.name} -> {new.name}")
    yield from _granted(scene, new)
    if not (new.granted and old.saving_at(new.noted("granted")[0]["at"])):
        scene.mark.kind = "take over"
    old.want(save_seconds=0.0)


def take_over_in_mid_sample(scene: Scene) -> Steps:
    yield from _trainer_has_the_stream(scene)
    if not scene.world.current.alive:
        return
    relay = scene.world.relay
    relay.slow(SLOW_BYTES_PER_SECOND)
    old, new = scene.world.take_over()
    scene.mark.begin(f"{old.name} -> {new.name}")
    half_sent: list[bool] = [False]

    def granted() -> bool:
        half_sent.append(relay.mid_payload())
        return new.granted

    yield from until(granted, f"{new.name} takes over")
    if not half_sent[-2]:  # just before the grant: that ends the old session
        scene.mark.kind = "take over"
    relay.slow(0)


def wake_old_node(scene: Scene) -> Steps:
    """Frozen for so long that another was put in its place; then it goes on."""
    yield from _trainer_has_the_stream(scene)
    if not scene.world.current.alive:
        return
    scene.world.current.stop()
    yield a_while(scene.rng)
    old, new = scene.world.take_over()
    scene.mark.begin(f"{old.name} -> {new.name}")
    yield from _granted(scene, new)
    yield a_while(scene.rng)
    old.go_on()
    yield from until(lambda: not old.alive, f"{old.name} was replaced and leaves")


def drain_and_swap(scene: Scene) -> Steps:
    yield from _trainer_has_the_stream(scene)
    old = scene.world.current
    if not old.alive:
        return
    drain = scene.world.drain()
    scene.mark.begin(old.name)
    yield from until(lambda: drain.poll() is not None, f"{old.name} is drained")
    if not old.unconfirmed and (drain.returncode or old.code != 0):
        raise Broken(f"drain ended with {drain.returncode}, {old.name} with {old.code}")
    if scene.world.current is old and not scene.world.over():
        scene.world.launch_trainer(host=other_host(old.host))


KINDS = (
    Kind(kill_producer, a_producer),
    Kind(kill_consumer, the_trainer),
    Kind(kill_both, producer_and_trainer),
    Kind(stop_producer, a_producer),
    Kind(stop_consumer, the_trainer),
    Kind(cut_link, a_link),
    Kind(truncate_segment, a_producer),
    Kind(flip_disk_while_down, a_producer),
    Kind(flip_disk_while_running, a_disk),
    Kind(fill_disk, a_disk),
    Kind(flip_wire, the_wire),
    Kind(take_over_in_mid_checkpoint, the_trainer),
    Kind(take_over_in_mid_sample, wire_and_trainer),
    Kind(wake_old_node, the_trainer),
    Kind(drain_and_swap, the_trainer),
)


def _start_again(scene: Scene) -> None:
    """On any host; whoever knows that the old one is dead may take over at once, or wait."""
    takeover = ["--takeover"] if scene.rng.random() < 0.5 else []
    scene.world.launch_trainer(*takeover, host=scene.rng.choice(hosts.TRAINERS))


def _trainer_has_the_stream(scene: Scene) -> Steps:
    """One that still waits for its grant cannot be replaced: it might get it after the other."""

    def settled() -> bool:
        return scene.world.current.granted or not scene.world.current.alive

    yield from until(settled, f"{scene.world.current.name} is granted the stream")


def _granted(scene: Scene, new: Trainer) -> Steps:
    def settled() -> bool:
        return new.granted or new is not scene.world.current

    yield from until(settled, f"{new.name} takes over")


def _producer_of_disk(scene: Scene) -> Producer:
    (claim,) = scene.claims
    return scene.world.producers[int(claim.removeprefix("disk "))]
