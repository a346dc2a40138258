"""The SGLang engine over a stand-in that dies, hangs, or never comes up."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftfeed_producer.engines import CaptureConfig
from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.errors import EngineError
from standin_engine import HERE, Standin, check_all, group, leftovers, make_prompts
from standin_model import NO_ANSWER
from waiting import eventually

LENGTHS = [5, 30, 1, 70, 9, 2]
PASSES = 40
"""About as many as they take."""
PROCESS = "draftfeed_producer.engines.sglang.process."
NOT_ENDED = "the engine did not end within"
"""Said when it was asked to and waited for in vain."""


@pytest.fixture(autouse=True)
def _nothing_is_left(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No directory, no shared memory, no open file, whatever happens to the engine."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        before = leftovers()
        yield
        eventually(lambda: leftovers() == before, f"{leftovers()}, as before: {before}", 10)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def dies_somewhere(standin: Standin, data: st.DataObject) -> None:
    engine = standin.engine(
        capture=CaptureConfig(prefix_cache=data.draw(st.booleans())),
        lives=standin.lives(),
        die_at_pass=data.draw(st.integers(4, PASSES)),
        die_after_copy=data.draw(st.booleans()),
        die_by=data.draw(st.sampled_from([signal.SIGKILL, 0])),
        chunk=16,
    )
    prompts = make_prompts(LENGTHS)
    check_all(list(engine.run(iter(prompts))), prompts)
    assert engine.recaptured == 0
    engine.close()


def test_an_engine_that_dies_at_any_pass_costs_no_sample(standin: Standin):
    dies_somewhere(standin)


def test_three_deaths_without_a_sample_end_the_run(standin: Standin):
    """It is started for ever, or the reason is nowhere to be read."""
    engine = standin.engine(lives=standin.lives(), die_at_pass=5, deaths=3)
    prompts = make_prompts(LENGTHS)
    words = "died 3 times .* signal SIGKILL; last words: RuntimeError: the scheduler is gone$"
    with pytest.raises(EngineError, match=words):
        list(engine.run(iter(prompts)))
    # Whoever mends it may run again, with a process that lives.
    check_all(list(engine.run(iter(prompts))), prompts)
    engine.close()


def test_an_engine_that_does_not_come_up_again_ends_the_run(standin: Standin):
    engine = standin.engine(lives=standin.lives(), die_at_pass=20, die_at_start=(2, 3))
    prompts = make_prompts(LENGTHS)
    with pytest.raises(EngineError, match="the scheduler is gone; 3 times in a row without a"):
        list(engine.run(iter(prompts)))
    # Whoever mends it may run again, with a process that lives.
    check_all(list(engine.run(iter(prompts))), prompts)
    engine.close()


def test_deaths_with_samples_in_between_do_not_end_the_run(standin: Standin):
    engine = standin.engine(lives=standin.lives(), die_at_pass=18, deaths=4, concurrency=2)
    prompts = make_prompts([5] * 12)
    check_all(list(engine.run(iter(prompts))), prompts)
    engine.close()


def test_an_engine_that_does_not_come_up_again_at_once_gets_another_try(standin: Standin):
    """The GPU's memory is still being freed, and the run ends at the first death."""
    engine = standin.engine(lives=standin.lives(), die_at_pass=20, die_at_start=(2,))
    prompts = make_prompts(LENGTHS)
    check_all(list(engine.run(iter(prompts))), prompts)
    engine.close()


def test_an_engine_that_does_not_come_up_at_first_is_not_tried_again(standin: Standin):
    lives = standin.lives()
    engine = standin.engine(lives=lives, die_at_start=(1, 2, 3, 4), die_by=0)
    with pytest.raises(EngineError, match=r"SGLang did not start: .* exit code 7; last words"):
        list(engine.run(iter(make_prompts([3]))))
    assert Path(lives).stat().st_size == 1
    engine.close()


def test_a_first_request_that_dies_ends_the_run(standin: Standin):
    engine = standin.engine(die_at_pass=1)
    with pytest.raises(EngineError, match="did not answer a first request: the engine ended"):
        list(engine.run(iter(make_prompts([3]))))
    engine.close()


def test_an_engine_killed_between_two_runs_is_started_for_the_second(standin: Standin):
    """The process is there, so the prompts go to one that has died, and nobody answers."""
    engine = standin.engine(children=2)
    prompts = make_prompts(LENGTHS)
    check_all(list(engine.run(iter(prompts))), prompts)
    pid = process_of(engine)
    os.kill(pid, signal.SIGKILL)
    check_all(list(engine.run(iter(prompts))), prompts)
    assert group(pid) == set(), "what it had started is gone, too"
    pid = process_of(engine)
    assert len(group(pid)) == 3
    engine.close()
    assert group(pid) == set()


def process_of(engine: SGLangEngine) -> int:
    assert engine._engine._host is not None
    return engine._engine._host.pid


def test_restarts_leak_nothing(standin: Standin):
    """20 lives: descriptors, shared memory and directories of the dead ones."""
    engine = standin.engine()
    prompts = make_prompts([3])
    seen = set()
    for _ in range(20):
        check_all(list(engine.run(iter(prompts))), prompts)
        seen.add(leftovers())
        os.kill(process_of(engine), signal.SIGKILL)
    assert len(seen) == 1, seen
    engine.close()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "exit code 3; last words: it printed nothing"),
        ("exec <&-; exit 3", "exit code 3"),
        ("echo ImportError: no; echo; exit 1", "last words: ImportError: no$"),
        ("head -c 300000 /dev/urandom; echo; echo the error; exit 1", "last words: the error$"),
        ("head -c 20000000 /dev/zero; exit 3", "exit code 3"),
        ("kill -37 $$", "signal 37"),
        ("kill -TERM $$", "signal SIGTERM"),
    ],
    ids=["silent", "deaf", "words", "garbage", "no-line-end", "nameless-signal", "signal"],
)
def test_an_interpreter_that_ends_is_an_error_in_one_line(
    standin: Standin, script: str, words: str
):
    engine = standin.engine(python=standin.script(script))
    for _ in range(2):
        with pytest.raises(EngineError, match=words) as caught:
            list(engine.run(iter(make_prompts([3]))))
        assert "\n" not in str(caught.value)
    engine.close()


