"""The same model beyond the scope of the search: up to three ranks, three producers, nine samples
and a dozen faults, in any order of arrival. A failure prints the steps and what reproduces them.
"""

import logging
import os
from collections.abc import Callable

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from model_faults import Step
from model_link import Violation
from model_promise import check_end, check_state
from model_world import Scope, World

EXAMPLES = os.environ.get("DRAFTFEED_MODEL_EXAMPLES")
"""The suite always makes the same runs; so many others are for `make model`."""
MAX_FAULTS = 12
FAIR_STEPS = 20_000

scopes = st.builds(
    Scope,
    producers=st.integers(1, 3),
    ranks=st.integers(1, 3),
    samples=st.integers(3, 9),
    room_samples=st.integers(0, 2),
    early_saves=st.booleans(),
)
anything = st.integers(0, 1 << 30)
"""One of the steps there are, whatever their number."""


class Model(RuleBasedStateMachine):
    world: World

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.faults = 0
        self.path: list[Step] = []

    def do(self, step: Step) -> None:
        self.path.append(step)
        self.world.do(step)

    @initialize(scope=scopes)
    def begin(self, scope: Scope) -> None:
        self.world = World(scope)

    @precondition(lambda self: self.world.urgent())
    @rule(which=anything)
    def arrive(self, which: int) -> None:
        """Out of order, as far as links keep theirs."""
        steps = self.world.urgent()
        self.do(steps[which % len(steps)])

    @precondition(lambda self: self.world.choices())
    @rule(which=anything)
    def work(self, which: int) -> None:
        """Though something may be on its way."""
        steps = self.world.choices()
        self.do(steps[which % len(steps)])

    @precondition(lambda self: self.world.trainer_choices())
    @rule(which=anything)
    def train_otherwise(self, which: int) -> None:
        """Take a sample and keep it, or refuse it."""
        steps = self.world.trainer_choices()
        self.do(steps[which % len(steps)])

    @rule(steps=st.integers(1, 40))
    def go_on(self, steps: int) -> None:
        """As it would when nothing goes wrong."""
        for _ in range(steps):
            if not self.fair_step():
                return

    @precondition(lambda self: self.faults < MAX_FAULTS and self.world.faults())
    @rule(which=anything)
    def fail(self, which: int) -> None:
        steps = [step for step, _ in self.world.faults()]
        self.faults += 1
        self.do(steps[which % len(steps)])

    @invariant()
    def nothing_is_lost_or_trained_twice(self) -> None:
        if hasattr(self, "world"):
            self.told(check_state)

    def told(self, check: Callable[[World], None]) -> None:
        try:
            check(self.world)
        except Violation:
            note("\n".join([f"after, in {self.world.scope}:", *map(str, self.path)]))
            raise

    def fair_step(self) -> bool:
        steps = self.world.urgent() or self.world.choices()
        if steps:
            self.do(steps[0])
        return bool(steps)

    def teardown(self) -> None:
        """With no more faults it must come to an end."""
        if hasattr(self, "world"):
            for _ in range(FAIR_STEPS):
                if not self.fair_step():
                    self.told(check_state)
                    self.told(check_end)
                    break
            else:
                raise AssertionError("it goes on for ever")
        logging.disable(logging.NOTSET)


Model.TestCase.settings = settings(
    max_examples=int(EXAMPLES or 60),
    derandomize=EXAMPLES is None,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
TestModel = Model.TestCase
