"""Engines of the real SGLang on the CPU, started once and shared by what can share them."""

import itertools
import logging
import os
import re
import signal
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftfeed_producer.engines import CaptureConfig, SamplingConfig, SGLangConfig
from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.target import Target, TargetConfig, load_target
from draftfeed_proto.descriptor import Final
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample
from engine_suite import FullForward, Reference, errors
from waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
PYTHON = str(ROOT / ".venv-sglang/bin/python")
NEW_TOKENS = 10
TOLERANCE = 1e-3
ON_THE_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "log_level": "info",
    # One line for each batch, by which tests tell what the scheduler did.
    "decode_log_interval": 1,
}


@dataclass(frozen=True)
class Case:
    model: str
    """The fixture with its directory."""
    layer_ids: tuple[int, ...]
    args: dict[str, Any] = field(default_factory=dict)
    prefix_cache: bool = False
    retract: bool = False
    """SGLang throws requests out of the running batch again and again, which otherwise happens
    when the KV cache is full, and takes them up later from their first token."""
    tp_size: int = 1
    final: Final = "none"

    @property
    def layers(self) -> int:
        return len(self.layer_ids) + (self.final != "none")

    @property
    def overlap(self) -> bool:
        return not self.args.get("disable_overlap_schedule", False)

    @property
    def environment(self) -> dict[str, str]:
        # Threads that wait for each other on a core that others use, too, wait long.
        variables = {"OMP_NUM_THREADS": "1"}
        if self.retract:
            variables["SGLANG_TEST_RETRACT"] = "1"
        if self.tp_size > 1:
            # One core for each; SGLang would give each a NUMA node.
            cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
            bound = [str(core) for core in itertools.islice(cores, self.tp_size)]
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
        return variables


class Log(logging.Handler):
    """What the engine's processes print, and what the producer says of them."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @classmethod
    @contextmanager
    def kept(cls) -> Iterator["Log"]:
        logger, log = logging.getLogger("draftfeed_producer.engines.sglang"), cls()
        level = logger.level
        logger.addHandler(log)
        logger.setLevel(logging.DEBUG)
        try:
            yield log
        finally:
            logger.removeHandler(log)
            logger.setLevel(level)

    def numbers(self, pattern: str, since: int = 0) -> list[int]:
        """The pattern's one group, of each line that has it."""
        matches = (re.search(pattern, line) for line in self.lines[since:])
        return [int(match[1]) for match in matches if match]

    @property
    def host(self) -> int:
        """Process id of the newest host, which is that of its session, too."""
        return self.hosts[-1]

    @property
    def hosts(self) -> list[int]:
        return self.numbers(r"starting SGLang, process (\d+)")

    def assert_nothing_left(self) -> None:
        """Of any engine that was started; what was killed may take a moment to go."""
        for host in self.hosts:
            eventually(lambda host=host: processes_of(host) == {}, "nothing left of the engine")


@dataclass
class Running:
    """One life of SGLang. Its engines differ in what is said with each request only."""

    case: Case
    target: Target
    log: Log
    engine: SGLangEngine

    @property
    def path(self) -> Path:
        return self.target.path

    def with_(
        self, staging_bytes: int | None = None, mode: str = "live", **sampling: Any
    ) -> SGLangEngine:
        """An engine around the same processes."""
        engine = make_engine(self.case, self.target, staging_bytes, mode, **sampling)
        engine._engine = self.engine._engine
        return engine

    def logged(self, pattern: str, since: int = 0) -> list[int]:
        """Numbers in the engine's log, of every pass so far."""
        self.whole_log()
        return self.log.numbers(pattern, since)

    def whole_log(self) -> int:
        """Returns the log's length when it has the line of every pass so far.

        The scheduler prints a pass's line after it has sent its responses: so one more prompt goes
        through, of one token that is in no other, whose own line may come later. And a mark goes
        through the pipe behind all that was printed.
        """
        (last,) = prompts_of([np.array([1])])
        assert len(list(self.with_(max_new_tokens=1).run(iter([last])))) == 1
        mark = f"-- {uuid.uuid4()} --"
        Path(f"/proc/{self.log.host}/fd/1").write_text(mark + "\n")
        eventually(lambda: any(mark in line for line in self.log.lines), "the log is read")
        return len(self.log.lines)


