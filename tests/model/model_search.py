"""Exhaustive search of the model.

From every quiet state (nothing on its way, nothing to be found out) every choice of the engine,
the trainer and the network is taken, as long as faults are left. In between, what is on its way
arrives in one order, and a fault can come after every single arrival that touched what the fault
concerns: moving it past an arrival elsewhere would give the same state. Orders of arrival that
differ on two links are reached by stalling a link, which is a fault; or by `orders`, which takes
every order, and lets every fault strike after every step.

When no faults are left, one fair run goes on from where the last one struck, and must reach the
end. States are checked, and known by their key, so that none is explored twice with as many faults
left.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from model_faults import Step
from model_link import Violation
from model_promise import check_end, check_state
from model_state import key, restored, snapshot
from model_world import Scope, World

Path = tuple[Any, ...] | None
"""The last step and the path before it: paths share their beginnings."""
ENDLESS_STEPS = 5000
"""Between two quiet states."""
DEEPEST = 20_000
"""Calls inside each other: three for each way that is left."""


class Found(NamedTuple):
    """What a search went through."""

    states: int
    """Different in their key or in how many faults were left; quiet ones, unless `orders`."""
    steps: int
    faults: Counter[str]

    def __str__(self) -> str:
        struck = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return f"{self.states} states, {self.steps} steps; faults: {struck}"


class Search:
    """Raises Violation with the steps that lead to it."""

    def __init__(
        self,
        scope: Scope,
        faults: int,
        *,
        kinds: frozenset[str] | None = None,
        choose: bool = True,
        orders: bool = False,
        limit_states: int | None = None,
    ) -> None:
        """kinds: of faults; None = all. choose: take every choice of engine and trainer, else only
        the first. orders: let what is on its way arrive in every order, and faults strike after
        every step. limit_states: stop there."""
        self._scope, self._faults, self._kinds = scope, faults, kinds
        self._choose, self._orders, self._limit = choose, orders, limit_states
        self._next: dict[bytes, bytes | None] = {}
        """From each state to the one after it, when nobody chooses; None: the end."""
        self._paths: dict[bytes, Path] = {}
        self._steps = 0
        self._struck: Counter[str] = Counter()

    def run(self) -> Found:
        sys.setrecursionlimit(max(DEEPEST, sys.getrecursionlimit()))
        self._explore(World(self._scope), self._faults, None)
        self._check_ends()
        return Found(len(self._next), self._steps, self._struck)

    @property
    def states(self) -> int:
        return len(self._next)

    def _explore(self, world: World, faults: int, path: Path) -> None:
        try:
            self._follow(world, faults, path)
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error

    def _follow(self, world: World, faults: int, path: Path) -> None:
        before: bytes | None = None
        busy = 0
        while True:
            urgent = world.urgent()
            options = urgent or world.choices()
            if self._orders or not urgent:
                self._checked(check_state, world, path)
                here = key(world) + bytes([faults])
                if before is not None:
                    self._next[before] = here
                if here in self._next:
                    return
                self._next[here] = None
                self._paths[here] = path
                before, busy = here, 0
            if self._limit is not None and len(self._next) >= self._limit:
                self._next[before or b""] = None
                return
            self._branch(world, faults, path, self._others(faults, urgent, options))
            if not options:
                self._checked(check_end, world, path)
                return
            busy += 1
            if busy > ENDLESS_STEPS:
                raise Violation(self._told("it goes on for ever", path))
            path = self._take(world, options[0], path)

    def _others(self, faults: int, urgent: list[Step], options: list[Step]) -> list[Step]:
        """What else may happen next, and is searched."""
        if urgent:
            return urgent[1:] if self._orders else []
        return options[1:] if self._choose and faults else []

    def _strikes(self, world: World) -> list[Step]:
        everywhere = self._orders or not world.urgent()
        return [
            step
            for step, concerns in world.faults()
            if (self._kinds is None or step[0] in self._kinds)
            and (everywhere or (concerns is not None and concerns & world.touched))
        ]

    def _branch(self, world: World, faults: int, path: Path, others: list[Step]) -> None:
        strikes = self._strikes(world) if faults else []
        if not strikes and not others:
            return
        saved = snapshot(world)
        for step in others:
            self._depart(saved, step, faults, path)
        for step in strikes:
            self._struck[step[0]] += 1
            self._depart(saved, step, faults - 1, path)

    def _depart(self, saved: bytes, step: Step, faults: int, path: Path) -> None:
        world = restored(saved)
        self._explore(world, faults, self._take(world, step, path))

    def _take(self, world: World, step: Step, path: Path) -> Path:
        self._steps += 1
        path = (step, path)
        try:
            world.do(step)
        except Violation as error:
            raise Violation(self._told(str(error), path)) from error
        except Exception as error:
            raise Violation(self._told(repr(error), path)) from error
        return path

    def _checked(self, check: Callable[[World], None], world: World, path: Path) -> None:
        try:
            check(world)
        except Violation as error:
            raise Violation(self._told(str(error), path)) from error

    def _told(self, what: str, path: Path) -> str:
        return "\n".join([what, f"after, in {self._scope}:", *map(str, steps(path))])

    def _check_ends(self) -> None:
        """Nobody's way leads back to where it was."""
        good: set[bytes] = set()
        for start in self._next:
            chain: dict[bytes, None] = {}
            at: bytes | None = start
            while at is not None and at not in good:
                if at in chain:
                    words = "a run without faults goes round in a circle"
                    raise Violation(self._told(words, self._paths[at]))
                chain[at] = None
                at = self._next[at]
            good.update(chain)


def steps(path: Path) -> list[Step]:
    """From the first to the last."""
    found: list[Step] = []
    while path is not None:
        step, path = path
        found.append(step)
    return found[::-1]
