"""A minute of hostile peers, from other seeds each time; a failure names its seed. And that the
fuzzer notices what it is there for."""

import logging
import random
import time
import tracemalloc
from typing import Any

import pytest

import peer_fuzz
from draftfeed_consumer.reception import Reception
from draftfeed_producer.fencing import Fencing

SECONDS = 20.0
"""For each world, of which there are three."""


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Refused messages are logged; there are many."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("world", peer_fuzz.WORLDS)
def test_no_peer_breaks_a_state_machine_or_the_promise(
    world: type[Any], record_property: Any
) -> None:
    first = seed = random.SystemRandom().randrange(1 << 40)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            peer_fuzz.run(world, seed)
        except BaseException as error:
            error.add_note(f"python -m peer_fuzz --seed {seed}")
            raise
        seed += 1
    record_property(f"{world.__name__}: runs of {peer_fuzz.STEPS} messages", seed - first)


def found(world: type[Any], runs: int = 60) -> bool:
    for seed in range(runs):
        try:
            peer_fuzz.run(world, seed)
        except Exception:  # noqa: BLE001 - whatever it is, it was found
            return True
    return False


def test_messages_from_a_foreign_connection_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who knows a session's name, and is not the one who has it."""

    def owned(self: Fencing, sender: bytes, message: Any) -> Any:
        for member in self.attached.values():
            session = member.session
            if session and (message.term, message.session) == (self.number, session.name):
                return member, session
        return None

    monkeypatch.setattr(Fencing, "owned", owned)
    assert found(peer_fuzz.ServerWorld)


def test_room_that_is_not_given_back_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: Reception) -> None:
        self._drop_half()
        self._due.clear()
        self.offers.clear()

    monkeypatch.setattr(Reception, "close", close)
    assert found(peer_fuzz.ClientWorld)


def test_attack_leaves_nothing_behind_in_memory(record_property: Any) -> None:
    """Whatever strangers say for as long as they like."""
    world = peer_fuzz.ServerWorld(random.Random(5))
    for _ in range(1500):
        world.attack()
    tracemalloc.start()
    try:
        for _ in range(500):
            world.attack()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3000):
            world.attack()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    record_property("bytes that 3,000 more messages leave", after - before)
    assert after - before < 64_000
