"""The real SGLang engine of the producer over the stand-in, and what its samples must be."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import Qwen3Config

from draftfeed_producer.engines import CaptureConfig, SamplingConfig, SGLangConfig
from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.target import Target, TargetConfig, load_target
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample
from standin_host import ZYGOTE
from standin_model import HIDDEN, LARGEST, LAYERS, VOCAB, Knobs, answer, large, states
from tiny_models import EOS, make_tokenizer
from waiting import eventually

HERE = Path(__file__).parent
NEW_TOKENS = 12
LAYER_IDS = (1, 3, 5)
assert len(LAYER_IDS) == LAYERS


def make_target(path: Path) -> Target:
    """Without weights that anybody could load."""
    make_tokenizer(path)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 7}
    config = Qwen3Config(dtype="bfloat16", eos_token_id=EOS, **sizes)
    config.save_pretrained(path)
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return load_target(TargetConfig(path=str(path), revision="r"))


class Standin:
    """Engines for tests. Owns the process that forks schedulers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.target_path = directory / "target"
        self.target = make_target(self.target_path)
        # Its address must be short, and pytest's directories are not.
        self._sockets = tempfile.TemporaryDirectory()
        address = f"{self._sockets.name}/standin"
        self._zygote = subprocess.Popen(
            [sys.executable, str(HERE / "standin_scheduler.py"), address],
            stdin=subprocess.PIPE,
            env=child_environment(),
        )
        self.environment = {**child_environment(), ZYGOTE: address}
        eventually(lambda: os.path.exists(address), "the stand-in is up")
        self._scripts = 0

    def close(self) -> None:
        self._zygote.kill()
        self._zygote.communicate()
        self._sockets.cleanup()

    def python(self) -> str:
        """An interpreter, as far as the engine can tell."""
        names = ("PYTHONPATH", ZYGOTE)
        variables = " ".join(f"{name}='{self.environment[name]}'" for name in names)
        return self.script(f'exec env {variables} {sys.executable} {HERE}/standin_host.py "$@"')

    def script(self, text: str) -> str:
        self._scripts += 1
        path = self._directory / f"python{self._scripts}"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def lives(self) -> str:
        self._scripts += 1
        return str(self._directory / f"lives{self._scripts}")

    def engine(
        self,
        *,
        python: str | None = None,
        concurrency: int = 4,
        ring_bytes: int = 1 << 20,
        start_timeout_seconds: float = 60.0,
        max_new_tokens: int = NEW_TOKENS,
        capture: CaptureConfig | None = None,
        **knobs: Any,
    ) -> SGLangEngine:
        config = SGLangConfig(
            python=python or self.python(),
            concurrency=concurrency,
            ring_bytes=ring_bytes,
            start_timeout_seconds=start_timeout_seconds,
            sampling=SamplingConfig(max_new_tokens=max_new_tokens),
            args={"standin": msgspec.to_builtins(Knobs(**knobs))},
        )
        return SGLangEngine(config, self.target, LAYER_IDS, capture)


def child_environment() -> dict[str, str]:
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def make_prompts(lengths: list[int], tricks: dict[int, int] | None = None) -> list[Prompt]:
    """tricks: by index, the first token of a prompt that is answered badly."""
    rng = np.random.default_rng(5)
    prompts = []
    for i, length in enumerate(lengths):
        ids = rng.integers(3, VOCAB, length).astype(np.int32)
        if tricks and i in tricks:
            ids[0] = tricks[i]
        prompts.append(Prompt(SampleId("f" * 16, 0, 0, i), f"p{i}", ids))
    return prompts


def check(sample: Sample, prompt: Prompt, max_new_tokens: int = NEW_TOKENS) -> None:
    """Every bit of it."""
    ids, p = prompt.input_ids, len(prompt.input_ids)
    response = prompt.response_ids
    if response is None:
        response = np.array(answer(ids.tolist(), max_new_tokens, [EOS]), np.int32)
    np.testing.assert_array_equal(sample.input_ids, np.concatenate([ids, response]))
    assert sample.input_ids.dtype == np.int32
    assert sample.loss_mask.tolist() == [0] * p + [1] * len(response)
    fed = sample.input_ids[:-1].astype(np.int64)
    want = states(fed, np.arange(len(fed))).clip(-LARGEST, LARGEST).astype(np.float16)
    np.testing.assert_array_equal(sample.hidden_states, want)
    assert [c.saturated for c in sample.counters] == [0, large(fed).sum(), 0]
    assert (sample.id, sample.key) == (prompt.id, prompt.key)


def check_all(samples: list[Sample], prompts: list[Prompt], **options: int) -> None:
    """Each of them, once."""
    assert sorted(s.id.ordinal for s in samples) == [p.id.ordinal for p in prompts]
    by_id = {prompt.id: prompt for prompt in prompts}
    for sample in samples:
        check(sample, by_id[sample.id], **options)


def fed_rows(prompts: list[Prompt], max_new_tokens: int = NEW_TOKENS) -> int:
    return sum(
        len(p.input_ids) + len(answer(p.input_ids.tolist(), max_new_tokens, [EOS])) - 1
        for p in prompts
    )


def leftovers() -> tuple[int, int, int]:
    """What engines can leave behind: directories, mappings of slabs, open files of this process."""
    directories = len(list(Path(tempfile.gettempdir()).glob("draftfeed-engine-*")))
    mappings = Path("/proc/self/maps").read_text().count("memfd:draftfeed-slabs")
    return directories, mappings, len(list(Path("/proc/self/fd").iterdir()))


def group(pid: int) -> set[int]:
    """Processes of that process group that have not ended."""
    return {one for one, pgid, state in _processes() if pgid == pid and state != "Z"}


def _processes() -> Iterator[tuple[int, int, str]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgid = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(path.parent.name), int(pgid), state
