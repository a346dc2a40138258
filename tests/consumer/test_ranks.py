"""What ranks tell each other: two real processes, gloo over loopback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftfeed_consumer.errors import LauncherError
from draftfeed_consumer.ranks import Ranks

CHILD = Path(__file__).parent / "ranks_child.py"
SECONDS = 90
SHARED_STORE = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
"""What torchrun tells its ranks, unless it is told otherwise."""


def both(scenario: str, codes: tuple[int, int] = (0, 0)) -> list[Any]:
    """What each rank printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), scenario, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=SECONDS) for child in children]
    finally:
        for child in children:
            child.kill()
    assert tuple(child.returncode for child in children) == codes, outputs
    return [json.loads(out) if out else None for out, _ in outputs]


def test_rank_that_runs_out_first_does_not_leave_the_others_in_their_all_reduce() -> None:
    seen = both("ends")
    assert seen[0] == seen[1]
    assert seen[0]["steps"] == 3
    assert seen[0]["weights"] == [2.0, 1.0, 1.0]  # the empty rank took part with nothing


def test_checkpoint_and_stop_that_one_rank_is_asked_for_happen_on_all() -> None:
    first, second = both("wishes")
    assert first == second
    step, checkpoint, draining, over = range(4)
    assert first[0][checkpoint]
    assert first[1][draining]
    assert not first[1][over]  # the batches they have are trained
    assert not first[2][over]  # one rank only waits for its samples
    assert not first[2][step]
    assert first[3][over]


def test_state_is_the_same_on_all_ranks_and_holds_what_each_trained() -> None:
    first, second = both("states")
    assert first["state"] == second["state"]
    assert first["state"]["number"] == 8  # the leader's
    assert first["state"]["trained"] == [["0123456789abcdef", 0, 0, 0, [1, 9, 2]]]
    assert first["next"] == second["next"] == 9
    assert first["loaded"] == second["loaded"] == []


def test_other_ranks_get_the_leaders_term_and_incarnation() -> None:
    first, second = both("life")
    assert first == second
    assert first["term"] == 5
    assert first["incarnation"]


def test_ranks_that_loaded_different_checkpoints_do_not_train() -> None:
    """One may see what an older node saves late. The weights are then of one checkpoint, and what
    counts as trained is of both."""
    (first, step), (second, _) = both("begins")
    assert "rank 0 with number 18 of term 3; let the first one choose" in first
    assert "rank 1 with number 17 of term 3" in second
    assert step


def test_rank_that_died_is_noticed_by_the_others() -> None:
    first, _ = both("dies", codes=(0, 1))
    assert first.startswith("another rank is gone; start the whole group again")


def test_rank_that_waits_for_another_can_be_interrupted() -> None:
    """It could wait for days, in code that no signal handler interrupts."""
    assert both("interrupted") == ["interrupted", "left alone"]


def test_restarts_that_cannot_work_are_refused_at_the_first_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's second start would wait for the ranks of the first."""
    for name, value in {"WORLD_SIZE": "2", **SHARED_STORE}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LauncherError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        Ranks.from_environment()


def test_single_process_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Ranks.from_environment() is None