def test_an_interpreter_without_sglang_is_an_error_in_one_line(standin: Standin):
    engine = standin.engine(python=sys.executable)
    with pytest.raises(EngineError, match="No module named 'sglang'"):
        list(engine.run(iter(make_prompts([3]))))
    engine.close()


@pytest.mark.parametrize(
    ("python", "words"),
    [("/nowhere/python", "No such file"), ("/tmp", "Permission denied")],
)
def test_an_interpreter_that_is_not_there_is_an_error_in_one_line(
    standin: Standin, python: str, words: str
):
    engine = standin.engine(python=python)
    with pytest.raises(EngineError, match=rf"\[engine\] python {python}: {words}"):
        list(engine.run(iter(make_prompts([3]))))
    engine.close()


def test_an_engine_that_says_why_it_cannot_start_is_believed(standin: Standin):
    engine = standin.engine(failed="no such GPU (RuntimeError)")
    with pytest.raises(EngineError, match=r"^no such GPU \(RuntimeError\)$"):
        list(engine.run(iter(make_prompts([3]))))
    engine.close()


def test_an_engine_that_never_comes_up_is_given_up(standin: Standin):
    """One that does not even read what it is told."""
    engine = standin.engine(python=standin.script("exec sleep 1000"), start_timeout_seconds=0.3)
    with pytest.raises(EngineError, match=r"did not start within 0 s; .*start_timeout_seconds"):
        list(engine.run(iter(make_prompts([3]))))
    engine.close()


def test_a_process_that_holds_the_output_open_holds_up_nobody(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
):
    """It has left the engine's group, and the end of its output is waited for."""
    monkeypatch.setattr(PROCESS + "_LOG_SECONDS", 0.1)
    engine = standin.engine(python=standin.script("setsid sleep 2 & exit 3"))
    with pytest.raises(EngineError, match="exit code 3"):
        list(engine.run(iter(make_prompts([3]))))
    engine.close()


def test_a_ring_larger_than_the_memory_is_an_error_in_one_line(standin: Standin):
    """Taking it would have the producer killed."""
    engine = standin.engine(ring_bytes=1 << 50)
    words = r"no shared memory of .* are available; lower .*ring_bytes"
    with pytest.raises(EngineError, match=words):
        list(engine.run(iter(make_prompts([3]))))
    engine.close()


def test_shared_memory_that_is_refused_is_an_error_in_one_line(standin: Standin):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = standin.engine(ring_bytes=1 << 24)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(EngineError, match=r"no shared memory of 1. MiB: File too large"):
            list(engine.run(iter(make_prompts([3]))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    engine.close()


def test_a_directory_too_long_for_sockets_is_an_error_in_one_line(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    engine = standin.engine()
    with pytest.raises(EngineError, match="choose another TMPDIR"):
        list(engine.run(iter(make_prompts([3]))))
    assert list(long.iterdir()) == []
    engine.close()


@pytest.mark.parametrize("life", [1, 2])
def test_stop_ends_a_start_and_so_does_close(
    standin: Standin, life: int, caplog: pytest.LogCaptureFixture
):
    """The engine takes half an hour to come up, for the first time or after a death."""
    lives = standin.lives()
    engine = standin.engine(lives=lives, silent=(life,), die_at_pass=5)
    samples: list[object] = []
    thread = threading.Thread(target=lambda: samples.extend(engine.run(iter(make_prompts([5])))))
    thread.start()
    started = Path(lives)
    eventually(lambda: started.exists() and started.stat().st_size == life, "it starts")
    engine.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert samples == []
    pid = process_of(engine)
    engine.close()
    assert NOT_ENDED not in caplog.text, "nobody who starts hears that it should end"
    assert group(pid) == set()


def test_nothing_is_started_after_stop(standin: Standin):
    engine = standin.engine(python="/nowhere/python")
    engine.stop()
    assert list(engine.run(iter(make_prompts([3])))) == []
    engine.close()


def test_an_engine_that_does_not_end_is_killed(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(PROCESS + "_QUIT_SECONDS", 0.2)
    engine = standin.engine(deaf=True, children=2)
    prompts = make_prompts([3, 4])
    check_all(list(engine.run(iter(prompts))), prompts)
    pid = process_of(engine)
    assert len(group(pid)) == 3
    engine.close()
    assert NOT_ENDED in caplog.text
    assert group(pid) == set()
    engine.close()


def test_close_ends_an_engine_that_is_busy(standin: Standin):
    engine = standin.engine()
    run: Any = engine.run(iter(make_prompts([5] * 6, {5: NO_ANSWER})))
    next(run)
    pid = process_of(engine)
    run.close()
    engine.close()
    assert group(pid) == set()


def test_a_killed_producer_leaves_no_engine_behind(standin: Standin):
    """It holds the GPU, and the next producer cannot start."""
    command = [sys.executable, str(HERE / "standin_child.py"), standin.python()]
    with tempfile.TemporaryDirectory() as directory:
        child = subprocess.Popen(
            [*command, str(standin.target_path)],
            env={**standin.environment, "TMPDIR": directory},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        assert len(group(pid)) == 3
        child.kill()
        child.communicate()
        eventually(lambda: not group(pid), "the engine and what it started are gone", 20)
