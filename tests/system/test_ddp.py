"""Data parallel under the real torchrun: gloo, sockets, a producer process, the example's loop."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchrun_run import Step, TorchRun

pytestmark = pytest.mark.timeout(300)
Lives = list[list[Step]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], TorchRun]]:
    runs: list[TorchRun] = []

    def make(samples: int) -> TorchRun:
        run = TorchRun(tmp_path, samples)
        runs.append(run)
        run.wait_for_lines("producer/samples.jsonl", samples)
        return run

    yield make
    for run in runs:
        run.kill_all()


def options(**values: int) -> list[str]:
    pairs = [("--set", f"trainer.options.{key}={value}") for key, value in values.items()]
    return [word for pair in pairs for word in pair]


def test_ranks_have_equal_shares_and_end_on_one_step(start: Callable[[int], TorchRun]) -> None:
    """Though one has a sample more, and the other nothing for the last step: it must not leave
    the first in its all-reduce. All samples are there when the first rank opens."""
    run = start(49)
    run.succeeds(run.torchrun(2, *options(samples=4), run_dir="ranks"))
    ranks = [run.rank_steps(f"ranks/rank{n}") for n in range(2)]
    assert [[len(step.ids) for step in steps] for steps in ranks] == [[4] * 6 + [1], [4] * 6 + [0]]
    assert [step.number for step in ranks[0]] == [step.number for step in ranks[1]]
    assert [step.loss for step in ranks[0]] == [step.loss for step in ranks[1]]
    run.check_finished([[*ranks[0], *ranks[1]]])


def test_after_the_death_of_one_rank_both_go_on_from_the_checkpoint(
    start: Callable[[int], TorchRun],
) -> None:
    run = start(40)
    faults = options(samples=2, save_steps=2, kill_after=5)
    run.succeeds(run.torchrun(2, *faults, run_dir="ranks", restarts=1))
    first, second = run.lives("ranks")
    assert {step.number for step in first} == {1, 2, 3, 4, 5}
    assert min(step.number for step in second) == 5, "the fifth step is in no checkpoint"
    run.check_finished([first, second])


def test_run_goes_on_with_fewer_ranks_and_with_more_again(
    start: Callable[[int], TorchRun],
) -> None:
    run = start(40)
    run.succeeds(run.torchrun(2, *options(samples=2, drain_after=4), run_dir="two"))
    run.succeeds(run.alone(*options(samples=2, drain_after=6), run_dir="one"))
    run.succeeds(run.torchrun(2, *options(samples=2), run_dir="again"))
    lives = [*run.lives("two"), run.rank_steps("one"), *run.lives("again")]
    assert [sorted({step.number for step in life}) for life in lives] == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11, 12],
        [13, 14],
    ]
    run.check_finished(lives)