def make_engine(
    case: Case,
    target: Target,
    staging_bytes: int | None = None,
    mode: str = "live",
    concurrency: int = 4,
    **sampling: Any,
) -> SGLangEngine:
    config = SGLangConfig(
        python=PYTHON,
        concurrency=concurrency,
        tp_size=case.tp_size,
        dtype="float32",
        ring_bytes=4 << 20,
        start_timeout_seconds=280.0,
        args={**ON_THE_CPU, **case.args},
        sampling=SamplingConfig(**{"max_new_tokens": NEW_TOKENS, **sampling}),
    )
    capture = CaptureConfig(
        mode=mode,  # type: ignore[arg-type]
        prefix_cache=case.prefix_cache,
        staging_bytes=staging_bytes or 1 << 30,
    )
    return SGLangEngine(config, target, case.layer_ids, capture, case.final)


@contextmanager
def started(case: Case, path: Path) -> Iterator[Running]:
    """Starts with the first prompt. Afterwards, none of its processes is left."""
    with pytest.MonkeyPatch.context() as patch, Log.kept() as log:
        for name, value in case.environment.items():
            patch.setenv(name, value)
        target = load_target(TargetConfig(path=str(path)))
        running = Running(case, target, log, make_engine(case, target))
        try:
            yield running
        finally:
            running.engine.close()
            log.assert_nothing_left()


def processes_of(session: int) -> dict[int, str]:
    """Of those that live in this session: process id and command line."""
    found: dict[int, str] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its) == session and state != "Z":
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(directory.name)] = command.decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    return found


def kill_scheduler(session: int) -> None:
    schedulers = [pid for pid, name in processes_of(session).items() if "scheduler" in name]
    assert len(schedulers) == 1, processes_of(session)
    os.kill(schedulers[0], signal.SIGKILL)


def prompts_of(ids: Iterable[np.ndarray]) -> list[Prompt]:
    return [
        Prompt(SampleId("f" * 16, 0, 0, i), f"p{i}", x.astype(np.int32)) for i, x in enumerate(ids)
    ]


def in_order(samples: Iterable[Sample]) -> list[Sample]:
    """Each exactly once."""
    found = sorted(samples, key=lambda sample: sample.id)
    assert len({sample.id for sample in found}) == len(found)
    return found


def words(sample: Sample) -> list[int]:
    """The response."""
    return sample.input_ids[sample.loss_mask == 1].tolist()


def fed(samples: Iterable[Sample]) -> int:
    """Rows that these samples have."""
    return sum(len(sample.input_ids) - 1 for sample in samples)


class Reader:
    """transformers' own answers and states of one target."""

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)
        self._network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.forward = FullForward(path, "float32")

    def greedy(self, prompt: Prompt, new_tokens: int = NEW_TOKENS) -> list[int]:
        """The response, generated alone."""
        alone = torch.from_numpy(prompt.input_ids.astype(np.int64))[None]
        out = self._network.generate(
            alone,
            max_new_tokens=new_tokens,
            do_sample=False,
            attention_mask=torch.ones_like(alone),
        )
        return out[0, len(prompt.input_ids) :].tolist()

    def reference(self, sample: Sample) -> Reference:
        return self.forward(sample.input_ids[:-1])

    def check(self, samples: Iterable[Sample], case: Case) -> float:
        """Every row of every sample is there and equal. Returns the worst row's error."""
        worst = 0.0
        for sample in samples:
            n = len(sample.input_ids) - 1
            reference = self.reference(sample)
            wanted = [reference.blocks[:, k] for k in case.layer_ids]
            if case.final != "none":
                wanted.append(reference.of_final(case.final))
            assert sample.hidden_states.shape[:2] == (n, len(wanted))
            for i, want in enumerate(wanted):
                error = errors(sample.hidden_states[:, i].astype(np.float32), want)
                assert error.max() <= TOLERANCE, (sample.id, i, error.max(), error.argmax())
                worst = max(worst, float(error.max()))
        return worst
