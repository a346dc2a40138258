"""Begins faults at random, several at once, and keeps the log of what really happened."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from chaos.faults import KINDS, Kind, Mark, Scene, Steps
from chaos.world import World

MOST_AT_ONCE = 3
CHOICE = 4
"""Of the next cards of the deck. Of all of them, those that last longest would come least."""
PAUSE_SECONDS = (0.1, 2.5)
"""Between the beginnings of two faults."""


class Happened(NamedTuple):
    """Times are CLOCK_MONOTONIC."""

    kind: str
    began: float
    ended: float
    detail: str


class Active:
    def __init__(self, steps: Steps, scene: Scene) -> None:
        self.steps, self.scene = steps, scene
        self.due = 0.0


class Schedule:
    def __init__(self, world: World, seed: int, say: Callable[[str], None]) -> None:
        self._world, self._say = world, say
        self._rng = random.Random(seed)
        self.patient = self._rng.random() < 0.7
        self._deck: list[Kind] = []
        self._active: list[Active] = []
        self._next_at = 0.0
        self.happened: list[Happened] = []

    @property
    def quiet(self) -> bool:
        return not self._active

    def turn(self, now: float) -> None:
        """Go on with what is active, and perhaps begin another."""
        self.go_on(now)
        if now >= self._next_at and len(self._active) < MOST_AT_ONCE:
            self._begin()
            self._next_at = now + self._rng.uniform(*PAUSE_SECONDS)

    def go_on(self, now: float) -> None:
        for active in [one for one in self._active if one.due <= now]:
            try:
                active.due = now + next(active.steps)
            except StopIteration:
                self._active.remove(active)
                self._record(active.scene.mark)

    def began(self) -> int:
        """Faults that really happened, those that last included."""
        lasting = sum(active.scene.mark.began is not None for active in self._active)
        return len(self.happened) + lasting

    def _begin(self) -> None:
        taken = {claim for active in self._active for claim in active.scene.claims}
        if len(self._deck) < len(KINDS):
            self._deck += self._rng.sample(KINDS, len(KINDS))
        for kind in self._deck[:CHOICE]:
            claims = kind.claims(self._world, self._rng)
            if claims and not claims & taken:
                self._deck.remove(kind)
                scene = Scene(self._world, self._rng, Mark(kind.name), frozenset(claims))
                self._active.append(Active(kind.act(scene), scene))
                self._world.note(f"{kind.name}: chosen", claims=sorted(claims))
                return

    def _record(self, mark: Mark) -> None:
        ended = time.monotonic()
        if mark.began is None:
            self._world.note(f"{mark.kind}: found nothing to break")
            return
        self.happened.append(Happened(mark.kind, mark.began, ended, mark.detail))
        lasted = round(ended - mark.began, 3)
        self._world.note(f"{mark.kind}: over", detail=mark.detail, seconds=lasted)
        self._say(f"{len(self.happened):4d}  {mark.kind}: {mark.detail}, {lasted} s")


def counts(happened: Iterable[Happened]) -> Counter[str]:
    return Counter(one.kind for one in happened)


def overlaps(happened: Sequence[Happened]) -> Counter[str]:
    """How often two kinds were active at once."""
    pairs = combinations(sorted(happened, key=lambda one: one.kind), 2)
    at_once = (p for p in pairs if p[0].began < p[1].ended and p[1].began < p[0].ended)
    return Counter(f"{a.kind} + {b.kind}" for a, b in at_once)
