"""Two ranks of one training run, as torchrun starts them, told to stop through the first."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun
from processes import Run

pytestmark = pytest.mark.timeout(300)
RANKED = ("--set", f"trainer.function={__name__}:ranked")


def ranked(stream: HiddenStateStream, run: TrainerRun) -> None:
    """Named in the configuration: all ranks step together, until one is told to stop."""
    path = run.output_dir / "state.json"
    assert stream.descriptor
    if path.exists():
        stream.load_state_dict(json.loads(path.read_text()))
    step = 0
    while not (agreed := stream.agree(bool(items := stream.batch(1)))).over:
        if agreed.step:
            step += 1
            stream.trained([item["id"] for item in items], step)
        if agreed.draining:
            break
        threading.Event().wait(run.options.get("step_seconds", 0.0))
    state: dict[str, Any] = stream.state_dict()
    path.write_text(json.dumps(state))
    stream.committed(state)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, 0)
    yield run
    run.kill_all()


def ranks(run: Run, life: str, *options: str) -> list[Run.Process]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        run.start("consumer", *RANKED, *options, run_dir=life, RANK=str(n), **world)
        for n in range(2)
    ]


def test_drain_of_the_first_rank_ends_all_and_the_next_start_trains_only_the_rest(
    run: Run,
) -> None:
    producer = run.start("producer")
    first = ranks(run, "first", "--set", "trainer.options.step_seconds=0.5")
    for n in range(2):
        run.wait_for_lines(f"first/rank{n}/steps.jsonl", 2)
    code, output = run.ended(run.drain())
    assert code == 0, output
    assert f"draining the consumer {first[0].pid} on " in output
    for process in (*first, *ranks(run, "second")):
        run.succeeds(process)
    run.succeeds(producer)
    steps = [
        id for life in ("first", "second") for n in range(2) for id in run.steps(f"{life}/rank{n}")
    ]
    assert sorted(steps) == sorted(run.expected())
