"""The engine dies, or its producer does."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sglang_producer_child
from engine_suite import make_prompts
from sglang_engines import (
    Case,
    Reader,
    Running,
    in_order,
    kill_scheduler,
    processes_of,
    started,
    words,
)
from waiting import eventually

pytestmark = pytest.mark.timeout(400)

CASE = Case("tiny_qwen3", (0, 2, 4))
LENGTHS = [5, 23, 1, 14, 9, 31, 8]
LONG = 60
"""New tokens: long enough to be killed in the middle."""


@pytest.fixture(scope="module")
def running(tiny_qwen3: Path) -> Iterator[Running]:
    with started(CASE, tiny_qwen3) as running:
        yield running


@pytest.fixture(scope="module")
def reader(tiny_qwen3: Path) -> Reader:
    return Reader(tiny_qwen3)


def kill_host(session: int) -> None:
    os.kill(session, signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_scheduler, kill_host])
def test_a_death_in_the_middle_costs_no_prompt_and_no_row(
    running: Running, reader: Reader, kill: Callable[[int], None]
):
    """Half a sample after a crash, or finished work done twice."""
    engine = running.with_(max_new_tokens=LONG)
    prompts = make_prompts(LENGTHS)
    # The engine is up, so what is captured from now on is of these prompts.
    list(running.with_(max_new_tokens=1).run(iter(prompts[:1])))
    before, host = engine.captured, running.log.host
    half = before + sum(LENGTHS[:4]) + 2 * LONG

    def in_the_middle() -> None:
        eventually(lambda: engine.captured >= half, "half of the rows of four prompts")
        kill(host)

    killer = threading.Thread(target=in_the_middle)
    killer.start()
    samples = list(engine.run(iter(prompts)))
    killer.join()
    assert running.log.host != host
    assert any("are generated again" in line for line in running.log.lines)
    eventually(lambda: processes_of(host) == {}, "nothing is left of the one that died")
    samples = in_order(samples)
    assert [sample.id for sample in samples] == [prompt.id for prompt in prompts]
    assert [words(s) for s in samples] == [reader.greedy(prompt, LONG) for prompt in prompts]
    reader.check(samples, CASE)


def test_stop_drops_what_is_not_finished_and_runs_no_more(running: Running):
    """A drain must not wait for the longest response, and must hand out nothing that is half."""
    engine = running.with_(max_new_tokens=400)
    list(running.with_(max_new_tokens=1).run(iter(make_prompts([3]))))
    enough = engine.captured + 60

    def in_the_middle() -> None:
        eventually(lambda: engine.captured >= enough, "some rows")
        engine.stop()

    stopper = threading.Thread(target=in_the_middle)
    stopper.start()
    assert list(engine.run(iter(make_prompts([5, 8])))) == []
    stopper.join()
    assert list(engine.run(iter(make_prompts([5])))) == []


def test_a_killed_producer_leaves_no_process_behind(tiny_qwen3: Path, tmp_path: Path):
    """A killed producer's engine would keep its GPUs, and the next start finds no memory."""
    output = tmp_path / "output"
    paths = [str(Path(module).parent) for module in (__file__, make_prompts.__code__.co_filename)]
    paths.append(str(Path(__file__).parents[1]))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, sglang_producer_child.__file__, str(tiny_qwen3)]
    with output.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        eventually(
            lambda: bool(re.search(r"^captured [1-9]\d\d", output.read_text(), re.M)),
            "a hundred rows",
            seconds=280,
        )
        match = re.search(r"starting SGLang, process (\d+)", output.read_text())
        assert match
        host = int(match[1])
        assert any("scheduler" in name for name in processes_of(host).values())
    finally:
        child.kill()
        child.wait()
    eventually(lambda: processes_of(host) == {}, "every process of the engine is gone")
